// Sends a whole file to the server's upload route, and puts the streamed text into the transcript.
//
// The server transcribes as fast as it can. `Upload` has the same events and getters as `RealtimeConnection`
// (realtime-connection.js), so that the page handles both alike.

import { refusalReason, unreadyReason, uploadRefusalReason } from "./error-texts.js";
import { clock, percent, roughly } from "./format.js";
import { secondsToWait } from "./retry.js";
import { isWithin } from "./transcript.js";
import { TurnCutter } from "./turn-cutter.js";

const TICK_MS = 250;
const TRANSCRIPTION = "conversation.item.input_audio_transcription.";
// If the server closes the connection more often than this although it is ready, the file is refused.
const MAX_BREAKS = 2;
// How long the browser may take to find the file's duration.
const DURATION_TIMEOUT_MS = 10_000;
// After this time without progress the page asks whether the server is ready. The model may need as long for half a
// minute of sound, so the time alone does not mean that the connection is broken.
const IDLE_MS = 8000;

export class Upload extends EventTarget {
  live = false;
  sessions = 1;
  waitingSeconds = 0;
  // No progress, and the server does not answer other requests either.
  doubtful = false;

  // `offset` is where the file begins on the transcript's clock, in seconds. `modelOptions()` resolves to form fields
  // for the model; `speakers()` says whether to request speaker labels.
  constructor({ file, key, offset, transcript, modelOptions, speakers }) {
    super();
    Object.assign(this, { file, key, offset, transcript, modelOptions, speakers });
    this.state = "idle";
    // The file's duration; NaN until the browser has found it, and if it cannot.
    this.seconds = NaN;
    // Failed attempts; connections that broke although the server was ready; completed turns; seconds of the file that
    // are transcribed.
    this.tries = this.breaks = this.turns = this.readSeconds = 0;
  }

  start() {
    durationOf(this.file).then((seconds) => (this.seconds = seconds));
    this.timer = setInterval(() => this.#tick(), TICK_MS);
    this.#send();
  }

  get silentSeconds() {
    return this.doubtful ? (Date.now() - this.lastProgressAt) / 1000 : 0;
  }

  #tick() {
    if (this.state !== "lost" && Date.now() - this.lastProgressAt > IDLE_MS) this.#probe();
    this.dispatchEvent(new Event("tick"));
  }

  async #probe() {
    if (this.probing) return;
    this.probing = true;
    const before = this.lastProgressAt;
    const reason = await unreadyReason();
    if (this.lastProgressAt === before) this.doubtful = Boolean(reason) && !reason.soon;
    await new Promise((done) => setTimeout(done, IDLE_MS / 4));
    this.probing = false;
  }

  #progressed() {
    this.lastProgressAt = Date.now();
    this.doubtful = false;
  }

  async #send() {
    clearTimeout(this.retry);
    this.cutter = new TurnCutter();
    // Characters of the response that are parsed, and the part of the file that is sent (0 to 1).
    this.parsedLength = this.sentFraction = 0;
    this.finished = false;
    // For the estimate of the time left: when sending or transcribing began, and the first and the last progress of the
    // latter. `read` is in seconds of the file.
    this.phaseStart = { at: Date.now(), read: 0 };
    this.progressPoints = [];
    this.#progressed();
    this.#set("connecting");
    const fields = { model: "default", stream: "true", ...(await this.modelOptions()) };
    if (this.closed) return;
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
      this.#progressed();
      this.sentFraction = total ? loaded / total : 0;
    };
    request.upload.onload = () => {
      this.#progressed();
      this.phaseStart = { at: Date.now(), read: 0 };
      this.#set("listening");
    };
    request.onprogress = () => {
      this.#progressed();
      this.#read();
    };
    request.onload = () => (request.status === 200 ? this.#end() : this.#refused());
    request.onerror = () => this.#onNetworkError();
    request.send(form);
  }

  async #refused() {
    const { status, responseText } = this.request;
    this.#failed(await uploadRefusalReason(this.file.name, status, responseText, this.key));
  }

  // The connection broke; or the server responded before it had received the file, and closed the connection.
  async #onNetworkError() {
    if (this.turns || this.cutter.open) {
      this.#end(`The server went away while it transcribed ${this.file.name}.`);
      return;
    }
    try {
      await this.file.slice(0, 1).arrayBuffer();
    } catch {
      this.#failed({ final: true, text: `${this.file.name} cannot be read on this device: it is a folder, or was changed or moved.` });
      return;
    }
    const reason = await refusalReason(this.key);
    this.breaks += reason.unexplained ? 1 : 0;
    const text = `The connection broke while ${this.file.name} was sent. It may be larger than the server takes.`;
    if (this.breaks > MAX_BREAKS) this.#failed({ final: true, text });
    else this.#failed(reason.unexplained ? { text: "Server lost" } : reason);
  }

  // Ends the upload for a final reason (see error-texts.js), or else schedules another attempt.
  #failed(reason) {
    if (this.closed) return;
    if (reason.final) {
      this.#end(reason.text);
      if (reason.key) this.dispatchEvent(new Event("key"));
      return;
    }
    const seconds = secondsToWait(reason, this.tries);
    this.tries += 1;
    this.retryAt = Date.now() + seconds * 1000;
    this.retry = setTimeout(() => this.#send(), seconds * 1000);
    this.#set("lost", reason.text);
  }

  retryNow() {
    if (this.state === "lost") this.#send();
  }

  // Ends the upload; the text so far stays.
  stop(problem = "") {
    if (this.closed) return;
    this.request?.abort();
    this.#end(problem);
  }

  finish() {
    this.stop();
  }

  get closed() {
    return this.state === "closed";
  }

  get endSeconds() {
    return this.offset + this.readSeconds;
  }

  get ackedSeconds() {
    return this.endSeconds;
  }

  // Progress from 0 to 1, or null if it is unknown: of sending in the state `connecting`, of transcribing in
  // `listening`.
  get progress() {
    if (this.state !== "listening") return this.sentFraction;
    return Number.isFinite(this.seconds) ? Math.min(0.99, this.#readNow / this.seconds) : null;
  }

  // The progress as a text, with the time left.
  get facts() {
    if (this.state === "lost") return "";
    const { progress } = this;
    if (this.state === "connecting") {
      const seconds = (Date.now() - this.phaseStart.at) / 1000;
      return `Sent ${percent(progress)}${progress ? timeLeft((seconds * (1 - progress)) / progress) : ""}`;
    }
    if (!this.readSeconds) return `Waiting for the first words, ${clock((Date.now() - this.phaseStart.at) / 1000)} so far`;
    if (progress === null) return `${clock(this.readSeconds)} transcribed so far`;
    return `${percent(progress)}${timeLeft((this.seconds - this.#readNow) / this.#speed)}`;
  }

  // Seconds of the file that are transcribed in a second, measured from the first words if possible: these may also
  // have waited for other files.
  get #speed() {
    const from = this.progressPoints.length > 1 ? this.progressPoints[0] : this.phaseStart;
    const to = this.progressPoints.at(-1);
    return to && to.at > from.at ? (1000 * (to.read - from.read)) / (to.at - from.at) : 0;
  }

  // The transcribed seconds, estimated: between two deltas the speed is assumed to be constant.
  get #readNow() {
    const last = this.progressPoints.at(-1);
    if (!last) return 0;
    return Math.min(this.seconds, last.read + (this.#speed * (Date.now() - last.at)) / 1000);
  }

  #set(state, detail = "") {
    this.state = state;
    this.dispatchEvent(Object.assign(new Event("state"), { state, detail }));
  }

  // Parses the complete server-sent events that have arrived since the last call.
  #read() {
    if (this.request.status !== 200) return;
    const text = this.request.responseText;
    for (let end = text.indexOf("\n\n", this.parsedLength); end >= 0; end = text.indexOf("\n\n", this.parsedLength)) {
      const data = text.slice(this.parsedLength, end);
      this.parsedLength = end + 2;
      if (data.startsWith("data: ") && data !== "data: [DONE]") this.#apply(JSON.parse(data.slice(6)));
    }
  }

  #apply(event) {
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
    if (this.cutter.endSeconds <= this.readSeconds) return;
    this.readSeconds = this.cutter.endSeconds;
    this.progressPoints.push({ at: Date.now(), read: this.readSeconds });
    if (this.progressPoints.length > 2) this.progressPoints.splice(1, this.progressPoints.length - 2);
  }

  // Speaker labels arrive some words later than the words.
  #label({ speaker, start, end }) {
    for (const word of this.cutter.words) if (isWithin(word, start, end)) word.speaker = speaker;
    this.transcript.label(speaker, this.offset + start, this.offset + end);
  }

  get #id() {
    return `file-${this.offset}-${this.turns}`;
  }

  // Puts new text of the unfinished turn into the transcript.
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
    if (this.closed) return;
    clearInterval(this.timer);
    clearTimeout(this.retry);
    if (!problem && this.request?.readyState === XMLHttpRequest.DONE && !this.finished) {
      this.#read();
      if (this.closed) return;
      if (!this.finished) problem = `The server stopped before ${this.file.name} was read to its end.`;
    }
    const hasText = this.turns || this.cutter.open;
    this.transcript.abandonOpen({ resend: false });
    if (hasText && !this.finished) {
      const total = Number.isFinite(this.seconds) ? ` of ${clock(this.seconds)}` : "";
      this.transcript.note(`${this.file.name} was stopped at ${clock(this.readSeconds)}${total}`, this.endSeconds);
    }
    this.#set("closed", problem);
  }
}

function timeLeft(seconds) {
  return Number.isFinite(seconds) ? `, ${roughly(Math.max(0, seconds))} left` : "";
}

// The duration of a file in seconds, if the browser can read it; otherwise NaN.
function durationOf(file) {
  return new Promise((resolve) => {
    const audio = new Audio();
    const finish = (seconds) => {
      clearTimeout(timer);
      URL.revokeObjectURL(audio.src);
      resolve(seconds);
    };
    const timer = setTimeout(() => finish(NaN), DURATION_TIMEOUT_MS);
    audio.preload = "metadata";
    audio.onloadedmetadata = () => finish(audio.duration);
    audio.onerror = () => finish(NaN);
    audio.src = URL.createObjectURL(file);
  });
}
