// The recording under way, if there is one: where its sound comes from and the link that carries it.

import { FileSource } from "./file-source.js";
import { Link } from "./link.js";
import { Microphone, TAB } from "./microphone.js";
import { fileProblem, microphoneProblem } from "./reasons.js";
import { Upload, lengthOf } from "./upload.js";

const RESUMED_SHOWN_MS = 4000;
const CONTINUED = { resumed: "Resumed, nothing lost", restarted: "Back, in a new session" };
// An upload has no source of its own: the file goes as it is.
const NO_SOURCE = { live: false, start() {}, close() {} };

// Tells `change` when there is something new to show, `problem` with a text, `sound` with each chunk, `opened` when a
// device has been opened, and `key` when the server wants another key.
export class Studio extends EventTarget {
  constructor(transcript, preferences) {
    super();
    Object.assign(this, { transcript, preferences });
    this.recording = null;
    // Where the next recording begins on the transcript's clock.
    this.offset = 0;
    transcript.addEventListener("reset", () => (this.offset = transcript.settledUntil));
  }

  get link() {
    return this.recording?.link ?? null;
  }

  get paused() {
    return this.recording?.paused ?? false;
  }

  // What to say about it: `{state, text, countdown}`. Only the rest of the text is for screen readers.
  get status() {
    if (!this.recording) return { state: "idle", text: "Ready", countdown: "" };
    const { link, source } = this.recording;
    if (!link) {
      return { state: "connecting", text: source.live ? "Opening the microphone…" : "Reading the file…", countdown: "" };
    }
    const lost = link.state === "lost" || (link.state === "connecting" && link.sessions && !link.file);
    const seconds = Math.max(0, Math.ceil((link.retryAt - Date.now()) / 1000));
    const countdown = link.state === "lost" ? `: retrying in ${seconds} s` : "";
    return { state: lost ? "lost" : this.paused ? "paused" : link.state, text: this.#describe(), countdown };
  }

  #describe() {
    const { link, notice, reason } = this.recording;
    if (link.file) return link.state === "connecting" ? "Sending the file" : "Reading the file";
    switch (link.state) {
      case "connecting":
        return link.sessions ? "Server lost, reconnecting…" : "Connecting…";
      case "listening":
        if (this.paused) return "Paused";
        return notice || (link.live ? "Listening" : "Playing the file");
      case "finishing":
        return "Getting the last words…";
      default:
        return link.live ? `${reason}, still recording` : reason;
    }
  }

  listen(choice) {
    const why = choice.startsWith(TAB) ? "Nothing is shared any more." : "The microphone was unplugged or switched off.";
    const gone = () => {
      if (!this.recording) return;
      this.recording.gone = why;
      this.finish();
    };
    this.#begin(new Microphone(choice, (samples) => this.#take(samples), gone), microphoneProblem);
  }

  async play(file) {
    if (!this.preferences.choices.realTime) {
      await this.#send(file);
      return;
    }
    const options = {
      room: () => this.link?.room(),
      onChunk: (samples) => this.#take(samples),
      onEnd: () => this.recording && this.finish(),
    };
    this.#begin(new FileSource(file, options), fileProblem);
  }

  finish() {
    const { source, link, started } = this.recording;
    source.close();
    if (!link) this.#end("");
    // A second press, or one while there is no server, does not wait for the last words.
    else if (!started || link.finishing || link.state !== "listening") link.stop();
    else link.finish();
    this.#changed();
  }

  // The session stays; nothing is heard until it goes on.
  pause() {
    const { recording } = this;
    if (!recording?.link || recording.link.file || recording.link.finishing) return;
    recording.paused = !recording.paused;
    if (recording.paused) recording.source.pause();
    else recording.source.resume();
    this.#changed();
  }

  // What the server and its model are told besides the sound.
  get #wishes() {
    const { language, keywords } = this.preferences.wishes;
    return { ...(language && { language }), ...keywords };
  }

  async #begin(source, explain) {
    const mine = this.#enter(source);
    try {
      await source.open();
    } catch (error) {
      if (this.recording === mine) this.#end(explain(error));
      else source.close();
      return;
    }
    if (this.recording !== mine) {
      // Stopped while it was opening.
      source.close();
      return;
    }
    this.dispatchEvent(new Event("opened"));
    const { offset, transcript, preferences } = this;
    const facts = { key: preferences.key, rate: source.rate, live: source.live };
    this.#connect(mine, new Link({ ...facts, offset, transcript, wishes: this.#wishes }));
    // What is said while the server is reached is kept, and sent then.
    if (source.live) source.start();
  }

  async #send(file) {
    const mine = this.#enter(NO_SOURCE);
    const seconds = await lengthOf(file);
    if (this.recording !== mine) return;
    const { offset, transcript, preferences } = this;
    const fields = this.#wishes;
    this.#connect(mine, new Upload({ file, seconds, key: preferences.key, offset, transcript, fields }));
  }

  #enter(source) {
    this.#problem("");
    this.recording = { source, link: null, started: false, paused: false, notice: "", reason: "", gone: "" };
    this.#changed();
    return this.recording;
  }

  #connect(mine, link) {
    mine.link = link;
    link.addEventListener("state", (event) => this.#onState(mine, event));
    link.addEventListener("tick", () => this.#changed());
    link.addEventListener("problem", ({ text }) => this.#problem(text));
    link.addEventListener("key", () => this.dispatchEvent(new Event("key")));
    link.start();
    if (link.live) keepAwake(link);
  }

  #onState(mine, { state, detail }) {
    if (this.recording !== mine) return;
    if (state === "lost") mine.reason = detail;
    if (state === "closed") {
      this.#end(detail);
      return;
    }
    if (state === "listening") {
      mine.notice = CONTINUED[detail] ?? "";
      setTimeout(() => (mine.notice = ""), RESUMED_SHOWN_MS);
      if (!mine.started && !mine.source.live) mine.source.start();
      mine.started = true;
    }
    this.#changed();
  }

  #take(samples) {
    const { link } = this;
    if (!link || link.finishing) return;
    link.push(samples);
    this.dispatchEvent(Object.assign(new Event("sound"), { samples }));
  }

  #end(problem) {
    const { link, source, gone } = this.recording;
    this.recording = null;
    source.close();
    if (link) this.offset = link.edge;
    this.#problem(problem || gone);
    this.#changed();
  }

  #problem(text) {
    this.dispatchEvent(Object.assign(new Event("problem"), { text }));
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}

// A phone that falls asleep takes the microphone with it.
async function keepAwake(link) {
  try {
    const lock = await navigator.wakeLock?.request("screen");
    link.addEventListener("state", () => link.over && lock?.release());
  } catch {
    // Not allowed now, for example on a low battery; recording works all the same.
  }
}
