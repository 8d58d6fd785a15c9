// Puts the page together: what its buttons do, and what is shown of a recording.

import { Archive } from "./archive.js";
import { Captions } from "./captions.js";
import { copyText } from "./clipboard.js";
import { Correction } from "./correction.js";
import { FORMATS, download, toText } from "./export.js";
import { clock, dateAndTime, percent, shortSeconds } from "./format.js";
import { Keeper } from "./keeper.js";
import { Library } from "./library.js";
import { Overlay } from "./overlay.js";
import { Player } from "./player.js";
import { Preferences } from "./preferences.js";
import { Search } from "./search.js";
import { connectSettings } from "./settings.js";
import { Share } from "./share.js";
import { Sounds } from "./sounds.js";
import { Studio } from "./studio.js";
import { Tape, levelOf } from "./tape.js";
import { speakerName, Transcript } from "./transcript.js";
import { WordTimes } from "./words.js";

const $ = (id) => document.getElementById(id);
const SLOW_SECONDS = 1.5;
const COPIED_SHOWN_MS = 2000;
// Sound around a word that is played: times of words are not exact.
const AROUND_SECONDS = 0.15;

const preferences = new Preferences();
const transcript = new Transcript();
const studio = new Studio(transcript, preferences);
const sounds = new Sounds();
const player = new Player();
// Captions are worth more than their sound, so that goes first where there is no room.
const keeper = new Keeper(new Archive({ makeRoom: () => sounds.dropOldest() }), transcript);
const tape = new Tape($("tape"), transcript);
const announce = (text) => ($("announcer").textContent = text);
const captions = new Captions(transcript, { list: $("turns"), earlier: $("earlier"), later: $("later"), live: $("live") });
const words = new WordTimes($("captions"), $("tip"), announce);
const settings = connectSettings(preferences, sounds, () => tape.draw());
const correction = new Correction(
  transcript,
  captions,
  { bar: $("word-bar"), heard: $("word-heard"), hear: $("word-hear"), restore: $("word-restore"), remove: $("word-remove") },
  { canHear: (word) => Boolean(sounds.at(keeper.id, word.start)), play: hear, announce },
);
const share = new Share(
  {
    dialog: $("share-dialog"), begin: $("share-begin"), made: $("share-made"), address: $("share-address"),
    copyButton: $("share-copy"), stop: $("share-stop"), problem: $("share-problem"),
  },
  { link: () => liveLink(), key: () => preferences.key, copy: (text, button) => copy(text, button) },
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
  keeper,
  { dialog: $("library"), field: $("library-field"), found: $("library-found"), list: $("library-list"), none: $("library-none") },
  { busy: () => studio.recording !== null, onOpen: showRestored, onFound: showFound },
);
// All that is finished has been saved as a file.
let saved = true;
// The name of the one file that all captions come from; empty if they do not.
let origin = "";

// What is shown

// A problem stays until it is dismissed, or until `owner`, who told it, has no problem any more.
function showProblem(text, owner = "page", notice = false) {
  const box = $("problem");
  if (!text && owner !== box.dataset.owner) return;
  box.dataset.owner = owner;
  box.dataset.kind = notice ? "notice" : "problem";
  box.hidden = !text;
  $("problem-text").textContent = text;
}

function refresh() {
  const running = studio.recording !== null;
  const { link } = studio;
  $("listen-label").textContent = !running ? "Start listening" : link?.file ? "Cancel" : "Stop";
  $("listen").classList.toggle("running", running);
  $("pause").hidden = !link || Boolean(link.file) || link.finishing;
  $("pause").textContent = studio.paused ? "Resume" : "Pause";
  $("device").disabled = $("open-file").disabled = running;
  $("empty").hidden = running || transcript.entries.length > 0;
  $("captions").hidden = !$("empty").hidden;
  $("after").hidden = !transcript.hasFinished;
  $("clear").disabled = running;
  $("name").hidden = $("captions").hidden;
  $("share").hidden = !liveLink() || !preferences.sharing;
  $("share").textContent = share.active ? "Shared" : "Share";
  $("retry").hidden = link?.state !== "lost";
  if (running) $("restored").hidden = true;
  showStatus();
  showMeters(link);
  showJob(studio.job);
  showTitle(studio.job);
}

// The connection of a session that others can read along; a file that is sent whole has none.
function liveLink() {
  const { link } = studio;
  return link && !link.file && !link.finishing ? link : null;
}

// The title shows the state to a user who is in another tab or another program.
function showTitle(job) {
  const { state, text } = studio.status;
  const now = job?.progress ? `${percent(job.progress)} ${job.name}` : state === "idle" ? "" : text;
  const title = now ? `${now} – Tickertape` : "Tickertape";
  if (document.title !== title) document.title = title;
}

// The countdown changes every second; a screen reader hears only the rest.
function showStatus() {
  const { state, text, countdown } = studio.status;
  $("state").dataset.state = state;
  if ($("state-text").textContent !== text) $("state-text").textContent = text;
  $("countdown").textContent = countdown;
  // Large captions hide the rest of the page; what is wrong they must not hide.
  $("overlay-state").textContent = state === "lost" ? text : "";
}

function showMeters(link) {
  const waiting = link?.waitingSeconds ?? 0;
  $("waiting").textContent = link ? shortSeconds(waiting) : "–";
  $("waiting-box").classList.toggle("warning", Boolean(link?.live) && waiting > SLOW_SECONDS);
  $("elapsed").textContent = clock(link ? link.edge : studio.offset);
  if (!link) $("level").value = 0;
  if (link?.live) $("lag").textContent = studio.lag === null ? "–" : shortSeconds(studio.lag);
  tape.acked = link?.ackedEdge ?? studio.offset;
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
  origin = "";
  saved = !transcript.hasFinished;
  refresh();
}

function showFound(number, text) {
  const turn = transcript.entries.find((entry) => entry.number === number);
  if (turn) search.show(text, turn);
}

// What buttons do

function listen() {
  if (studio.recording) {
    studio.finish();
    return;
  }
  origin = "";
  studio.listen($("device").value);
}

function play([file, ...others]) {
  if (!file) return;
  if (studio.recording) {
    showProblem("Stop first, then open a file.");
    return;
  }
  origin = transcript.entries.length ? "" : file.name.replace(/\.\w+$/, "");
  studio.play(file);
  if (others.length) showProblem(`One file at a time: ${file.name} is transcribed, the other ${others.length} were left out.`, "page", true);
}

function save(format) {
  const { type, write } = FORMATS[format];
  const stamp = new Date().toISOString().slice(0, 16).replace("T", "-").replace(":", "");
  // Names of files must not have these.
  const name = transcript.name.replaceAll(/[/\\:*?"<>|\s]+/g, " ").replace(/^[. ]+/, "").trim();
  download(`${name || origin || `captions-${stamp}`}.${format}`, type, write(transcript));
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

async function hear({ start, end }) {
  try {
    const sound = await sounds.read(keeper.id, start - AROUND_SECONDS, end + AROUND_SECONDS);
    if (sound) await player.play(sound);
    else announce("The sound of this word was not kept");
  } catch (error) {
    // Another word was pressed before this one began.
    if (error?.name !== "AbortError") showProblem("This browser could not play the kept sound.");
  }
}

// The word is heard if its sound is kept, and can be corrected.
function openWord(element) {
  if (sounds.at(keeper.id, element.word.start)) hear(element.word);
  correction.open(element);
}

async function clear() {
  if (!saved && !confirm("Delete these captions? They have not been saved as a file.")) return;
  await keeper.forget();
  startedAnew();
}

async function fresh() {
  await keeper.flush();
  if (!saved && !keeper.complete && !confirm("These captions could not be kept, and have not been saved. Delete them?")) return;
  transcript.clear();
  startedAnew();
}

function startedAnew() {
  saved = true;
  origin = "";
  $("restored").hidden = true;
  tape.clear();
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

studio.addEventListener("change", refresh);
studio.addEventListener("problem", ({ text, notice }) => showProblem(text, "studio", notice));
studio.addEventListener("transcribed", ({ name }) => announce(`${name} is transcribed.`));
studio.addEventListener("key", () => settings.open("key"));
studio.addEventListener("opened", settings.devicesKnown);
studio.addEventListener("sound", ({ samples }) => {
  const { link } = studio;
  if (preferences.choices.keepSound) sounds.take(keeper.id, samples, link.rate, link.edge);
  const level = levelOf(samples);
  $("level").value = level;
  tape.push(level, studio.link.edge);
});
studio.addEventListener("file", ({ link }) => {
  if (preferences.choices.keepSound) sounds.takeFile(keeper.id, link.file, link.offset, link.edge);
});
studio.addEventListener("change", () => !studio.recording && sounds.flush());
keeper.addEventListener("problem", ({ text }) => showProblem(text));
keeper.addEventListener("deleted", ({ id }) => sounds.delete(id));
sounds.addEventListener("problem", ({ text }) => showProblem(text, "sounds"));

for (const kind of ["reset", "named"]) transcript.addEventListener(kind, () => ($("name").value = transcript.name));
transcript.addEventListener("corrected", () => (saved = false));
transcript.addEventListener("added", () => $("captions").hidden && refresh());
transcript.addEventListener("changed", ({ turn }) => {
  if (turn.state === "open") return;
  saved = false;
  $("after").hidden = false;
  // A file is read faster than a screen reader speaks: only its end is announced.
  if (preferences.choices.announce && !studio.link?.file) announce(turn.text);
});

const buttons = {
  listen,
  pause: () => studio.pause(),
  retry: () => studio.link?.retryNow(),
  dismiss: () => showProblem("", $("problem").dataset.owner),
  copy: () => copy(toText(transcript), $("copy")),
  find: () => search.open(),
  clear,
  "go-on": listen,
  afresh: fresh,
  "library-new": async () => {
    $("library").close();
    if (studio.recording) showProblem("Stop first, then begin a new transcript.");
    else await fresh();
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
words.addEventListener("hear", ({ word }) => hear(word.word));
correction.addEventListener("closed", ({ turn, word }) => {
  const shown = [...(captions.items.get(turn)?.querySelectorAll(".word") ?? [])];
  words.go(shown.find((element) => element.word === word) ?? null);
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
  if (studio.recording || (!saved && !keeper.complete)) event.preventDefault();
});
addEventListener("pagehide", () => {
  studio.link?.stop();
  sounds.flush();
});
refresh();
if (preferences.unreadable) showProblem("Some choices for this page could not be read, and are as at first.", "page", true);
const head = await keeper.start(() => !studio.recording && !transcript.entries.length);
if (head) showRestored(head);
if (keeper.works) {
  const heads = await keeper.archive.heads().catch(() => null);
  if (heads) sounds.prune(new Set(heads.map(({ id }) => id)));
}
