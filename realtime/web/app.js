// Puts the page together: buttons and drops start a recording, the link carries it, the views show what comes back.

import { Captions } from "./captions.js";
import { FORMATS, download } from "./export.js";
import { FileSource } from "./file-source.js";
import { clock, shortSeconds } from "./format.js";
import { Link } from "./link.js";
import { Microphone, listMicrophones } from "./microphone.js";
import { Preferences } from "./preferences.js";
import { fileProblem, microphoneProblem } from "./reasons.js";
import { connectSettings } from "./settings.js";
import { Tape, levelOf } from "./tape.js";
import { Transcript } from "./transcript.js";
import { WordTimes } from "./words.js";

const $ = (id) => document.getElementById(id);
const RESUMED_SHOWN_MS = 4000;
const SLOW_SECONDS = 1.5;

const preferences = new Preferences();
const transcript = new Transcript();
const tape = new Tape($("tape"), transcript);
const announce = (text) => ($("announcer").textContent = text);
new Captions(transcript, { list: $("turns"), earlier: $("earlier"), later: $("later"), live: $("live") });
new WordTimes($("captions"), $("tip"), announce);
const settings = connectSettings(preferences, () => tape.draw());

// The recording under way: a source of sound and, once that is open, its link. Null when nothing is heard.
let recording = null;
// Where the next recording begins on the transcript's clock.
let offset = 0;
let saved = true;

// State and problems

// The countdown changes every second; a screen reader hears only the rest.
function showState(state, text, countdown = "") {
  $("state").dataset.state = state;
  if ($("state-text").textContent !== text) $("state-text").textContent = text;
  $("countdown").textContent = countdown;
}

function showProblem(text) {
  $("problem").hidden = !text;
  $("problem-text").textContent = text;
}

const CONTINUED = { resumed: "Resumed, nothing lost", restarted: "Back, in a new session" };

function describe({ link, notice, reason }) {
  switch (link.state) {
    case "connecting":
      return link.sessions ? "Server lost, reconnecting…" : "Connecting…";
    case "listening":
      return notice || (link.live ? "Listening" : "Playing the file");
    case "finishing":
      return "Getting the last words…";
    case "lost":
      return link.live ? `${reason}, still recording` : reason;
    default:
      return "Ready";
  }
}

function refresh() {
  const running = recording !== null;
  $("listen-label").textContent = running ? "Stop" : "Start listening";
  $("listen").classList.toggle("running", running);
  $("device").disabled = $("open-file").disabled = running;
  $("empty").hidden = running || transcript.entries.length > 0;
  $("captions").hidden = !$("empty").hidden;
  const link = recording?.link;
  $("retry").hidden = link?.state !== "lost";
  if (link) showLink(link);
}

function showLink(link) {
  const lost = link.state === "lost" || (link.state === "connecting" && link.sessions);
  const seconds = Math.max(0, Math.ceil((link.retryAt - Date.now()) / 1000));
  showState(lost ? "lost" : link.state, describe(recording), link.state === "lost" ? `: retrying in ${seconds} s` : "");
  $("waiting").textContent = shortSeconds(link.waitingSeconds);
  $("waiting-box").classList.toggle("warning", link.live && link.waitingSeconds > SLOW_SECONDS);
  $("elapsed").textContent = clock(link.edge);
  tape.acked = link.ackedEdge;
}

// Recording

async function begin(source, explain) {
  showProblem("");
  const mine = (recording = { source, link: null, started: false, notice: "", reason: "" });
  refresh();
  showState("connecting", source.live ? "Opening the microphone…" : "Reading the file…");
  try {
    await source.open();
  } catch (error) {
    if (recording === mine) end(explain(error));
    return;
  }
  if (recording !== mine) {
    // Stopped while it was opening.
    source.close();
    return;
  }
  fillDevices();
  const link = new Link({ key: preferences.key, rate: source.rate, live: source.live, offset, transcript });
  mine.link = link;
  link.addEventListener("state", (event) => onState(mine, event));
  link.addEventListener("tick", refresh);
  link.addEventListener("problem", ({ text }) => showProblem(text));
  link.addEventListener("key", () => settings.open("key"));
  link.start();
  if (!source.live) return;
  // What is said while the server is reached is kept, and sent then.
  source.start();
  keepAwake(link);
}

function onState(mine, { state, detail }) {
  if (recording !== mine) return;
  if (state === "lost") mine.reason = detail;
  if (state === "closed") {
    end(detail);
    return;
  }
  if (state === "listening") {
    mine.notice = CONTINUED[detail] ?? "";
    setTimeout(() => (mine.notice = ""), RESUMED_SHOWN_MS);
    if (!mine.started && !mine.source.live) mine.source.start();
    mine.started = true;
  }
  refresh();
}

function onChunk(samples) {
  const link = recording?.link;
  if (!link || link.finishing) return;
  link.push(samples);
  const level = levelOf(samples);
  $("level").value = level;
  tape.push(level, link.edge);
}

function finish() {
  const { source, link, started } = recording;
  source.close();
  $("level").value = 0;
  if (!link) end("");
  // A second press, or one while there is no server, does not wait for the last words.
  else if (!started || link.finishing || link.state !== "listening") link.stop();
  else link.finish();
}

function end(problem) {
  const { link, source } = recording;
  recording = null;
  source.close();
  if (link) offset = link.edge;
  $("level").value = 0;
  $("waiting").textContent = "–";
  $("waiting-box").classList.remove("warning");
  showState("idle", "Ready");
  showProblem(problem);
  refresh();
}

function listen() {
  if (recording) {
    finish();
    return;
  }
  const gone = () => recording && (finish(), showProblem("The microphone was unplugged or switched off."));
  begin(new Microphone($("device").value, onChunk, gone), microphoneProblem);
}

function play(file) {
  if (recording) {
    showProblem("Stop first, then open a file.");
    return;
  }
  const options = {
    realTime: preferences.choices.realTime,
    room: () => recording?.link?.room(),
    onChunk,
    onEnd: () => recording && finish(),
  };
  begin(new FileSource(file, options), fileProblem);
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

async function fillDevices() {
  const chosen = $("device").value || preferences.choices.device;
  const options = [new Option("Default microphone", "")];
  for (const device of await listMicrophones()) {
    if (device.deviceId !== "default") options.push(new Option(device.label || "Microphone", device.deviceId));
  }
  $("device").replaceChildren(...options);
  if (options.some((option) => option.value === chosen)) $("device").value = chosen;
}

// Captions

transcript.addEventListener("added", () => $("captions").hidden && refresh());
transcript.addEventListener("grown", ({ turn }) => {
  const spoken = turn.words.at(-1)?.end;
  if (recording && spoken) $("lag").textContent = shortSeconds(recording.link.edge - spoken);
});
transcript.addEventListener("changed", ({ turn }) => {
  if (turn.state === "open") return;
  saved = false;
  enableExports(true);
  if (preferences.choices.announce) announce(turn.text);
});

function enableExports(enabled) {
  document.querySelectorAll(".exports button").forEach((button) => (button.disabled = !enabled));
}

function save(format) {
  const { type, write } = FORMATS[format];
  const stamp = new Date().toISOString().slice(0, 16).replace("T", "-").replace(":", "");
  download(`captions-${stamp}.${format}`, type, write(transcript));
  saved = true;
}

function clear() {
  if (!saved && !confirm("Clear captions that have not been saved?")) return;
  if (recording) {
    showProblem("Stop first, then clear the captions.");
    return;
  }
  offset = 0;
  saved = true;
  transcript.clear();
  tape.clear();
  enableExports(false);
  $("lag").textContent = "–";
  $("elapsed").textContent = "0:00";
  refresh();
}

// Wiring

$("listen").addEventListener("click", listen);
$("retry").addEventListener("click", () => recording?.link.retryNow());
$("dismiss").addEventListener("click", () => showProblem(""));
$("clear").addEventListener("click", clear);
$("device").addEventListener("change", () => preferences.set("device", $("device").value));
$("open-file").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => {
  const [file] = $("file").files;
  $("file").value = "";
  if (file) play(file);
});
for (const button of document.querySelectorAll("[data-format]")) {
  button.addEventListener("click", () => save(button.dataset.format));
}
addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !$("settings").open) listen();
});
addEventListener("dragover", (event) => {
  event.preventDefault();
  $("drop").hidden = false;
});
addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) $("drop").hidden = true;
});
addEventListener("drop", (event) => {
  event.preventDefault();
  $("drop").hidden = true;
  const [file] = event.dataTransfer.files;
  if (file) play(file);
});
addEventListener("beforeunload", (event) => {
  if (recording || !saved) event.preventDefault();
});
addEventListener("pagehide", () => recording?.link.stop());
navigator.mediaDevices?.addEventListener("devicechange", fillDevices);
fillDevices();
refresh();
