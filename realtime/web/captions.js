// Turns on the page. However long the session, only a window of them is in the document; the rest is a button away.

import { clock, exactClock, percent } from "./format.js";
import { piecesOf, speakerName } from "./transcript.js";

const MOST_SHOWN = 80;
const STEP = 40;
// Nearer to the end than this, the page follows new text.
const FOLLOW_PIXELS = 160;
// A word of which the model is less sure than this is shaded.
const UNSURE_BELOW = 0.5;
// Speakers with colours of their own; further ones begin again.
const COLOURS = 6;

// Tells `shown` when other turns are in the document than before.
export class Captions extends EventTarget {
  constructor(transcript, { list, earlier, later, live }) {
    super();
    Object.assign(this, { transcript, list, earlier, later, live });
    this.items = new Map();
    this.first = this.last = 0;
    this.following = true;
    transcript.addEventListener("reset", () => this.toLive());
    transcript.addEventListener("added", () => this.#added());
    transcript.addEventListener("grown", ({ turn, delta }) => this.#grown(turn, delta));
    for (const kind of ["changed", "corrected", "labelled"]) transcript.addEventListener(kind, ({ turn }) => this.refresh(turn));
    transcript.addEventListener("voices", () => this.#refill());
    transcript.addEventListener("removed", ({ turn }) => this.#removed(turn));
    earlier.addEventListener("click", () => this.#move(-STEP));
    later.addEventListener("click", () => this.#move(STEP));
    live.addEventListener("click", () => this.toLive());
    addEventListener("scroll", () => this.#scrolled(), { passive: true });
    addEventListener("resize", () => this.#follow());
  }

  toLive() {
    const { length } = this.transcript.entries;
    this.#rebuild(length - STEP, length);
    this.following = true;
    this.#follow();
  }

  // Brings a turn onto the screen, wherever in the transcript it is.
  show(turn) {
    const at = this.transcript.entries.indexOf(turn);
    if (!this.items.has(turn)) this.#rebuild(at - STEP, Math.min(at + STEP, this.transcript.entries.length));
    this.#leaveLive();
    this.items.get(turn).scrollIntoView({ block: "center", behavior: "instant" });
    this.#scrolled();
  }

  // Keeps the scroll position while the user edits a caption and new captions come below.
  stay() {
    this.#leaveLive();
    this.#controls();
  }

  // Also if the page was about to scroll to the newest text.
  #leaveLive() {
    this.following = false;
    cancelAnimationFrame(this.followFrame);
    this.followFrame = 0;
  }

  get #atEnd() {
    return this.last === this.transcript.entries.length;
  }

  #added() {
    const { length } = this.transcript.entries;
    if (this.last !== length - 1) {
      this.#controls();
      return;
    }
    this.last = length;
    this.#append(this.transcript.entries[length - 1]);
    if (this.following) {
      while (this.last - this.first > MOST_SHOWN) this.#dropFirst();
    } else if (this.last - this.first > 2 * MOST_SHOWN) {
      // The user reads further up: the captions in view stay, and a button leads to the newest.
      this.#rebuild(this.first, this.first + MOST_SHOWN);
    }
    this.#controls();
    this.#follow();
  }

  #grown(turn, delta) {
    const item = this.items.get(turn);
    if (!item) return;
    item.classList.remove("listening");
    const text = item.querySelector(".text");
    if (text.firstChild) text.firstChild.appendData(delta);
    else text.append(delta);
    this.#follow();
  }

  refresh(turn) {
    const item = this.items.get(turn);
    if (!item) return;
    fill(item, turn, this.transcript.voices);
    this.#follow();
  }

  // Speakers have names and colours as soon as there are two.
  #refill() {
    for (const [turn, item] of this.items) if (turn.state !== "open") fill(item, turn, this.transcript.voices);
    this.#follow();
  }

  #removed(turn) {
    const item = this.items.get(turn);
    // Only the newest few are ever removed, and those lie in the window or behind it.
    if (item) {
      item.remove();
      this.items.delete(turn);
      this.last -= 1;
    }
    this.#controls();
  }

  #move(step) {
    const { length } = this.transcript.entries;
    const anchor = this.items.get(this.transcript.entries[step < 0 ? this.first : this.last - 1]);
    const before = anchor?.getBoundingClientRect().top;
    const first = Math.max(0, Math.min(this.first + step, length - STEP));
    this.following = false;
    this.#rebuild(first, Math.min(length, Math.max(first + MOST_SHOWN, step < 0 ? 0 : this.last)));
    // What was read stays where it was on the screen.
    const after = this.items.get(anchor?.turn)?.getBoundingClientRect().top;
    if (after !== undefined) scrollBy({ top: after - before, behavior: "instant" });
  }

  #rebuild(first, last) {
    this.items.clear();
    this.list.replaceChildren();
    this.first = Math.max(0, first);
    this.last = Math.max(0, last);
    for (const turn of this.transcript.entries.slice(this.first, this.last)) this.#append(turn);
    this.#controls();
    this.dispatchEvent(new Event("shown"));
  }

  #append(turn) {
    const item = document.createElement("li");
    item.turn = turn;
    const mark = document.createElement("time");
    const text = document.createElement("p");
    text.className = "text";
    const copy = document.createElement("button");
    copy.type = "button";
    copy.className = "copy";
    // In reach of the pointer; the keyboard has a key for it, so that it need not walk through all of them.
    copy.tabIndex = -1;
    copy.ariaLabel = "Copy this caption";
    copy.textContent = "Copy";
    item.append(mark, text, copy);
    fill(item, turn, this.transcript.voices);
    this.items.set(turn, item);
    this.list.append(item);
  }

  #dropFirst() {
    const turn = this.list.firstElementChild.turn;
    this.items.get(turn).remove();
    this.items.delete(turn);
    this.first += 1;
  }

  #controls() {
    const hiddenLater = this.transcript.entries.length - this.last;
    this.earlier.hidden = this.first === 0;
    this.earlier.textContent = `Earlier captions (${this.first.toLocaleString()})`;
    this.later.hidden = hiddenLater === 0;
    this.later.textContent = `Later captions (${hiddenLater.toLocaleString()})`;
    this.live.hidden = this.following && this.#atEnd;
  }

  #scrolled() {
    const root = document.documentElement;
    const near = root.scrollHeight - root.clientHeight - root.scrollTop < FOLLOW_PIXELS;
    this.following = near && this.#atEnd;
    this.#controls();
  }

  #follow() {
    if (!this.following || this.followFrame) return;
    this.followFrame = requestAnimationFrame(() => {
      this.followFrame = 0;
      scrollTo({ top: document.documentElement.scrollHeight, behavior: "instant" });
    });
  }
}

function fill(item, turn, voices) {
  item.dataset.state = turn.state;
  item.classList.toggle("listening", turn.state === "open" && !turn.text);
  const [mark, text] = item.children;
  // A word that the user corrects now stays as it is.
  if (text.querySelector("input")) return;
  mark.textContent = clock(turn.start);
  mark.dateTime = `PT${turn.start.toFixed(2)}S`;
  const times = turn.end === null ? `from ${exactClock(turn.start)}` : `${exactClock(turn.start)} to ${exactClock(turn.end)}`;
  // The dot beside the time is filled as far as the server is sure that the turn is over.
  const told = turn.sure !== undefined;
  item.classList.toggle("scored", told);
  if (told) item.style.setProperty("--sure", turn.sure);
  mark.title = told ? `${times}; the server is ${percent(turn.sure)} sure that the turn is over` : times;
  const shown = turn.state === "done" || turn.state === "cut" ? pieces(turn, [...voices]) : [turn.text];
  text.replaceChildren(...shown);
}

function pieces(turn, voices) {
  let last = null;
  return piecesOf(turn).flatMap((part) => {
    const speaker = part.word?.speaker;
    if (voices.length < 2 || !speaker || speaker === last) return [piece(part)];
    last = speaker;
    return [who(speaker, voices.indexOf(speaker)), piece(part)];
  });
}

function who(speaker, number) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "who";
  button.dataset.colour = number % COLOURS;
  button.speaker = speaker;
  button.title = "Give this speaker another name";
  button.textContent = speakerName(speaker);
  return button;
}

function piece({ text, word }) {
  if (!word) return text;
  const span = document.createElement("span");
  const corrected = word.heard !== undefined;
  const unsure = !corrected && word.confidence < UNSURE_BELOW;
  span.className = "word";
  span.classList.toggle("unsure", unsure);
  span.classList.toggle("corrected", corrected);
  span.classList.toggle("removed", !text);
  span.word = word;
  span.textContent = text;
  const heard = corrected ? `, heard as “${word.heard}”` : "";
  span.dataset.time = `${exactClock(word.start)} – ${exactClock(word.end)}${unsure ? ", unsure" : ""}${heard}`;
  return span;
}
