// Shows the turns of the transcript as captions: of a long one only a part (MAX_SHOWN turns), and buttons for the rest.
//
// So the document stays small however long the session is.

import { clock, exactClock, percent } from "./format.js";
import { piecesOf, speakerName } from "./transcript.js";

// Turns in the document while the page follows new text (twice as many while the user reads further up), and turns by
// which a button moves them.
const MAX_SHOWN = 80;
const STEP = 40;
// A page that is scrolled to within this distance of its end follows new text.
const FOLLOW_PIXELS = 160;
// Words with a lower confidence (0 to 1) are shaded.
const UNSURE_BELOW = 0.5;
// Colours of speakers in style.css; the seventh speaker has the first colour again.
export const SPEAKER_COLOURS = 6;

// Event: `shown` when the document contains other turns than before.
export class Captions extends EventTarget {
  constructor(transcript, { list, earlier, later, live }) {
    super();
    Object.assign(this, { transcript, list, earlier, later, live });
    // The list item of each turn in the document.
    this.items = new Map();
    // The turns in the document are the transcript's entries from index `first` to before index `last`.
    this.first = this.last = 0;
    // Whether the page scrolls to new text.
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

  // Scrolls to a turn, also one that is not in the document.
  show(turn) {
    const index = this.transcript.entries.indexOf(turn);
    if (!this.items.has(turn)) this.#rebuild(index - STEP, Math.min(index + STEP, this.transcript.entries.length));
    this.#cancelFollow();
    this.items.get(turn).scrollIntoView({ block: "center", behavior: "instant" });
    this.#scrolled();
  }

  // Keeps the scroll position while the user edits a caption and new captions come below.
  stopFollowing() {
    this.#cancelFollow();
    this.#showButtons();
  }

  // Also cancels a scroll that is already scheduled.
  #cancelFollow() {
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
      this.#showButtons();
      return;
    }
    this.last = length;
    this.#append(this.transcript.entries[length - 1]);
    if (this.following) {
      while (this.last - this.first > MAX_SHOWN) this.#dropFirst();
    } else if (this.last - this.first > 2 * MAX_SHOWN) {
      // The user reads further up: the captions in view stay, and a button leads to the newest.
      this.#rebuild(this.first, this.first + MAX_SHOWN);
    }
    this.#showButtons();
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
    fillItem(item, turn, this.transcript.voices);
    this.#follow();
  }

  // Names and colours of speakers are shown as soon as there are two speakers.
  #refill() {
    for (const [turn, item] of this.items) if (turn.state !== "open") fillItem(item, turn, this.transcript.voices);
    this.#follow();
  }

  #removed(turn) {
    const item = this.items.get(turn);
    // Only some of the newest turns are ever removed; they are in the document or later than all turns in it.
    if (item) {
      item.remove();
      this.items.delete(turn);
      this.last -= 1;
    }
    this.#showButtons();
  }

  #move(step) {
    const { length } = this.transcript.entries;
    const anchor = this.items.get(this.transcript.entries[step < 0 ? this.first : this.last - 1]);
    const topBefore = anchor?.getBoundingClientRect().top;
    const first = Math.max(0, Math.min(this.first + step, length - STEP));
    this.following = false;
    this.#rebuild(first, Math.min(length, Math.max(first + MAX_SHOWN, step < 0 ? 0 : this.last)));
    // The caption at the edge keeps its place on the screen.
    const topAfter = this.items.get(anchor?.turn)?.getBoundingClientRect().top;
    if (topAfter !== undefined) scrollBy({ top: topAfter - topBefore, behavior: "instant" });
  }

  #rebuild(first, last) {
    this.items.clear();
    this.list.replaceChildren();
    this.first = Math.max(0, first);
    this.last = Math.max(0, last);
    for (const turn of this.transcript.entries.slice(this.first, this.last)) this.#append(turn);
    this.#showButtons();
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
    // For the pointer only: the keyboard has the key C, so that Tab does not stop at every caption.
    copy.tabIndex = -1;
    copy.ariaLabel = "Copy this caption";
    copy.textContent = "Copy";
    item.append(mark, text, copy);
    fillItem(item, turn, this.transcript.voices);
    this.items.set(turn, item);
    this.list.append(item);
  }

  #dropFirst() {
    const turn = this.list.firstElementChild.turn;
    this.items.get(turn).remove();
    this.items.delete(turn);
    this.first += 1;
  }

  #showButtons() {
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
    this.#showButtons();
  }

  #follow() {
    if (!this.following || this.followFrame) return;
    this.followFrame = requestAnimationFrame(() => {
      this.followFrame = 0;
      scrollTo({ top: document.documentElement.scrollHeight, behavior: "instant" });
    });
  }
}

function fillItem(item, turn, voices) {
  item.dataset.state = turn.state;
  item.classList.toggle("listening", turn.state === "open" && !turn.text);
  const [mark, text] = item.children;
  // A turn with an open correction is not redrawn.
  if (text.querySelector("input")) return;
  mark.textContent = clock(turn.start);
  mark.dateTime = `PT${turn.start.toFixed(2)}S`;
  const times = turn.end === null ? `from ${exactClock(turn.start)}` : `${exactClock(turn.start)} to ${exactClock(turn.end)}`;
  // The dot beside the time is filled by the server's probability that the turn has ended.
  const isScored = turn.sure !== undefined;
  item.classList.toggle("scored", isScored);
  if (isScored) item.style.setProperty("--sure", turn.sure);
  mark.title = isScored ? `${times}; the server is ${percent(turn.sure)} sure that the turn is over` : times;
  const shown = turn.state === "done" || turn.state === "cut" ? contentsOf(turn, [...voices]) : [turn.text];
  text.replaceChildren(...shown);
}

// The elements and texts of a turn: its words, and the name of each speaker where the speaker changes.
function contentsOf(turn, voices) {
  let last = null;
  return piecesOf(turn).flatMap((part) => {
    const speaker = part.word?.speaker;
    if (voices.length < 2 || !speaker || speaker === last) return [wordElement(part)];
    last = speaker;
    return [speakerButton(speaker, voices.indexOf(speaker)), wordElement(part)];
  });
}

function speakerButton(speaker, number) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "who";
  button.dataset.colour = number % SPEAKER_COLOURS;
  button.speaker = speaker;
  button.title = "Give this speaker another name";
  button.textContent = speakerName(speaker);
  return button;
}

function wordElement({ text, word }) {
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
