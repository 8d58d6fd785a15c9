// Starts the page: creates its parts, connects their events and buttons, and shows the state of the recording.

import { Autosave } from "./autosave.js";
import { Captions } from "./captions.js";
import { copyText } from "./clipboard.js";
import { Correction } from "./correction.js";
import { FORMATS, download, toText } from "./export.js";
import { clock, dateAndTime, percent, shortSeconds } from "./format.js";
import { Library } from "./library.js";
import { Overlay } from "./overlay.js";
import { Player } from "./player.js";
import { Preferences } from "./preferences.js";
import { RecordingController } from "./recording.js";
import { Search } from "./search.js";
import { connectSettings } from "./settings-dialog.js";
import { ShareDialog } from "./share-dialog.js";
import { SoundStore } from "./sound-store.js";
import { TranscriptStore } from "./transcript-store.js";
import { Transcript, speakerName } from "./transcript.js";
import { Waveform, levelOf } from "./waveform.js";
import { WordTimes } from "./word-times.js";

const $ = (id) => document.getElementById(id);
// More unacknowledged sound than this is marked as a warning.
const SLOW_SECONDS = 1.5;
const COPIED_SHOWN_MS = 2000;
// Sound that is played before and after a word, since times of words are not exact.
const WORD_MARGIN_SECONDS = 0.15;

const preferences = new Preferences();
const transcript = new Transcript();
const controller = new RecordingController(transcript, preferences);
const sounds = new SoundStore();
const player = new Player();
// Where there is no room, stored sound is deleted before captions are.
const autosave = new Autosave(new TranscriptStore({ makeRoom: () => sounds.dropOldest() }), transcript);
const waveform = new Waveform($("waveform"), transcript);
const announce = (text) => ($("announcer").textContent = text);
const captions = new Captions(transcript, { list: $("turns"), earlier: $("earlier"), later: $("later"), live: $("live") });
const words = new WordTimes($("captions"), $("tip"), announce);
const settings = connectSettings(preferences, sounds, () => waveform.draw());
const correction = new Correction(
  transcript,
  captions,
  { bar: $("word-bar"), heard: $("word-heard"), hear: $("word-hear"), restore: $("word-restore"), remove: $("word-remove") },
  { hasSound: (word) => Boolean(sounds.spanAt(autosave.id, word.start)), play: playWord, announce },
);
const share = new ShareDialog(
  {
    dialog: $("share-dialog"), begin: $("share-begin"), made: $("share-made"), address: $("share-address"),
    copyButton: $("share-copy"), stop: $("share-stop"), problem: $("share-problem"),
  },
  { connection: () => liveConnection(), key: () => preferences.key, copy: (text, button) => copy(text, button) },
);
const search = new Search(
  transcript,
  captions,
  { bar: $("search"), field: $("search-field"), count: $("search-count"), next: $("search-next"), previous: $("search-previous"), close: $("search-close") },
  announce,
);
const overlay = new Overlay(
  transcript,
  preferences,
  { layer: $("overlay"), lines: $("overlay-lines"), smaller: $("overlay-smaller"), larger: $("overlay-larger"), float: $("overlay-float"), close: $("overlay-close") },
  showProblem,
);
const library = new Library(
  autosave,
  { dialog: $("library"), field: $("library-field"), found: $("library-found"), list: $("library-list"), none: $("library-none") },
  { busy: () => controller.recording !== null, onOpen: showRestored, onFound: showFound },
);
// Whether all finished turns have been saved as a file.
let saved = true;
// The name of the file of which these are the captions; empty if there is none, or are several.
let fileName = "";

// Showing the state

// Shows a problem until the user dismisses it, or until the same `owner` reports an empty text.
function showProblem(text, owner = "page", notice = false) {
  const box = $("problem");
  if (!text && owner !== box.dataset.owner) return;
  box.dataset.owner = owner;
  box.dataset.kind = notice ? "notice" : "problem";
  box.hidden = !text;
  $("problem-text").textContent = text;
}

function refresh() {
  const running = controller.recording !== null;
  const { connection } = controller;
  $("listen-label").textContent = !running ? "Start listening" : connection?.file ? "Cancel" : "Stop";
  $("listen").classList.toggle("running", running);
  $("pause").hidden = !connection || Boolean(connection.file) || connection.finishing;
  $("pause").textContent = controller.paused ? "Resume" : "Pause";
  $("device").disabled = $("open-file").disabled = running;
  $("empty").hidden = running || transcript.entries.length > 0;
  $("captions").hidden = !$("empty").hidden;
  $("after").hidden = !transcript.hasFinished;
  $("clear").disabled = running;
  $("name").hidden = $("captions").hidden;
  $("share").hidden = !liveConnection() || !preferences.sharing;
  $("share").textContent = share.active ? "Shared" : "Share";
  $("retry").hidden = connection?.state !== "lost";
  if (running) $("restored").hidden = true;
  showStatus();
  showMeters(connection);
  showJob(controller.job);
  showTitle(controller.job);
}

// The connection of a session that can be published; a file that is sent whole has none.
function liveConnection() {
  const { connection } = controller;
  return connection && !connection.file && !connection.finishing ? connection : null;
}

// The title of the page shows the state, for users in another tab or program.
function showTitle(job) {
  const { state, text } = controller.status;
  const status = job?.progress ? `${percent(job.progress)} ${job.name}` : state === "idle" ? "" : text;
  const title = status ? `${status} – Tickertape` : "Tickertape";
  if (document.title !== title) document.title = title;
}

// The countdown, which changes every second, is in an element that screen readers skip.
function showStatus() {
  const { state, text, countdown } = controller.status;
  $("state").dataset.state = state;
  if ($("state-text").textContent !== text) $("state-text").textContent = text;
  $("countdown").textContent = countdown;
  // Large captions hide the rest of the page, so they show a lost connection themselves.
  $("overlay-state").textContent = state === "lost" ? text : "";
}

function showMeters(connection) {
  const waiting = connection?.waitingSeconds ?? 0;
  $("waiting").textContent = connection ? shortSeconds(waiting) : "–";
  $("waiting-box").classList.toggle("warning", Boolean(connection?.live) && waiting > SLOW_SECONDS);
  $("elapsed").textContent = clock(connection ? connection.endSeconds : controller.offset);
  if (!connection) $("level").value = 0;
  if (connection?.live) $("lag").textContent = controller.lag === null ? "–" : shortSeconds(controller.lag);
  waveform.ackedSeconds = connection?.ackedSeconds ?? controller.offset;
}

function showJob(job) {
  $("job").hidden = !job;
  if (!job) return;
  $("job-name").textContent = $("job-name").title = job.name;
  $("job-facts").textContent = job.facts;
  if (job.progress === null) $("progress").removeAttribute("value");
  else $("progress").value = job.progress;
}

function showRestored(head) {
  $("restored-text").textContent = `${head.name || "Captions"} of ${dateAndTime(head.id)}, ${clock(transcript.seconds)} long`;
  $("restored").hidden = false;
  fileName = "";
  saved = !transcript.hasFinished;
  refresh();
}

function showFound(number, text) {
  const turn = transcript.entries.find((entry) => entry.number === number);
  if (turn) search.show(text, turn);
}

// Actions of buttons

function listen() {
  if (controller.recording) {
    controller.finish();
    return;
  }
  fileName = "";
  controller.listen($("device").value);
}

function play([file, ...others]) {
  if (!file) return;
  if (controller.recording) {
    showProblem("Stop first, then open a file.");
    return;
  }
  fileName = transcript.entries.length ? "" : file.name.replace(/\.\w+$/, "");
  controller.play(file);
  if (others.length) showProblem(`One file at a time: ${file.name} is transcribed, the other ${others.length} were left out.`, "page", true);
}

function save(format) {
  const { type, write } = FORMATS[format];
  const stamp = new Date().toISOString().slice(0, 16).replace("T", "-").replace(":", "");
  // Characters that names of files must not contain become spaces.
  const name = transcript.name.replaceAll(/[/\\:*?"<>|\s]+/g, " ").replace(/^[. ]+/, "").trim();
  download(`${name || fileName || `captions-${stamp}`}.${format}`, type, write(transcript));
  saved = true;
  $("save-menu").hidePopover();
}

async function copy(text, button) {
  const copied = await copyText(text);
  announce(copied ? "Copied" : "The browser does not let this page copy");
  if (!button) return;
  button.textContent = copied ? "Copied" : "Not copied";
  setTimeout(() => (button.textContent = "Copy"), COPIED_SHOWN_MS);
}

async function playWord({ start, end }) {
  try {
    const sound = await sounds.read(autosave.id, start - WORD_MARGIN_SECONDS, end + WORD_MARGIN_SECONDS);
    if (sound) await player.play(sound);
    else announce("The sound of this word was not kept");
  } catch (error) {
    // AbortError: another word was selected before this one began.
    if (error?.name !== "AbortError") showProblem("This browser could not play the kept sound.");
  }
}

// Plays the word if its sound is stored, and opens it for correction.
function openWord(element) {
  if (sounds.spanAt(autosave.id, element.word.start)) playWord(element.word);
  correction.open(element);
}

async function clear() {
  if (!saved && !confirm("Delete these captions? They have not been saved as a file.")) return;
  await autosave.deleteCurrent();
  resetState();
}

async function startNewTranscript() {
  await autosave.flush();
  if (!saved && !autosave.allSaved && !confirm("These captions could not be kept, and have not been saved. Delete them?")) return;
  transcript.clear();
  resetState();
}

function resetState() {
  saved = true;
  fileName = "";
  $("restored").hidden = true;
  waveform.clear();
  $("lag").textContent = "–";
  refresh();
}

function key(event) {
  const typing = event.target.closest?.("input, textarea, select, dialog");
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !document.querySelector("dialog[open]")) listen();
  else if (event.key === "/" && !typing && transcript.entries.length) {
    event.preventDefault();
    search.open();
  }
}

function rename(speaker) {
  const name = prompt(`What is the name of ${speakerName(speaker)}?`, speakerName(speaker));
  if (name) transcript.rename(speaker, name);
}

// Wiring

controller.addEventListener("change", refresh);
controller.addEventListener("problem", ({ text, notice }) => showProblem(text, "controller", notice));
controller.addEventListener("transcribed", ({ name }) => announce(`${name} is transcribed.`));
controller.addEventListener("key", () => settings.open("key"));
controller.addEventListener("opened", settings.onDeviceOpened);
controller.addEventListener("sound", ({ samples }) => {
  const { connection } = controller;
  if (preferences.choices.keepSound) sounds.addSamples(autosave.id, samples, connection.rate, connection.endSeconds);
  const level = levelOf(samples);
  $("level").value = level;
  waveform.push(level, controller.connection.endSeconds);
});
controller.addEventListener("file", ({ connection }) => {
  if (preferences.choices.keepSound) sounds.addFile(autosave.id, connection.file, connection.offset, connection.endSeconds);
});
controller.addEventListener("change", () => !controller.recording && sounds.flush());
autosave.addEventListener("problem", ({ text }) => showProblem(text));
autosave.addEventListener("deleted", ({ id }) => sounds.delete(id));
sounds.addEventListener("problem", ({ text }) => showProblem(text, "sounds"));

for (const kind of ["reset", "named"]) transcript.addEventListener(kind, () => ($("name").value = transcript.name));
transcript.addEventListener("corrected", () => (saved = false));
transcript.addEventListener("added", () => $("captions").hidden && refresh());
transcript.addEventListener("changed", ({ turn }) => {
  if (turn.state === "open") return;
  saved = false;
  $("after").hidden = false;
  // A file is transcribed faster than a screen reader speaks, so only its end is announced.
  if (preferences.choices.announce && !controller.connection?.file) announce(turn.text);
});

const buttons = {
  listen,
  pause: () => controller.pause(),
  retry: () => controller.connection?.retryNow(),
  dismiss: () => showProblem("", $("problem").dataset.owner),
  copy: () => copy(toText(transcript), $("copy")),
  find: () => search.open(),
  clear,
  "go-on": listen,
  afresh: startNewTranscript,
  "library-new": async () => {
    $("library").close();
    if (controller.recording) showProblem("Stop first, then begin a new transcript.");
    else await startNewTranscript();
  },
  "open-file": () => $("file").click(),
  "open-library": () => library.open(),
  "open-overlay": () => overlay.open(),
  share: () => share.open(),
};
for (const [id, action] of Object.entries(buttons)) $(id).addEventListener("click", action);
for (const button of document.querySelectorAll("[data-format]")) {
  button.addEventListener("click", () => save(button.dataset.format));
}
$("turns").addEventListener("click", ({ target }) => {
  if (target.matches(".copy")) copy(target.closest("li").turn.text.trim(), target);
  if (target.matches(".who")) rename(target.speaker);
  // Selecting text, to copy it, does not open a word for correction.
  if (target.matches(".word") && getSelection().isCollapsed) openWord(target);
});
$("name").addEventListener("change", () => {
  transcript.setName($("name").value);
  $("name").value = transcript.name;
});
words.addEventListener("copy", ({ turn }) => copy(turn.text.trim()));
words.addEventListener("edit", ({ word }) => correction.open(word));
words.addEventListener("hear", ({ word }) => playWord(word.word));
correction.addEventListener("closed", ({ turn, word }) => {
  const shown = [...(captions.items.get(turn)?.querySelectorAll(".word") ?? [])];
  words.select(shown.find((element) => element.word === word) ?? null);
});
$("file").addEventListener("change", () => {
  const files = [...$("file").files];
  $("file").value = "";
  play(files);
});
addEventListener("keydown", key);
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
  play([...event.dataTransfer.files]);
});
addEventListener("beforeunload", (event) => {
  if (controller.recording || (!saved && !autosave.allSaved)) event.preventDefault();
});
addEventListener("pagehide", () => {
  controller.connection?.stop();
  sounds.flush();
});
refresh();
if (preferences.unreadable) showProblem("Some choices for this page could not be read, and are as at first.", "page", true);
const head = await autosave.loadNewest(() => !controller.recording && !transcript.entries.length);
if (head) showRestored(head);
if (autosave.available) {
  const heads = await autosave.store.heads().catch(() => null);
  if (heads) sounds.prune(new Set(heads.map(({ id }) => id)));
}
