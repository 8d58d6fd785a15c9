// A file on its way through the server's upload route: sent whole, read as fast as the server can, text as it comes.
//
// It has the face of a Link (link.js), so that the page shows both alike.

import { SENTENCE_END } from "./export.js";
import { uploadProblem } from "./reasons.js";

const TICK_MS = 250;
const TRANSCRIPTION = "conversation.item.input_audio_transcription.";
// A caption ends with a sentence that makes it so long, or before a pause.
const ENOUGH_CHARACTERS = 160;
const PAUSE_SECONDS = 0.7;

export class Upload extends EventTarget {
  live = false;
  sessions = 1;
  waitingSeconds = 0;

  // `seconds` is how long the file lasts, NaN if the browser cannot tell. `offset` is where it begins on the
  // transcript's clock, `fields` go into the form.
  constructor({ file, seconds, key, offset, transcript, fields }) {
    super();
    Object.assign(this, { file, seconds, key, offset, transcript, fields });
    this.state = "idle";
    this.sent = 0;
    this.readSeconds = 0;
    this.turns = 0;
    this.turn = null;
    this.taken = 0;
  }

  start() {
    const form = new FormData();
    for (const [name, value] of Object.entries({ model: "default", stream: "true", ...this.fields })) {
      if (Array.isArray(value)) value.forEach((one) => form.append(`${name}[]`, one));
      else form.append(name, value);
    }
    form.append("timestamp_granularities[]", "word");
    form.append("file", this.file);
    const request = (this.request = new XMLHttpRequest());
    request.open("POST", new URL("v1/audio/transcriptions", document.baseURI));
    if (this.key) request.setRequestHeader("Authorization", `Bearer ${this.key}`);
    request.upload.onprogress = ({ loaded, total }) => (this.sent = total ? loaded / total : 0);
    request.upload.onload = () => this.#set("listening");
    request.onprogress = () => this.#read();
    request.onload = () => this.#end(uploadProblem(request.status, request.responseText));
    request.onerror = () => this.#end("The server went away while it read the file.");
    this.timer = setInterval(() => this.dispatchEvent(new Event("tick")), TICK_MS);
    this.#set("connecting");
    request.send(form);
  }

  // What came so far stays.
  stop(problem = "") {
    if (this.over) return;
    this.request.abort();
    this.#end(problem);
  }

  finish() {
    this.stop();
  }

  get over() {
    return this.state === "closed";
  }

  get edge() {
    return this.offset + this.readSeconds;
  }

  get ackedEdge() {
    return this.edge;
  }

  // From 0 to 1, or null when nobody knows. Sending is told apart from reading by `state`.
  get progress() {
    if (this.state === "connecting") return this.sent;
    return Number.isFinite(this.seconds) ? Math.min(1, this.readSeconds / this.seconds) : null;
  }

  #set(state, detail = "") {
    this.state = state;
    this.dispatchEvent(Object.assign(new Event("state"), { state, detail }));
  }

  // The answer grows; whole events are taken from where the last one ended.
  #read() {
    if (this.request.status !== 200) return;
    const text = this.request.responseText;
    for (let end = text.indexOf("\n\n", this.taken); end >= 0; end = text.indexOf("\n\n", this.taken)) {
      const data = text.slice(this.taken, end).replace(/^data: /, "");
      this.taken = end + 2;
      if (data !== "[DONE]") this.#take(JSON.parse(data));
    }
  }

  #take(event) {
    if (event.error) this.stop(event.error.message);
    else if (event.type === "transcript.text.delta") this.#grow(event.delta, event.words ?? []);
    else if (event.type === "transcript.text.done") {
      this.#complete();
      this.readSeconds = event.duration ?? this.readSeconds;
      this.finished = true;
    }
  }

  #grow(delta, words) {
    const start = words[0]?.start ?? this.readSeconds;
    if (this.turn && (this.turn.full || start - this.readSeconds > PAUSE_SECONDS)) this.#complete();
    this.turn ??= { id: `file-${this.offset}-${(this.turns += 1)}`, text: "", words: [], start };
    const { turn } = this;
    const shown = turn.text ? delta : delta.trimStart();
    turn.text += shown;
    turn.words.push(...words);
    turn.full = turn.text.length > ENOUGH_CHARACTERS && SENTENCE_END.test(turn.text.trimEnd());
    this.readSeconds = Math.max(this.readSeconds, words.at(-1)?.end ?? start);
    const started = { type: "input_audio_buffer.speech_started", item_id: turn.id, audio_start_ms: turn.start * 1000 };
    this.transcript.apply(started, this.offset);
    this.transcript.apply({ type: `${TRANSCRIPTION}delta`, item_id: turn.id, delta: shown, words }, this.offset);
  }

  #complete() {
    if (!this.turn) return;
    const { id, text, words, start } = this.turn;
    const times = { audio_start_ms: start * 1000, audio_end_ms: this.readSeconds * 1000 };
    const completed = { type: `${TRANSCRIPTION}completed`, item_id: id, transcript: text, words, ...times };
    this.transcript.apply(completed, this.offset);
    this.turn = null;
  }

  #end(problem) {
    if (this.over) return;
    clearInterval(this.timer);
    if (!problem && this.request.readyState === XMLHttpRequest.DONE && !this.finished) {
      this.#read();
      if (this.over) return;
      if (!this.finished) problem = "The server stopped before the file was read to its end.";
    }
    this.transcript.abandonOpen({ again: false });
    this.#set("closed", problem);
  }
}

// How long a file lasts, by what the browser can read of it; NaN if that is nothing.
export function lengthOf(file) {
  return new Promise((resolve) => {
    const audio = new Audio();
    const tell = (seconds) => {
      URL.revokeObjectURL(audio.src);
      resolve(seconds);
    };
    audio.preload = "metadata";
    audio.onloadedmetadata = () => tell(audio.duration);
    audio.onerror = () => tell(NaN);
    audio.src = URL.createObjectURL(file);
  });
}
