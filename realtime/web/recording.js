// Starts, pauses and ends recordings (of a microphone, a tab or a file), and describes their state for the page.
//
// A recording has a source of samples and a connection to the server. A file that is sent whole has an `Upload`
// instead, and no source.

import { fileErrorText, microphoneErrorText } from "./error-texts.js";
import { FileSource } from "./file-source.js";
import { percent, roughly } from "./format.js";
import { Microphone, TAB } from "./microphone.js";
import { RealtimeConnection } from "./realtime-connection.js";
import { Upload } from "./upload.js";

// How long the status says that the session was resumed.
const RESUMED_SHOWN_MS = 4000;
// After this time without samples the device counts as switched off or asleep; after this time of zeros only from the
// start of the recording, as muted.
const NO_SOUND_MS = 3000;
const MUTED_MS = 4000;
// A longer time between two chunks means that the machine slept.
const SLEPT_MS = 10_000;
// After a recording of at least this length without words, the page says that no speech was heard.
const LONG_ENOUGH_SECONDS = 5;
// The assumed time from the start of speech to the end of its first words.
const SOME_WORDS_SECONDS = 1;
// How long a measured lag is shown.
const LAG_SHOWN_MS = 10_000;
const OFFLINE = "This device is offline";
const CONTINUED = { resumed: "Resumed, nothing lost", restarted: "Back, in a new session" };
// An upload reads the file itself.
const NO_SOURCE = { live: false, start() {}, close() {} };

// Events:
// - `change`: the state to show has changed
// - `problem`: a `text` for the user; `notice` if nothing has failed
// - `sound`: a chunk of recorded `samples`
// - `opened`: a device or file has been opened
// - `file`: a file was sent whole and has text; `connection` is its Upload
// - `transcribed`: a whole file has been transcribed; `name` is its name
// - `key`: the server needs another access key
export class RecordingController extends EventTarget {
  constructor(transcript, preferences) {
    super();
    Object.assign(this, { transcript, preferences });
    // The current recording (see `#newRecording`), or null.
    this.recording = null;
    // Where the next recording begins on the transcript's clock.
    this.offset = 0;
    transcript.addEventListener("reset", () => (this.offset = transcript.settledUntil));
    transcript.addEventListener("grown", ({ turn }) => {
      const wordEnd = turn.words.at(-1)?.end;
      if (!this.connection?.live || !wordEnd) return;
      Object.assign(this.recording, { lag: this.connection.endSeconds - wordEnd, lagAt: Date.now() });
    });
  }

  get connection() {
    return this.recording?.connection ?? null;
  }

  get paused() {
    return this.recording?.paused ?? false;
  }

  // The status line: `{state, text, countdown}`. The countdown is shown after the text, but hidden from screen readers.
  get status() {
    if (!this.recording) return { state: "idle", text: "Ready", countdown: "" };
    const { connection, source } = this.recording;
    if (!connection) {
      return { state: "connecting", text: source.live ? "Opening the microphone…" : "Reading the file…", countdown: "" };
    }
    const reconnecting = connection.state === "connecting" && connection.sessions && !connection.file;
    const isDeviceSilent = connection.state === "listening" && this.#soundProblem && !this.paused;
    const lost = connection.state === "lost" || connection.doubtful || reconnecting || isDeviceSilent;
    const seconds = Math.max(0, Math.ceil((connection.retryAt - Date.now()) / 1000));
    const silent = connection.doubtful ? ` (${Math.round(connection.silentSeconds)} s)` : "";
    const countdown = connection.state === "lost" ? `: retrying in ${seconds} s` : silent;
    return { state: lost ? "lost" : this.paused ? "paused" : connection.state, text: this.#describe(), countdown };
  }

  #describe() {
    const { connection, notice, reason } = this.recording;
    const buffered = connection.bufferFull ? ", the last two minutes are kept" : ", still recording";
    const suffix = connection.live && !connection.finishing ? buffered : "";
    if (connection.doubtful) return (navigator.onLine ? "No answer from the server" : OFFLINE) + suffix;
    if (connection.state === "lost") return (navigator.onLine || reason !== "Server lost" ? reason : OFFLINE) + suffix;
    if (connection.file) return connection.state === "connecting" ? "Sending" : "Transcribing";
    switch (connection.state) {
      case "connecting":
        return connection.sessions ? "Server lost, reconnecting…" : "Connecting…";
      case "listening":
        if (this.paused) return "Paused";
        return this.#soundProblem || notice || (connection.live ? "Listening" : "Playing the file");
      default:
        return "Getting the last words…";
    }
  }

  // The time from a word's end to its caption in seconds, or null if there was no word lately. It grows while speech
  // waits for its words.
  get lag() {
    const { connection, lag, lagAt } = this.recording ?? {};
    if (!connection?.live || lag === null) return null;
    if (!this.transcript.openTurns.length && connection.silentSeconds < 1 && Date.now() - lagAt > LAG_SHOWN_MS) return null;
    const expectedSince = ({ end, text, start }) => end ?? (text ? Infinity : start + SOME_WORDS_SECONDS);
    const oldest = Math.min(Infinity, ...this.transcript.openTurns.map(expectedSince));
    return Math.max(lag + (connection.silentSeconds > 1 ? connection.silentSeconds : 0), connection.endSeconds - oldest);
  }

  // The text for a device that gives no sound; empty if all is well.
  get #soundProblem() {
    const { source, lastSamplesAt, hasSound, started } = this.recording;
    if (!source.live) return "";
    if (Date.now() - lastSamplesAt > NO_SOUND_MS) return "No sound comes from the microphone";
    return source.choice !== TAB && !hasSound && Date.now() - started > MUTED_MS ? "Listening, but the microphone is silent" : "";
  }

  // The file that is being transcribed: `{name, progress, facts}`, or null. `progress` is from 0 to 1, or null if it is
  // unknown.
  get job() {
    if (!this.recording?.name) return null;
    const { name, connection, source } = this.recording;
    if (!connection) return { name, progress: null, facts: "" };
    if (connection.file) return { name, progress: connection.progress, facts: connection.facts };
    const done = connection.endSeconds - connection.offset;
    const facts = `${percent(done / source.seconds)}, ${roughly(source.seconds - done)} left`;
    return { name, progress: done / source.seconds, facts };
  }

  listen(choice) {
    const text = choice.startsWith(TAB) ? "Nothing is shared any more." : "The microphone was unplugged or switched off.";
    const onEnd = () => {
      if (!this.recording) return;
      this.recording.sourceLost = text;
      this.finish();
    };
    this.#begin(new Microphone(choice, (samples) => this.#onSamples(samples), onEnd), microphoneErrorText);
  }

  play(file) {
    if (!this.preferences.choices.realTime) {
      this.#upload(file);
      return;
    }
    const options = {
      room: () => this.connection?.room(),
      onChunk: (samples) => this.#onSamples(samples),
      onEnd: () => {
        if (!this.recording) return;
        this.recording.complete = true;
        this.finish();
      },
    };
    this.#begin(new FileSource(file, options), fileErrorText, file.name);
  }

  finish() {
    const { source, connection, started } = this.recording;
    source.close();
    if (!connection) this.#end("");
    // A second press of the button, or a press without a connected server, does not wait for the last words.
    else if (!started || connection.finishing || connection.state !== "listening") connection.stop();
    else connection.finish();
    this.#changed();
  }

  // Pauses or resumes the source; the session stays open.
  pause() {
    const { recording } = this;
    if (!recording?.connection || recording.connection.file || recording.connection.finishing) return;
    recording.paused = !recording.paused;
    if (recording.paused) recording.source.pause();
    else recording.source.resume();
    recording.lastSamplesAt = Date.now();
    this.#changed();
  }

  // The options of the model. A server that was still starting earlier is asked for them again.
  async #modelOptions() {
    if (!this.preferences.options.length) await this.preferences.loadModelInfo();
    return this.preferences.modelOptions;
  }

  async #begin(source, explain, name = "") {
    const recording = this.#newRecording(source, name);
    try {
      await source.open();
    } catch (error) {
      source.close();
      const problem = await explain(error, this.preferences.key);
      if (this.recording === recording) this.#end(problem);
      return;
    }
    if (this.recording !== recording) {
      // The recording was stopped while the source was opening.
      source.close();
      return;
    }
    recording.lastSamplesAt = Date.now();
    this.dispatchEvent(new Event("opened"));
    const { offset, transcript, preferences } = this;
    const format = { rate: source.rate, live: source.live };
    const options = {
      modelOptions: () => this.#modelOptions(),
      turnDetection: () => preferences.turnDetection,
      speakers: () => preferences.speakers,
    };
    this.#connect(recording, new RealtimeConnection({ key: preferences.key, ...format, offset, transcript, ...options }));
    // Sound that is recorded while the connection opens is buffered and sent later.
    if (source.live) source.start();
  }

  #upload(file) {
    const recording = this.#newRecording(NO_SOURCE, file.name);
    const { offset, transcript, preferences } = this;
    const options = { modelOptions: () => this.#modelOptions(), speakers: () => preferences.speakers };
    this.#connect(recording, new Upload({ file, key: preferences.key, offset, transcript, ...options }));
  }

  // Makes the state of a new recording. `name` is that of a file. `notice`, `reason` and `sourceLost` are texts for the
  // user; `hasSound` is true after the first sample that is not zero; `started` is when the server began to accept
  // samples.
  #newRecording(source, name = "") {
    this.#problem("");
    const texts = { notice: "", reason: "", sourceLost: "" };
    const sound = { lastSamplesAt: Date.now(), hasSound: false, started: 0, lag: null };
    const turns = this.transcript.turns.length;
    this.recording = { source, name, connection: null, paused: false, complete: false, turns, ...texts, ...sound };
    this.#changed();
    return this.recording;
  }

  #connect(recording, connection) {
    recording.connection = connection;
    connection.addEventListener("state", (event) => this.#onState(recording, event));
    connection.addEventListener("tick", () => {
      if (!recording.paused && Date.now() - recording.lastSamplesAt > NO_SOUND_MS) recording.source.wake?.();
      this.#changed();
    });
    connection.addEventListener("problem", ({ text }) => this.#problem(text));
    connection.addEventListener("key", () => this.dispatchEvent(new Event("key")));
    connection.start();
    if (connection.live) keepScreenOn(connection);
  }

  #onState(recording, { state, detail }) {
    if (this.recording !== recording) return;
    if (state === "lost") recording.reason = detail;
    if (state === "closed") {
      this.#end(detail);
      return;
    }
    if (state === "listening") {
      recording.notice = CONTINUED[detail] ?? "";
      setTimeout(() => (recording.notice = ""), RESUMED_SHOWN_MS);
      if (!recording.started && !recording.source.live) recording.source.start();
      recording.started ||= Date.now();
    }
    this.#changed();
  }

  #onSamples(samples) {
    const { connection, recording } = this;
    if (!connection || connection.finishing) return;
    const pause = Date.now() - recording.lastSamplesAt;
    recording.lastSamplesAt = Date.now();
    // The machine slept: mark that sound is missing here.
    if (connection.live && pause > SLEPT_MS) {
      this.transcript.note(`No sound for ${roughly(pause / 1000)}: the microphone or the machine was asleep`, connection.endSeconds);
    }
    recording.hasSound ||= samples.some((sample) => sample);
    connection.push(samples);
    this.dispatchEvent(Object.assign(new Event("sound"), { samples }));
  }

  #end(problem) {
    const { connection, source, sourceLost } = this.recording;
    const noSpeech = connection && !problem ? this.#noSpeechText() : "";
    if (connection?.file && connection.endSeconds > connection.offset) {
      this.dispatchEvent(Object.assign(new Event("file"), { connection }));
    }
    if (connection?.finished && !noSpeech) {
      this.dispatchEvent(Object.assign(new Event("transcribed"), { name: connection.file.name }));
    }
    this.recording = null;
    source.close();
    if (connection) this.offset = connection.endSeconds;
    this.#problem(problem || sourceLost || noSpeech, !problem && !sourceLost);
    this.#changed();
  }

  // The text for a recording or file that ended without a word; empty if there were words, or too little sound.
  #noSpeechText() {
    const { connection, name, complete, turns } = this.recording;
    if (this.transcript.turns.length > turns) return "";
    if (name) return complete || connection.finished ? `No speech was found in ${name}.` : "";
    const isLongEnough = connection.endSeconds - connection.offset > LONG_ENOUGH_SECONDS;
    return isLongEnough ? "No speech was heard. Check in the settings which microphone is used." : "";
  }

  #problem(text, notice = false) {
    this.dispatchEvent(Object.assign(new Event("problem"), { text, notice }));
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}

// Keeps the screen on, since a phone that sleeps stops its microphone. The browser releases the lock whenever the page
// is hidden.
async function keepScreenOn(connection) {
  const acquire = async () => {
    if (document.hidden || connection.closed) return;
    try {
      const lock = await navigator.wakeLock?.request("screen");
      connection.addEventListener("state", () => connection.closed && lock?.release());
    } catch {
      // Not allowed now, for example on a low battery; recording works all the same.
    }
  };
  document.addEventListener("visibilitychange", acquire);
  connection.addEventListener("state", () => connection.closed && document.removeEventListener("visibilitychange", acquire));
  await acquire();
}
