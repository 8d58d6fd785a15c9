// The recording under way, if there is one: where its sound comes from and the link that carries it.

import { FileSource } from "./file-source.js";
import { percent, roughly } from "./format.js";
import { Link } from "./link.js";
import { Microphone, TAB } from "./microphone.js";
import { fileProblem, microphoneProblem } from "./reasons.js";
import { Upload } from "./upload.js";

const RESUMED_SHOWN_MS = 4000;
// A device that is switched off, or asleep, gives nothing at all; one that is muted gives silence from the start.
const NO_SOUND_MS = 3000;
const MUTED_MS = 4000;
const SLEPT_MS = 10_000;
// From this many seconds of sound on, the page says that no speech was heard.
const LONG_ENOUGH_SECONDS = 5;
// From the beginning of speech to the end of its first words.
const SOME_WORDS_SECONDS = 1;
// A measured lag is shown this long; after a longer silence it says little about now.
const LAG_SHOWN_MS = 10_000;
const OFFLINE = "This device is offline";
const CONTINUED = { resumed: "Resumed, nothing lost", restarted: "Back, in a new session" };
// An upload has no source of its own: the file goes as it is.
const NO_SOURCE = { live: false, start() {}, close() {} };

// Tells `change` when there is something new to show, `problem` with a text and whether it is only a `notice`, `sound`
// with each chunk, `opened` when a device has been opened, `file` with the link of one that was sent whole and has text,
// `transcribed` with the name of a file that has been, and `key` when the server wants another key.
export class Studio extends EventTarget {
  constructor(transcript, preferences) {
    super();
    Object.assign(this, { transcript, preferences });
    this.recording = null;
    // Where the next recording begins on the transcript's clock.
    this.offset = 0;
    transcript.addEventListener("reset", () => (this.offset = transcript.settledUntil));
    transcript.addEventListener("grown", ({ turn }) => {
      const said = turn.words.at(-1)?.end;
      if (this.link?.live && said) Object.assign(this.recording, { lag: this.link.edge - said, lagAt: Date.now() });
    });
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
    const again = link.state === "connecting" && link.sessions && !link.file;
    const lost = link.state === "lost" || link.doubtful || again || (link.state === "listening" && this.#deaf && !this.paused);
    const seconds = Math.max(0, Math.ceil((link.retryAt - Date.now()) / 1000));
    const silent = link.doubtful ? ` (${Math.round(link.silentSeconds)} s)` : "";
    const countdown = link.state === "lost" ? `: retrying in ${seconds} s` : silent;
    return { state: lost ? "lost" : this.paused ? "paused" : link.state, text: this.#describe(), countdown };
  }

  #describe() {
    const { link, notice, reason } = this.recording;
    const kept = link.full ? ", the last two minutes are kept" : ", still recording";
    const recording = link.live && !link.finishing ? kept : "";
    if (link.doubtful) return (navigator.onLine ? "No answer from the server" : OFFLINE) + recording;
    if (link.state === "lost") return (navigator.onLine || reason !== "Server lost" ? reason : OFFLINE) + recording;
    if (link.file) return link.state === "connecting" ? "Sending" : "Transcribing";
    switch (link.state) {
      case "connecting":
        return link.sessions ? "Server lost, reconnecting…" : "Connecting…";
      case "listening":
        if (this.paused) return "Paused";
        return this.#deaf || notice || (link.live ? "Listening" : "Playing the file");
      default:
        return "Getting the last words…";
    }
  }

  // From a word's end to its caption, in seconds, or null if there was no word lately. It grows while words are owed.
  get lag() {
    const { link, lag, lagAt } = this.recording ?? {};
    if (!link?.live || lag === null) return null;
    if (!this.transcript.openTurns.length && link.silentSeconds < 1 && Date.now() - lagAt > LAG_SHOWN_MS) return null;
    const owedSince = ({ end, text, start }) => end ?? (text ? Infinity : start + SOME_WORDS_SECONDS);
    const oldest = Math.min(Infinity, ...this.transcript.openTurns.map(owedSince));
    return Math.max(lag + (link.silentSeconds > 1 ? link.silentSeconds : 0), link.edge - oldest);
  }

  // What is wrong with the sound itself; empty if nothing is.
  get #deaf() {
    const { source, heardAt, loud, started } = this.recording;
    if (!source.live) return "";
    if (Date.now() - heardAt > NO_SOUND_MS) return "No sound comes from the microphone";
    return source.choice !== TAB && !loud && Date.now() - started > MUTED_MS ? "Listening, but the microphone is silent" : "";
  }

  // The file under way: `{name, progress, facts}`, or null. `progress` is null where it cannot be told.
  get job() {
    if (!this.recording?.name) return null;
    const { name, link, source } = this.recording;
    if (!link) return { name, progress: null, facts: "" };
    if (link.file) return { name, progress: link.progress, facts: link.facts };
    const done = link.edge - link.offset;
    const facts = `${percent(done / source.seconds)}, ${roughly(source.seconds - done)} left`;
    return { name, progress: done / source.seconds, facts };
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

  play(file) {
    if (!this.preferences.choices.realTime) {
      this.#send(file);
      return;
    }
    const options = {
      room: () => this.link?.room(),
      onChunk: (samples) => this.#take(samples),
      onEnd: () => {
        if (!this.recording) return;
        this.recording.complete = true;
        this.finish();
      },
    };
    this.#begin(new FileSource(file, options), fileProblem, file.name);
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
    recording.heardAt = Date.now();
    this.#changed();
  }

  // What the model is told besides the sound. A server that was starting before has to be asked again what it takes.
  async #wishes() {
    if (!this.preferences.options.length) await this.preferences.learn();
    return this.preferences.wishes;
  }

  async #begin(source, explain, name = "") {
    const mine = this.#enter(source, name);
    try {
      await source.open();
    } catch (error) {
      source.close();
      const problem = await explain(error, this.preferences.key);
      if (this.recording === mine) this.#end(problem);
      return;
    }
    if (this.recording !== mine) {
      // Stopped while it was opening.
      source.close();
      return;
    }
    mine.heardAt = Date.now();
    this.dispatchEvent(new Event("opened"));
    const { offset, transcript, preferences } = this;
    const facts = { key: preferences.key, rate: source.rate, live: source.live };
    const asked = {
      wishes: () => this.#wishes(),
      turnDetection: () => preferences.turnDetection,
      speakers: () => preferences.speakers,
    };
    this.#connect(mine, new Link({ ...facts, offset, transcript, ...asked }));
    // What is said while the server is reached is kept, and sent then.
    if (source.live) source.start();
  }

  #send(file) {
    const mine = this.#enter(NO_SOURCE, file.name);
    const { offset, transcript, preferences } = this;
    const asked = { wishes: () => this.#wishes(), speakers: () => preferences.speakers };
    this.#connect(mine, new Upload({ file, key: preferences.key, offset, transcript, ...asked }));
  }

  // `name` is that of a file.
  #enter(source, name = "") {
    this.#problem("");
    const shown = { notice: "", reason: "", gone: "" };
    const sound = { heardAt: Date.now(), loud: false, started: 0, lag: null };
    const turns = this.transcript.turns.length;
    this.recording = { source, name, link: null, paused: false, complete: false, turns, ...shown, ...sound };
    this.#changed();
    return this.recording;
  }

  #connect(mine, link) {
    mine.link = link;
    link.addEventListener("state", (event) => this.#onState(mine, event));
    link.addEventListener("tick", () => {
      if (!mine.paused && Date.now() - mine.heardAt > NO_SOUND_MS) mine.source.wake?.();
      this.#changed();
    });
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
      mine.started ||= Date.now();
    }
    this.#changed();
  }

  #take(samples) {
    const { link, recording } = this;
    if (!link || link.finishing) return;
    const missing = Date.now() - recording.heardAt;
    recording.heardAt = Date.now();
    // A machine that slept: what follows was not said right after what stands before.
    if (link.live && missing > SLEPT_MS) {
      this.transcript.note(`No sound for ${roughly(missing / 1000)}: the microphone or the machine was asleep`, link.edge);
    }
    recording.loud ||= samples.some((sample) => sample);
    link.push(samples);
    this.dispatchEvent(Object.assign(new Event("sound"), { samples }));
  }

  #end(problem) {
    const { link, source, gone } = this.recording;
    const wordless = link && !problem ? this.#wordless() : "";
    if (link?.file && link.edge > link.offset) this.dispatchEvent(Object.assign(new Event("file"), { link }));
    if (link?.finished && !wordless) this.dispatchEvent(Object.assign(new Event("transcribed"), { name: link.file.name }));
    this.recording = null;
    source.close();
    if (link) this.offset = link.edge;
    this.#problem(problem || gone || wordless, !problem && !gone);
    this.#changed();
  }

  // What to say when a recording or a file ends without a word.
  #wordless() {
    const { link, name, complete, turns } = this.recording;
    if (this.transcript.turns.length > turns) return "";
    if (name) return complete || link.finished ? `No speech was found in ${name}.` : "";
    const long = link.edge - link.offset > LONG_ENOUGH_SECONDS;
    return long ? "No speech was heard. Check in the settings which microphone is used." : "";
  }

  #problem(text, notice = false) {
    this.dispatchEvent(Object.assign(new Event("problem"), { text, notice }));
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}

// A phone that falls asleep takes the microphone with it. The lock is lost with each look at another tab.
async function keepAwake(link) {
  const hold = async () => {
    if (document.hidden || link.over) return;
    try {
      const lock = await navigator.wakeLock?.request("screen");
      link.addEventListener("state", () => link.over && lock?.release());
    } catch {
      // Not allowed now, for example on a low battery; recording works all the same.
    }
  };
  document.addEventListener("visibilitychange", hold);
  link.addEventListener("state", () => link.over && document.removeEventListener("visibilitychange", hold));
  await hold();
}
