// Corrects a word of a finished turn in place: an input field, and a bar with buttons beside it.
//
// The recognised word is stored with the correction, so that the user can restore it.

import { exactClock } from "./format.js";

// Event: `closed` with the `turn` and the `word` to which the keyboard focus should return.
export class Correction extends EventTarget {
  // `hasSound(word)` says whether its sound is stored, `play(word)` plays it, and `announce(text)` has a screen reader
  // say a text.
  constructor(transcript, captions, { bar, heard, hear, restore, remove }, { hasSound, play, announce }) {
    super();
    Object.assign(this, { transcript, captions, bar, heard, hear, restore, hasSound, play, announce });
    this.field = null;
    hear.addEventListener("click", () => play(this.word));
    restore.addEventListener("click", () => this.#apply(this.word.heard));
    remove.addEventListener("click", () => this.#apply(""));
    // The field keeps the focus when the user presses a button of the bar.
    bar.addEventListener("mousedown", (event) => event.preventDefault());
    bar.addEventListener("keydown", (event) => event.key === "Escape" && this.#close());
    bar.addEventListener("focusout", (event) => this.#focusMoved(event));
    addEventListener("scroll", () => this.#place(), { passive: true });
    addEventListener("resize", () => this.#place());
  }

  // `element` shows the word on the page.
  open(element) {
    const { turn } = element.closest("li");
    const { word } = element;
    if (this.field) this.#apply(this.field.value, false);
    if (turn.state === "open" || !element.isConnected) return;
    this.captions.stopFollowing();
    Object.assign(this, { turn, word, element });
    const field = document.createElement("input");
    Object.assign(field, { type: "text", className: "edit", value: word.word, maxLength: 200, autocomplete: "off", spellcheck: true });
    field.ariaLabel = `Correct “${word.word || word.heard}”, said at ${exactClock(word.start)}`;
    field.setAttribute("aria-describedby", this.heard.id);
    field.size = Math.min(24, Math.max(4, word.word.length + 1));
    field.addEventListener("keydown", (event) => this.#key(event));
    field.addEventListener("focusout", (event) => this.#focusMoved(event));
    this.field = field;
    element.replaceWith(field);
    const corrected = word.heard !== undefined;
    this.heard.textContent = corrected ? `Heard: ${word.heard}` : "Enter keeps it, Escape leaves it as it was.";
    this.heard.classList.toggle("keys", !corrected);
    this.restore.hidden = !corrected;
    this.hear.hidden = !this.hasSound(word);
    this.bar.hidden = false;
    this.#place();
    field.focus({ preventScroll: true });
    field.select();
  }

  #key(event) {
    event.stopPropagation();
    if (event.isComposing) return;
    if (event.key === "Enter") this.#apply(this.field.value);
    else if (event.key === "Escape") this.#close();
    else return;
    event.preventDefault();
  }

  // Leaving the field applies its text; moving between the field and its buttons does not leave it.
  #focusMoved({ relatedTarget }) {
    if (!this.field || relatedTarget === this.field || this.bar.contains(relatedTarget)) return;
    // The user is in another window and may return to the field.
    if (!relatedTarget && !document.hasFocus()) return;
    this.#apply(this.field.value, false);
  }

  #apply(text, returnFocus = true) {
    const { turn, word } = this;
    const before = word.word;
    this.#close(returnFocus, () => this.transcript.correct(turn, word, text));
    if (word.word !== before) this.announce(word.word ? `Corrected: ${word.word}` : `Removed: ${word.heard}`);
  }

  #close(returnFocus = true, change = () => {}) {
    const { turn, word, field, element } = this;
    if (!field) return;
    this.field = null;
    this.bar.hidden = true;
    field.replaceWith(element);
    change();
    // Show changes of the turn that came during the correction.
    this.captions.refresh(turn);
    if (returnFocus) this.dispatchEvent(Object.assign(new Event("closed"), { turn, word }));
  }

  // Places the bar below the word, or above it if there is no room.
  #place() {
    if (!this.field) return;
    const box = this.field.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.bar;
    const below = box.bottom + 6 + height < innerHeight - 120;
    this.bar.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
    this.bar.style.top = `${below ? box.bottom + 6 : box.top - height - 6}px`;
  }
}
