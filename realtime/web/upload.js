// A file on its way through the server's upload route: sent whole, read as fast as the server can, text as it comes.
//
// It has the face of a Link (link.js), so that the page shows both alike.

import { clock, percent, roughly } from "./format.js";
import { whyNotReady, whyNotTaken, whyRefused } from "./reasons.js";
import { secondsToWait } from "./retry.js";
import { isWithin } from "./transcript.js";
import { TurnCutter } from "./turn-cutter.js";

const TICK_MS = 250;
const TRANSCRIPTION = "conversation.item.input_audio_transcription.";
// A server that is well and breaks the connection so often does not want this file.
const MOST_BREAKS = 2;
const LENGTH_MS = 10_000;
// Half a minute of sound may take so long to read, so silence alone says nothing about the line.
const DOUBT_MS = 8000;

export class Upload extends EventTarget {
  live = false;
  sessions = 1;
  waitingSeconds = 0;
  // Nothing comes back, and the server does not answer other questions either.
  doubtful = false;

  // `offset` is where it begins on the transcript's clock, `wishes()` are for the model, and `speakers()` says whether to ask
  // who speaks.
  constructor({ file, key, offset, transcript, wishes, speakers }) {
    super();
    Object.assign(this, { file, key, offset, transcript, wishes, speakers });
    this.state = "idle";
    // How long the file lasts, NaN while and if the browser cannot tell.
    this.seconds = NaN;
    this.tries = this.breaks = this.turns = this.readSeconds = 0;
  }

  start() {
    lengthOf(this.file).then((seconds) => (this.seconds = seconds));
    this.timer = setInterval(() => this.#tick(), TICK_MS);
    this.#send();
  }

  get silentSeconds() {
    return this.doubtful ? (Date.now() - this.stirredAt) / 1000 : 0;
  }

  #tick() {
    if (this.state !== "lost" && Date.now() - this.stirredAt > DOUBT_MS) this.#probe();
    this.dispatchEvent(new Event("tick"));
  }

  async #probe() {
    if (this.probing) return;
    this.probing = true;
    const asked = this.stirredAt;
    const why = await whyNotReady();
    if (this.stirredAt === asked) this.doubtful = Boolean(why) && !why.soon;
    await new Promise((done) => setTimeout(done, DOUBT_MS / 4));
    this.probing = false;
  }

  #stirred() {
    this.stirredAt = Date.now();
    this.doubtful = false;
  }

  async #send() {
    clearTimeout(this.retry);
    this.cutter = new TurnCutter();
    this.taken = this.sent = 0;
    this.finished = false;
    // When sending began, when reading did, and when it had come how far: for what is left.
    this.began = { at: Date.now(), read: 0 };
    this.places = [];
    this.#stirred();
    this.#set("connecting");
    const fields = { model: "default", stream: "true", ...(await this.wishes()) };
    if (this.over) return;
    const form = new FormData();
    for (const [name, value] of Object.entries(fields)) {
      if (Array.isArray(value)) value.forEach((one) => form.append(`${name}[]`, one));
      else form.append(name, value);
    }
    form.append("timestamp_granularities[]", "word");
    if (this.speakers()) form.append("speakers", "true");
    this.transcript.newRecording();
    form.append("file", this.file);
    const request = (this.request = new XMLHttpRequest());
    request.open("POST", new URL("v1/audio/transcriptions", document.baseURI));
    if (this.key) request.setRequestHeader("Authorization", `Bearer ${this.key}`);
    request.upload.onprogress = ({ loaded, total }) => {
      this.#stirred();
      this.sent = total ? loaded / total : 0;
    };
    request.upload.onload = () => {
      this.#stirred();
      this.began = { at: Date.now(), read: 0 };
      this.#set("listening");
    };
    request.onprogress = () => {
      this.#stirred();
      this.#read();
    };
    request.onload = () => (request.status === 200 ? this.#end() : this.#refused());
    request.onerror = () => this.#broken();
    request.send(form);
  }

  async #refused() {
    const { status, responseText } = this.request;
    this.#notNow(await whyNotTaken(this.file.name, status, responseText, this.key));
  }

  // The line broke, or the server answered before it had read the file and hung up.
  async #broken() {
    if (this.turns || this.cutter.open) {
      this.#end(`The server went away while it transcribed ${this.file.name}.`);
      return;
    }
    try {
      await this.file.slice(0, 1).arrayBuffer();
    } catch {
      this.#notNow({ final: true, text: `${this.file.name} cannot be read on this device: it is a folder, or was changed or moved.` });
      return;
    }
    const why = await whyRefused(this.key);
    this.breaks += why.well ? 1 : 0;
    const text = `The connection broke while ${this.file.name} was sent. It may be larger than the server takes.`;
    if (this.breaks > MOST_BREAKS) this.#notNow({ final: true, text });
    else this.#notNow(why.well ? { text: "Server lost" } : why);
  }

  #notNow(why) {
    if (this.over) return;
    if (why.final) {
      this.#end(why.text);
      if (why.key) this.dispatchEvent(new Event("key"));
      return;
    }
    const seconds = secondsToWait(why, this.tries);
    this.tries += 1;
    this.retryAt = Date.now() + seconds * 1000;
    this.retry = setTimeout(() => this.#send(), seconds * 1000);
    this.#set("lost", why.text);
  }

  retryNow() {
    if (this.state === "lost") this.#send();
  }

  // What came so far stays.
  stop(problem = "") {
    if (this.over) return;
    this.request?.abort();
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

  // From 0 to 1, or null where it cannot be told. Sending is told apart from reading by `state`.
  get progress() {
    if (this.state !== "listening") return this.sent;
    return Number.isFinite(this.seconds) ? Math.min(0.99, this.#readNow / this.seconds) : null;
  }

  // The same in words, with what is left.
  get facts() {
    if (this.state === "lost") return "";
    const { progress } = this;
    if (this.state === "connecting") {
      const seconds = (Date.now() - this.began.at) / 1000;
      return `Sent ${percent(progress)}${progress ? left((seconds * (1 - progress)) / progress) : ""}`;
    }
    if (!this.readSeconds) return `Waiting for the first words, ${clock((Date.now() - this.began.at) / 1000)} so far`;
    if (progress === null) return `${clock(this.readSeconds)} transcribed so far`;
    return `${percent(progress)}${left((this.seconds - this.#readNow) / this.#speed)}`;
  }

  // Seconds of the file that are read in a second. The first words also waited for other files.
  get #speed() {
    const from = this.places.length > 1 ? this.places[0] : this.began;
    const to = this.places.at(-1);
    return to && to.at > from.at ? (1000 * (to.read - from.read)) / (to.at - from.at) : 0;
  }

  // Text comes in large pieces; in between the file is read on at the same speed.
  get #readNow() {
    const last = this.places.at(-1);
    if (!last) return 0;
    return Math.min(this.seconds, last.read + (this.#speed * (Date.now() - last.at)) / 1000);
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
      const data = text.slice(this.taken, end);
      this.taken = end + 2;
      if (data.startsWith("data: ") && data !== "data: [DONE]") this.#take(JSON.parse(data.slice(6)));
    }
  }

  #take(event) {
    if (event.error) this.stop(event.error.message);
    else if (event.type === "transcript.text.delta") this.#grow(event.delta, event.words ?? []);
    else if (event.type === "transcript.text.segment") this.#label(event);
    else if (event.type === "transcript.text.done") {
      const last = this.cutter.end();
      if (last) this.#complete(last);
      this.readSeconds = event.duration ?? this.readSeconds;
      this.finished = true;
    }
  }

  #grow(delta, words) {
    for (const turn of this.cutter.push(delta, words)) this.#complete(turn);
    this.#showOpen();
    if (this.cutter.until <= this.readSeconds) return;
    this.readSeconds = this.cutter.until;
    this.places.push({ at: Date.now(), read: this.readSeconds });
    if (this.places.length > 2) this.places.splice(1, this.places.length - 2);
  }

  // Who speaks is known some words later than the words.
  #label({ speaker, start, end }) {
    for (const word of this.cutter.words) if (isWithin(word, start, end)) word.speaker = speaker;
    this.transcript.label(speaker, this.offset + start, this.offset + end);
  }

  get #id() {
    return `file-${this.offset}-${this.turns}`;
  }

  // The caption that is not finished yet, as far as it has not been shown.
  #showOpen() {
    const { open } = this.cutter;
    if (!open) return;
    const id = this.#id;
    this.transcript.apply({ type: "input_audio_buffer.speech_started", item_id: id, audio_start_ms: open.start * 1000 }, this.offset);
    const shown = this.transcript.byId.get(id);
    const delta = open.text.slice(shown.text.length);
    const words = open.words.slice(shown.words.length);
    if (delta || words.length) this.transcript.apply({ type: `${TRANSCRIPTION}delta`, item_id: id, delta, words }, this.offset);
  }

  #complete({ text, words, start, end }) {
    const times = { audio_start_ms: start * 1000, audio_end_ms: end * 1000 };
    this.transcript.apply({ type: `${TRANSCRIPTION}completed`, item_id: this.#id, transcript: text, words, ...times }, this.offset);
    this.turns += 1;
  }

  #end(problem = "") {
    if (this.over) return;
    clearInterval(this.timer);
    clearTimeout(this.retry);
    if (!problem && this.request?.readyState === XMLHttpRequest.DONE && !this.finished) {
      this.#read();
      if (this.over) return;
      if (!this.finished) problem = `The server stopped before ${this.file.name} was read to its end.`;
    }
    const begun = this.turns || this.cutter.open;
    this.transcript.abandonOpen({ again: false });
    if (begun && !this.finished) {
      const whole = Number.isFinite(this.seconds) ? ` of ${clock(this.seconds)}` : "";
      this.transcript.note(`${this.file.name} was stopped at ${clock(this.readSeconds)}${whole}`, this.edge);
    }
    this.#set("closed", problem);
  }
}

function left(seconds) {
  return Number.isFinite(seconds) ? `, ${roughly(Math.max(0, seconds))} left` : "";
}

// How long a file lasts, by what the browser can read of it; NaN if that is nothing.
function lengthOf(file) {
  return new Promise((resolve) => {
    const audio = new Audio();
    const tell = (seconds) => {
      clearTimeout(timer);
      URL.revokeObjectURL(audio.src);
      resolve(seconds);
    };
    const timer = setTimeout(() => tell(NaN), LENGTH_MS);
    audio.preload = "metadata";
    audio.onloadedmetadata = () => tell(audio.duration);
    audio.onerror = () => tell(NaN);
    audio.src = URL.createObjectURL(file);
  });
}
