// The viewers' page, /watch/NAME: follows the words of a published session in large type.
//
// With `?overlay` it is an overlay for video mixers such as OBS; `lines` is then the number of turns, `size` the type
// size.

import { Preferences } from "./preferences.js";
import { secondsToWait } from "./retry.js";
import { textsFor } from "./watch-texts.js";
import { WatchTranscript } from "./watch-transcript.js";

const SIZES = [3, 4, 5, 6.5, 8];
const OVERLAY_LINES = 2;
// A viewer whose scroll position is at most this far from the end follows new text.
const FOLLOW_PIXELS = 40;

const byId = (id) => document.getElementById(id);
const query = new URLSearchParams(location.search);
const name = decodeURIComponent(location.pathname.split("/").at(-1));
// The token follows '#', so that it is in no log. Programs that drop that part of an address may put it into the query.
const token = location.hash.slice(1) || query.get("token") || "";
const overlay = query.has("overlay");
const mostLines = overlay ? Math.max(1, Number(query.get("lines")) || OVERLAY_LINES) : Infinity;
const { language, texts } = textsFor(navigator.languages ?? [navigator.language]);
const preferences = new Preferences();
const transcript = new WatchTranscript();
// The paragraph of each turn, by the turn's id.
const elements = new Map();
let paused = false;
let frame = 0;
let tries = 0;
let state = "connecting";

function setUp() {
  const root = document.documentElement;
  root.lang = language;
  root.classList.toggle("obs", overlay);
  document.title = name;
  byId("captions").setAttribute("aria-label", texts.captions);
  byId("follow").textContent = texts.follow;
  for (const id of ["smaller", "larger"]) byId(id).setAttribute("aria-label", texts[id]);
  byId("pause").addEventListener("click", () => pause(!paused));
  byId("follow").addEventListener("click", follow);
  byId("smaller").addEventListener("click", () => resize(-1));
  byId("larger").addEventListener("click", () => resize(1));
  byId("captions").addEventListener("scroll", showFollow);
  addEventListener("resize", draw);
  addEventListener("keydown", key);
  pause(false);
  resize(0);
}

function key(event) {
  if (event.target.closest?.("button") && event.key === " ") return;
  const action = { " ": () => pause(!paused), "+": () => resize(1), "=": () => resize(1), "-": () => resize(-1) }[event.key];
  if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  action();
}

function pause(value) {
  paused = value;
  byId("pause").textContent = paused ? texts.resume : texts.pause;
  byId("pause").setAttribute("aria-pressed", String(paused));
  if (!paused) drawLater();
}

function resize(by) {
  const wanted = Number(query.get("size"));
  if (overlay && wanted) {
    document.documentElement.style.setProperty("--watch-size", Math.min(20, Math.max(1, wanted)));
    return;
  }
  const at = SIZES.indexOf(preferences.choices.overlay);
  const size = SIZES[Math.max(0, Math.min(SIZES.length - 1, at + by))];
  if (by) preferences.set("overlay", size);
  document.documentElement.style.setProperty("--watch-size", size);
  drawLater();
}

// Drawing

function drawLater() {
  if (!frame) frame = requestAnimationFrame(() => { frame = 0; draw(); });
}

function isAtEnd() {
  const box = byId("captions");
  return box.scrollHeight - box.scrollTop - box.clientHeight < FOLLOW_PIXELS;
}

function follow() {
  const box = byId("captions");
  box.scrollTop = box.scrollHeight;
  showFollow();
}

function showFollow() {
  byId("follow").hidden = overlay || isAtEnd();
}

function draw() {
  if (paused) return;
  const follows = overlay || isAtEnd() || !elements.size;
  const turns = transcript.turns.slice(-mostLines);
  const wanted = new Set(turns.map(({ id }) => id));
  for (const [id, element] of elements) {
    if (!wanted.has(id)) {
      element.remove();
      elements.delete(id);
    }
  }
  const list = byId("lines");
  turns.forEach(({ id, text, open }, at) => {
    let element = elements.get(id);
    if (!element) {
      element = document.createElement("p");
      elements.set(id, element);
    }
    if (element.textContent !== text) element.textContent = text;
    element.classList.toggle("open", open);
    if (list.children[at] !== element) list.insertBefore(element, list.children[at] ?? null);
  });
  if (follows) follow();
  else showFollow();
}

function show(next) {
  state = next;
  const element = byId("state");
  element.dataset.state = { live: "live", lost: "lost", invalid: "lost", full: "lost" }[next] ?? "idle";
  byId("state-text").textContent = texts[next];
}

// The connection

function connect() {
  const address = new URL(`../v1/sessions/${encodeURIComponent(name)}/events`, location.href);
  address.hash = address.search = "";
  const http = address.href;
  address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
  const socket = new WebSocket(address.href, token ? ["token", token] : []);
  socket.onmessage = ({ data }) => {
    tries = 0;
    const finished = transcript.apply(JSON.parse(data));
    if (finished.length && preferences.choices.announce && !overlay) byId("announcer").textContent = finished.join(" ");
    const before = state === "live" || state === "over" ? "over" : "waiting";
    show(transcript.live ? "live" : before);
    drawLater();
  };
  socket.onclose = () => onClosed(http);
}

// Reconnects. A browser does not say why a socket was refused, so the page first asks over HTTP.
async function onClosed(http) {
  if (state === "connecting" || state !== "invalid") show("lost");
  let reason = { lost: true };
  try {
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    const answer = await fetch(http, { method: "HEAD", headers });
    if (answer.status === 401 || answer.status === 403) {
      show("invalid");
      return;
    }
    reason = { full: answer.status === 503, soon: answer.ok };
    if (reason.full) show("full");
  } catch {
    // The server cannot be reached.
  }
  setTimeout(connect, 1000 * secondsToWait(reason, tries));
  tries += 1;
}

setUp();
show("connecting");
connect();
