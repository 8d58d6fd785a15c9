// The WebSocket of one recording: sends samples, passes the server's events to the transcript, and reconnects.
//
// Positions count samples of this recording; the server counts from `base`, where its session began. After a lost
// connection the session is resumed. If the server no longer has it, a new session begins, and samples are sent again
// from the start of the oldest open turn, so that no word is lost.

import { closeText, refusalReason, unreadyReason } from "./error-texts.js";
import { secondsToWait } from "./retry.js";
import { SampleBuffer } from "./sample-buffer.js";

const INCLUDE = [
  "item.input_audio_transcription.words",
  "input_audio_buffer.acks",
  "input_audio_buffer.end_of_turn",
  "session.resume",
];
const SPEAKERS = "item.input_audio_transcription.speakers";
// Samples that are kept for sending, at most.
const BUFFER_SECONDS = 120;
const TICK_MS = 250;
// At most this much waits inside the browser's socket; the rest stays in the sample buffer.
const SOCKET_BYTES = 64 * 1024;
const LARGEST_MESSAGE_SECONDS = 1;
// Acknowledged sound that is sent again to a new session, because the old one may not have transcribed it.
const LIVE_GRACE_SECONDS = 3;
const FILE_GRACE_SECONDS = 70;
// Unacknowledged sound up to which a file source goes on sending.
const ROOM_SECONDS = 8;
// The server acknowledges sound several times a second. After the first time without an event the user is told, after
// the second the socket is replaced.
const DOUBT_SECONDS = 2.5;
const DEAD_SECONDS = 8;
// Only if at least this much sound was recorded since the last event: during a pause the server has nothing to
// acknowledge.
const MIN_UNANSWERED_SECONDS = 1.5;
// The time for opening a socket and receiving the server's first event.
const OPEN_SECONDS = 8;
// How long to wait for the last words.
const FINISH_SECONDS = 30;
// The `event_id` of the request to publish; the server's error repeats it.
const PUBLISH = "publish";
// Close codes: another socket has resumed the session; refused by policy; no free session.
const TAKEN_OVER = 4409;
const POLICY = 1008;
const TRY_LATER = 1013;

// Events: `state` with `state` and `detail`, `tick` several times a second, `problem` with a `text`, and `key` when the
// access key is refused. States: idle, connecting, listening, lost, finishing, closed.
export class RealtimeConnection extends EventTarget {
  // `offset` is where the recording begins on the transcript's clock, in seconds. `modelOptions()` resolves to the
  // options of the model, `turnDetection()` is the session's turn detection, and `speakers()` says whether to request
  // speaker labels.
  constructor({ key, rate, live, offset, transcript, modelOptions, turnDetection, speakers }) {
    super();
    Object.assign(this, { key, rate, live, offset, transcript, modelOptions, turnDetection, speakers });
    this.buffer = new SampleBuffer(BUFFER_SECONDS * rate);
    this.state = "idle";
    // Positions: start of the server session, next sample to send, end of the acknowledged samples. `sequence` is the
    // number of the last event, `tries` of failed attempts, `sessions` of server sessions so far.
    this.base = this.cursor = this.acked = this.sequence = this.tries = this.sessions = 0;
    // End of the recorded samples when the last event arrived.
    this.endAtLastEvent = 0;
    // The token with which the session can be resumed.
    this.token = null;
    // The name under which the session is published, and the unanswered request to change it.
    this.published = null;
    this.publishing = null;
    // The server has sent the first event of the session; the session is configured, so samples may be sent.
    this.greeted = this.ready = false;
    this.finishing = this.commitSent = this.cleared = false;
  }

  start() {
    this.lastEventAt = Date.now();
    this.timer = setInterval(() => this.#tick(), TICK_MS);
    this.listeners = new AbortController();
    // The network is back, or the page is visible again: try at once.
    addEventListener("online", () => this.#retryAtOnce(), { signal: this.listeners.signal });
    document.addEventListener("visibilitychange", () => document.hidden || this.#retryAtOnce(), { signal: this.listeners.signal });
    this.#connect();
  }

  // Also checks the deadlines: timers of a hidden page may run only once a minute.
  push(samples) {
    this.buffer.push(samples);
    this.#checkDeadlines();
    this.#sendSamples();
  }

  // Resolves when the server has acknowledged enough for more samples to be sent.
  async room() {
    while (!this.closed && this.waitingSeconds > ROOM_SECONDS) {
      await new Promise((done) => this.addEventListener("tick", done, { once: true }));
    }
  }

  // After the last samples: waits for the last words, then closes the connection.
  finish() {
    this.finishing = true;
    this.lastEventAt = Date.now();
    if (this.ready) this.#set("finishing");
    this.#sendSamples();
  }

  // Closes the connection now; the text so far stays.
  stop(problem = "") {
    if (this.closed) return;
    this.transcript.abandonOpen({ resend: false });
    // A connection that was refused for good reports that problem instead.
    if (this.waitingSeconds > 1 && (this.sessions || !problem)) {
      const seconds = Math.round(this.waitingSeconds);
      this.transcript.note(`The last ${seconds} s of sound were not transcribed`, this.ackedSeconds);
    }
    this.#close(problem);
  }

  retryNow() {
    if (this.state === "lost") this.#reconnect();
  }

  // Publishes the session for viewers under this name; null ends that. Rejects with an Error for the user if the server
  // refuses.
  publish(name) {
    if (!this.ready) return Promise.reject(new Error("There is no connection to the server now."));
    return new Promise((resolve, reject) => {
      this.publishing = { name, resolve, reject };
      this.#send({ type: "session.update", event_id: PUBLISH, session: { type: "transcription", publish: name } });
    });
  }

  #onPublished(name) {
    this.published = name;
    this.publishing?.resolve();
    this.publishing = null;
  }

  #publishFailed(message) {
    this.publishing?.reject(new Error(message));
    this.publishing = null;
  }

  // Whether the buffer is full, so that new samples replace the oldest.
  get bufferFull() {
    return this.buffer.end - this.buffer.start >= 0.99 * this.buffer.limit;
  }

  // Seconds since the last event, if an event is due; otherwise 0.
  get silentSeconds() {
    const isDue = (this.buffer.end - this.endAtLastEvent) / this.rate > MIN_UNANSWERED_SECONDS;
    if (!this.sessions || !(isDue || this.state === "lost")) return 0;
    return (Date.now() - this.lastEventAt) / 1000;
  }

  // The socket is open, but no event arrives.
  get doubtful() {
    return this.ready && this.silentSeconds > DOUBT_SECONDS;
  }

  get closed() {
    return this.state === "closed";
  }

  // The end of the recorded samples on the transcript's clock, in seconds.
  get endSeconds() {
    return this.#seconds(this.buffer.end);
  }

  get ackedSeconds() {
    return this.#seconds(this.acked);
  }

  get waitingSeconds() {
    return (this.buffer.end - this.acked) / this.rate;
  }

  #seconds(position) {
    return this.offset + position / this.rate;
  }

  #position(seconds) {
    return Math.max(0, Math.round((seconds - this.offset) * this.rate));
  }

  // The connection

  // Asks over HTTP first whether the server is ready: browsers delay sockets to an address where sockets have failed.
  async #reconnect() {
    this.#set("connecting");
    const reason = await unreadyReason();
    if (this.closed || this.socket) return;
    if (reason) this.#lost(reason);
    else this.#connect();
  }

  #connect() {
    this.openBy = Date.now() + OPEN_SECONDS * 1000;
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
    socket.onclose = (event) => socket === this.socket && this.#onClose(event);
  }

  async #onClose({ code, reason }) {
    this.#publishFailed("The connection to the server was lost.");
    this.socket = null;
    this.ready = false;
    if (this.closed) return;
    // After `#giveUp` the code may come from this page's own older socket, which reached the server late.
    if (code === TAKEN_OVER && !this.gaveUp) {
      this.stop("This session goes on in another window.");
    } else if (this.greeted) {
      if (code === POLICY) this.token = null;
      this.tries = 0;
      this.#lost({ text: closeText(code, reason), full: code === TRY_LATER });
    } else {
      await this.#refused();
    }
  }

  async #refused() {
    const reason = await refusalReason(this.key);
    if (this.closed || this.socket) return;
    if (reason.final) {
      this.stop(reason.text);
      if (reason.key) this.dispatchEvent(new Event("key"));
    } else if (reason.unexplained && this.token) {
      // The server is ready but no longer has this session.
      this.token = null;
      this.#connect();
    } else {
      this.#lost(reason);
    }
  }

  #lost(reason) {
    const seconds = secondsToWait(reason, this.tries);
    this.tries += 1;
    this.retryAt = Date.now() + seconds * 1000;
    this.#set("lost", reason.text);
  }

  // Replaces a socket on which nothing arrives; only a new one shows whether the server can be reached.
  #giveUp() {
    const { socket } = this;
    this.gaveUp = true;
    this.socket = null;
    this.ready = false;
    this.tries = this.greeted ? 0 : this.tries;
    socket.close();
    this.#lost({ text: "Server lost" });
  }

  #retryAtOnce() {
    if (this.doubtful) this.#giveUp();
    this.retryNow();
  }

  #close(problem) {
    clearInterval(this.timer);
    this.listeners?.abort();
    if (this.socket?.readyState === WebSocket.OPEN) {
      // Without this the server would keep the session for a client that may resume it.
      this.#send({ type: "session.update", session: { type: "transcription", include: [] } });
      this.socket.close(1000);
    } else {
      this.socket?.close();
    }
    this.socket = null;
    this.#set("closed", problem);
    this.dispatchEvent(new Event("tick"));
  }

  // `detail` says how the session began (`listening`) or why the state is `lost` or `closed`.
  #set(state, detail = "") {
    this.state = state;
    this.dispatchEvent(Object.assign(new Event("state"), { state, detail }));
  }

  // Events

  #receive(event) {
    this.#noteEvent();
    if (event.seq) this.sequence = event.seq;
    switch (event.type) {
      case "session.created":
        this.#configure();
        break;
      case "session.updated":
        this.token = event.session.resume?.token ?? null;
        this.#onPublished(event.session.publish ?? null);
        if (!this.ready) this.#setReady(this.sessions > 1 ? "restarted" : "");
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
        if (event.error.event_id === PUBLISH && this.publishing) this.#publishFailed(event.error.message);
        else this.#problem(event.error);
        break;
      default:
        this.transcript.apply(event, this.#seconds(this.base));
    }
    this.buffer.dropBefore(Math.min(this.acked, this.#replayPoint()));
    this.#sendSamples();
    if (this.finishing && this.cleared && !this.transcript.openTurns.length) this.#close("");
  }

  #noteEvent() {
    this.lastEventAt = Date.now();
    this.endAtLastEvent = this.buffer.end;
  }

  async #configure() {
    const { socket } = this;
    this.greeted = true;
    this.sessions += 1;
    this.transcript.newRecording();
    if (this.sessions > 1) this.#rewind();
    this.base = this.acked = this.cursor;
    this.sequence = 0;
    const format = { type: "audio/pcm", rate: this.rate, transport: "binary" };
    const turns = this.turnDetection();
    const input = { format, transcription: await this.modelOptions(), ...(turns && { turn_detection: turns }) };
    if (socket !== this.socket) return;
    const include = this.speakers() ? [...INCLUDE, SPEAKERS] : INCLUDE;
    const publish = this.published ? { publish: this.published } : {};
    this.#send({ type: "session.update", session: { type: "transcription", audio: { input }, include, ...publish } });
  }

  // Moves the cursor back to the oldest sound that is in no finished turn, as far as it is still buffered.
  #rewind() {
    const wanted = this.#replayPoint();
    const resend = wanted >= this.buffer.start;
    this.transcript.abandonOpen({ resend });
    this.#noteLost(this.buffer.start - this.acked);
    this.cursor = resend ? wanted : Math.max(this.buffer.start, this.acked - this.#grace());
  }

  // The position from which samples may have to be sent again.
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
    this.#setReady("resumed");
  }

  #noteLost(samples) {
    if (samples <= 0) return;
    const seconds = Math.ceil(samples / this.rate);
    this.transcript.note(`${seconds} s of sound could not be sent in time and are missing`, this.#seconds(this.buffer.start));
  }

  #setReady(detail) {
    this.ready = true;
    this.tries = 0;
    this.#set(this.finishing ? "finishing" : "listening", detail);
  }

  #problem(error) {
    // The last commit fails if there is nothing to commit; ignore that.
    if (error.code === "input_audio_buffer_commit_empty") return;
    this.dispatchEvent(Object.assign(new Event("problem"), { text: error.message }));
  }

  // Sending

  #send(message) {
    this.socket.send(JSON.stringify(message));
  }

  #sendSamples() {
    if (!this.ready) return;
    const lost = this.buffer.start - this.cursor;
    if (lost > 0) {
      // A gap in place of the dropped samples keeps the server's clock in step.
      this.#noteLost(lost);
      this.#send({ type: "input_audio_buffer.gap", samples: lost });
      this.cursor = this.buffer.start;
    }
    while (this.cursor < this.buffer.end && this.socket.bufferedAmount < SOCKET_BYTES) {
      const samples = this.buffer.read(this.cursor, LARGEST_MESSAGE_SECONDS * this.rate);
      this.socket.send(samples);
      this.cursor += samples.length;
    }
    if (this.finishing && !this.commitSent && this.cursor >= this.buffer.end) {
      this.commitSent = true;
      this.#send({ type: "input_audio_buffer.commit" });
      // The answer to this follows the answer to the commit, also if the commit failed.
      this.#send({ type: "input_audio_buffer.clear" });
    }
  }

  #tick() {
    this.#sendSamples();
    this.#checkDeadlines();
    this.dispatchEvent(new Event("tick"));
  }

  #checkDeadlines() {
    const now = Date.now();
    if (this.ready && this.finishing && now - this.lastEventAt > FINISH_SECONDS * 1000) {
      this.stop("The server did not send the last words in time.");
    } else if (this.ready ? this.silentSeconds > DEAD_SECONDS : this.socket && now > this.openBy) {
      this.#giveUp();
    } else if (this.state === "lost" && now > this.retryAt) {
      this.#reconnect();
    }
  }
}
