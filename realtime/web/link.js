// One recording's way to the server: sends sound, receives events, and comes back after a broken connection.
//
// Positions count samples of this recording. A server session begins at `base`; the server's own counts start there.
// After a break the server is asked to go on with the same session. If it has forgotten it, a new one begins where the
// oldest unfinished turn began, so that no word is lost.

import { Backlog } from "./backlog.js";
import { lostBecause, whyNotReady, whyRefused } from "./reasons.js";
import { secondsToWait } from "./retry.js";

const INCLUDE = [
  "item.input_audio_transcription.words",
  "input_audio_buffer.acks",
  "input_audio_buffer.end_of_turn",
  "session.resume",
];
const SPEAKERS = "item.input_audio_transcription.speakers";
const BACKLOG_SECONDS = 120;
const TICK_MS = 250;
// No more than this waits inside the browser's socket; the rest stays in the backlog, where it is counted.
const SOCKET_BYTES = 64 * 1024;
const LARGEST_MESSAGE_SECONDS = 1;
// Sound the server has acknowledged but may not have understood yet when it dies.
const LIVE_GRACE_SECONDS = 3;
const FILE_GRACE_SECONDS = 70;
// How far a file may run ahead of the server.
const ROOM_SECONDS = 8;
// The server acknowledges sound several times a second. Without a word for so long the line is in doubt, then given up.
const DOUBT_SECONDS = 2.5;
const DEAD_SECONDS = 8;
// So much sound must have gone unanswered: in a pause there is nothing to answer.
const OWED_SECONDS = 1.5;
// A socket that is not open and greeted by then never will be.
const GREET_SECONDS = 8;
const FINISH_SECONDS = 30;
// The id of the question to publish, which errors repeat.
const PUBLISH = "publish";
const TAKEN_OVER = 4409;
const POLICY = 1008;
const TRY_LATER = 1013;

export class Link extends EventTarget {
  // `offset` is where this recording begins on the transcript's clock, in seconds; `wishes()` are for the model,
  // `turnDetection()` is for the server, and `speakers()` says whether to ask who speaks.
  constructor({ key, rate, live, offset, transcript, wishes, turnDetection, speakers }) {
    super();
    Object.assign(this, { key, rate, live, offset, transcript, wishes, turnDetection, speakers });
    this.backlog = new Backlog(BACKLOG_SECONDS * rate);
    this.state = "idle";
    this.base = this.cursor = this.acked = this.sequence = this.tries = this.sessions = 0;
    // Where the sound stood when the server last said something.
    this.heardEnd = 0;
    this.token = null;
    // The name under which viewers read along, and the question to the server about it.
    this.published = null;
    this.publishing = null;
    this.greeted = this.ready = false;
    this.finishing = this.commitSent = this.cleared = false;
  }

  start() {
    this.heardAt = Date.now();
    this.timer = setInterval(() => this.#tick(), TICK_MS);
    this.left = new AbortController();
    // The network is back, or the page is visible again: try at once.
    addEventListener("online", () => this.#hurry(), { signal: this.left.signal });
    document.addEventListener("visibilitychange", () => document.hidden || this.#hurry(), { signal: this.left.signal });
    this.#connect();
  }

  // Sound also keeps the time: timers of a hidden page may run only once a minute.
  push(samples) {
    this.backlog.push(samples);
    this.#watch();
    this.#pump();
  }

  // Resolves when the server has taken enough for more to be sent.
  async room() {
    while (!this.over && this.waitingSeconds > ROOM_SECONDS) {
      await new Promise((done) => this.addEventListener("tick", done, { once: true }));
    }
  }

  // No more sound will come: get the last words, then leave.
  finish() {
    this.finishing = true;
    this.heardAt = Date.now();
    if (this.ready) this.#set("finishing");
    this.#pump();
  }

  // Leave now, with what there is.
  stop(problem = "") {
    if (this.over) return;
    this.transcript.abandonOpen({ again: false });
    // Who was refused for good is told why; no session was to hear that sound.
    if (this.waitingSeconds > 1 && (this.sessions || !problem)) {
      const seconds = Math.round(this.waitingSeconds);
      this.transcript.note(`The last ${seconds} s of sound were not transcribed`, this.ackedEdge);
    }
    this.#leave(problem);
  }

  retryNow() {
    if (this.state === "lost") this.#reconnect();
  }

  // Lets viewers read along under this name; null ends that. Raises an Error with a sentence if the server does not.
  publish(name) {
    if (!this.ready) return Promise.reject(new Error("There is no connection to the server now."));
    return new Promise((resolve, reject) => {
      this.publishing = { name, resolve, reject };
      this.#send({ type: "session.update", event_id: PUBLISH, session: { type: "transcription", publish: name } });
    });
  }

  #published(name) {
    this.published = name;
    this.publishing?.resolve();
    this.publishing = null;
  }

  #notPublished(message) {
    this.publishing?.reject(new Error(message));
    this.publishing = null;
  }

  // Older sound goes from now on when new sound comes.
  get full() {
    return this.backlog.end - this.backlog.start >= 0.99 * this.backlog.limit;
  }

  // Seconds since the server last said something, where it should have; otherwise 0.
  get silentSeconds() {
    const owed = (this.backlog.end - this.heardEnd) / this.rate > OWED_SECONDS;
    if (!this.sessions || !(owed || this.state === "lost")) return 0;
    return (Date.now() - this.heardAt) / 1000;
  }

  // The socket is open, and nothing comes back.
  get doubtful() {
    return this.ready && this.silentSeconds > DOUBT_SECONDS;
  }

  get over() {
    return this.state === "closed";
  }

  // Where the sound stands on the transcript's clock.
  get edge() {
    return this.#seconds(this.backlog.end);
  }

  get ackedEdge() {
    return this.#seconds(this.acked);
  }

  get waitingSeconds() {
    return (this.backlog.end - this.acked) / this.rate;
  }

  #seconds(position) {
    return this.offset + position / this.rate;
  }

  #position(seconds) {
    return Math.max(0, Math.round((seconds - this.offset) * this.rate));
  }

  // The connection

  // Whether there is a server is asked by HTTP first: browsers hold back sockets to where sockets have failed.
  async #reconnect() {
    this.#set("connecting");
    const why = await whyNotReady();
    if (this.over || this.socket) return;
    if (why) this.#lost(why);
    else this.#connect();
  }

  #connect() {
    this.openBy = Date.now() + GREET_SECONDS * 1000;
    this.#set("connecting");
    this.greeted = this.ready = this.commitSent = false;
    const query = this.token
      ? `resume=${encodeURIComponent(this.token)}&after=${this.sequence}`
      : "intent=transcription";
    const url = new URL(`v1/realtime?${query}`, document.baseURI);
    url.protocol = url.protocol.replace("http", "ws");
    let socket;
    try {
      socket = new WebSocket(url, this.key ? ["realtime", `openai-insecure-api-key.${this.key}`] : ["realtime"]);
    } catch {
      this.stop("The access key has characters that no key can have. Check it in the settings.");
      return;
    }
    this.socket = socket;
    socket.onmessage = ({ data }) => socket === this.socket && this.#receive(JSON.parse(data));
    socket.onclose = (event) => socket === this.socket && this.#closed(event);
  }

  async #closed({ code, reason }) {
    this.#notPublished("The connection to the server was lost.");
    this.socket = null;
    this.ready = false;
    if (this.over) return;
    // A socket that was given up may have reached the server late, and be gone by now.
    if (code === TAKEN_OVER && !this.gaveUp) {
      this.stop("This session goes on in another window.");
    } else if (this.greeted) {
      if (code === POLICY) this.token = null;
      this.tries = 0;
      this.#lost({ text: lostBecause(code, reason), full: code === TRY_LATER });
    } else {
      await this.#refused();
    }
  }

  async #refused() {
    const why = await whyRefused(this.key);
    if (this.over || this.socket) return;
    if (why.final) {
      this.stop(why.text);
      if (why.key) this.dispatchEvent(new Event("key"));
    } else if (why.well && this.token) {
      // The server is well but does not know this session any more.
      this.token = null;
      this.#connect();
    } else {
      this.#lost(why);
    }
  }

  #lost(why) {
    const seconds = secondsToWait(why, this.tries);
    this.tries += 1;
    this.retryAt = Date.now() + seconds * 1000;
    this.#set("lost", why.text);
  }

  // A dead line says nothing; a new socket tells.
  #giveUp() {
    const { socket } = this;
    this.gaveUp = true;
    this.socket = null;
    this.ready = false;
    this.tries = this.greeted ? 0 : this.tries;
    socket.close();
    this.#lost({ text: "Server lost" });
  }

  #hurry() {
    if (this.doubtful) this.#giveUp();
    this.retryNow();
  }

  #leave(problem) {
    clearInterval(this.timer);
    this.left?.abort();
    if (this.socket?.readyState === WebSocket.OPEN) {
      // Otherwise the server would keep the session's place for a client that might come back.
      this.#send({ type: "session.update", session: { type: "transcription", include: [] } });
      this.socket.close(1000);
    } else {
      this.socket?.close();
    }
    this.socket = null;
    this.#set("closed", problem);
    this.dispatchEvent(new Event("tick"));
  }

  #set(state, detail = "") {
    this.state = state;
    this.dispatchEvent(Object.assign(new Event("state"), { state, detail }));
  }

  // Events

  #receive(event) {
    this.#heard();
    if (event.seq) this.sequence = event.seq;
    switch (event.type) {
      case "session.created":
        this.#begin();
        break;
      case "session.updated":
        this.token = event.session.resume?.token ?? null;
        this.#published(event.session.publish ?? null);
        if (!this.ready) this.#go(this.sessions > 1 ? "restarted" : "");
        break;
      case "session.resumed":
        this.#resume(event.received_samples);
        break;
      case "input_audio_buffer.acknowledged":
        this.acked = Math.max(this.acked, this.base + event.samples);
        break;
      case "input_audio_buffer.cleared":
        this.cleared = true;
        break;
      case "error":
        if (event.error.event_id === PUBLISH && this.publishing) this.#notPublished(event.error.message);
        else this.#problem(event.error);
        break;
      default:
        this.transcript.apply(event, this.#seconds(this.base));
    }
    this.backlog.dropBefore(Math.min(this.acked, this.#replayPoint()));
    this.#pump();
    if (this.finishing && this.cleared && !this.transcript.openTurns.length) this.#leave("");
  }

  #heard() {
    this.heardAt = Date.now();
    this.heardEnd = this.backlog.end;
  }

  async #begin() {
    const { socket } = this;
    this.greeted = true;
    this.sessions += 1;
    this.transcript.newRecording();
    if (this.sessions > 1) this.#rewind();
    this.base = this.acked = this.cursor;
    this.sequence = 0;
    const format = { type: "audio/pcm", rate: this.rate, transport: "binary" };
    const turns = this.turnDetection();
    const input = { format, transcription: await this.wishes(), ...(turns && { turn_detection: turns }) };
    if (socket !== this.socket) return;
    const include = this.speakers() ? [...INCLUDE, SPEAKERS] : INCLUDE;
    const publish = this.published ? { publish: this.published } : {};
    this.#send({ type: "session.update", session: { type: "transcription", audio: { input }, include, ...publish } });
  }

  // Go back to the oldest sound that has not become a finished turn, as far as it is still there.
  #rewind() {
    const wanted = this.#replayPoint();
    const again = wanted >= this.backlog.start;
    this.transcript.abandonOpen({ again });
    this.#noteLost(this.backlog.start - this.acked);
    this.cursor = again ? wanted : Math.max(this.backlog.start, this.acked - this.#grace());
  }

  #replayPoint() {
    const open = this.transcript.openSince;
    if (open !== null) return this.#position(open);
    return Math.max(this.#position(this.transcript.settledUntil), this.acked - this.#grace());
  }

  #grace() {
    return (this.live ? LIVE_GRACE_SECONDS : FILE_GRACE_SECONDS) * this.rate;
  }

  #resume(received) {
    this.greeted = true;
    this.cursor = this.acked = this.base + received;
    this.#go("resumed");
  }

  #noteLost(samples) {
    if (samples <= 0) return;
    const seconds = Math.ceil(samples / this.rate);
    this.transcript.note(`${seconds} s of sound could not be sent in time and are missing`, this.#seconds(this.backlog.start));
  }

  #go(how) {
    this.ready = true;
    this.tries = 0;
    this.#set(this.finishing ? "finishing" : "listening", how);
  }

  #problem(error) {
    // The last commit may find nothing to commit; that is no problem.
    if (error.code === "input_audio_buffer_commit_empty") return;
    this.dispatchEvent(Object.assign(new Event("problem"), { text: error.message }));
  }

  // Sending

  #send(message) {
    this.socket.send(JSON.stringify(message));
  }

  #pump() {
    if (!this.ready) return;
    const lost = this.backlog.start - this.cursor;
    if (lost > 0) {
      // Silence in place of what is gone keeps both clocks together.
      this.#noteLost(lost);
      this.#send({ type: "input_audio_buffer.gap", samples: lost });
      this.cursor = this.backlog.start;
    }
    while (this.cursor < this.backlog.end && this.socket.bufferedAmount < SOCKET_BYTES) {
      const samples = this.backlog.read(this.cursor, LARGEST_MESSAGE_SECONDS * this.rate);
      this.socket.send(samples);
      this.cursor += samples.length;
    }
    if (this.finishing && !this.commitSent && this.cursor >= this.backlog.end) {
      this.commitSent = true;
      this.#send({ type: "input_audio_buffer.commit" });
      // The answer to this comes after the answer to the commit, whatever that is.
      this.#send({ type: "input_audio_buffer.clear" });
    }
  }

  #tick() {
    this.#pump();
    this.#watch();
    this.dispatchEvent(new Event("tick"));
  }

  #watch() {
    const now = Date.now();
    if (this.ready && this.finishing && now - this.heardAt > FINISH_SECONDS * 1000) {
      this.stop("The server did not send the last words in time.");
    } else if (this.ready ? this.silentSeconds > DEAD_SECONDS : this.socket && now > this.openBy) {
      this.#giveUp();
    } else if (this.state === "lost" && now > this.retryAt) {
      this.#reconnect();
    }
  }
}
