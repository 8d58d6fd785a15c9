// Corrects a word of a finished turn where it stands. What was heard is kept with the word, and one press brings it back.

import { exactClock } from "./format.js";

// Tells `closed` with the turn and the word when the keyboard should go back to it.
export class Correction extends EventTarget {
  // `canHear(word)` says whether its sound is kept, `hear(word)` plays it.
  constructor(transcript, captions, { bar, heard, hear, restore, remove }, { canHear, play, announce }) {
    super();
    Object.assign(this, { transcript, captions, bar, heard, hear, restore, canHear, play, announce });
    this.field = null;
    hear.addEventListener("click", () => play(this.word));
    restore.addEventListener("click", () => this.#keep(this.word.heard));
    remove.addEventListener("click", () => this.#keep(""));
    // The field keeps the keyboard when the user presses a button beside it.
    bar.addEventListener("mousedown", (event) => event.preventDefault());
    bar.addEventListener("keydown", (event) => event.key === "Escape" && this.#close());
    bar.addEventListener("focusout", (event) => this.#left(event));
    addEventListener("scroll", () => this.#place(), { passive: true });
    addEventListener("resize", () => this.#place());
  }

  // `element` is the word on the page.
  open(element) {
    const { turn } = element.closest("li");
    const { word } = element;
    if (this.field) this.#keep(this.field.value, false);
    if (turn.state === "open" || !element.isConnected) return;
    this.captions.stay();
    Object.assign(this, { turn, word, element });
    const field = document.createElement("input");
    Object.assign(field, { type: "text", className: "edit", value: word.word, maxLength: 200, autocomplete: "off", spellcheck: true });
    field.ariaLabel = `Correct “${word.word || word.heard}”, said at ${exactClock(word.start)}`;
    field.setAttribute("aria-describedby", this.heard.id);
    field.size = Math.min(24, Math.max(4, word.word.length + 1));
    field.addEventListener("keydown", (event) => this.#key(event));
    field.addEventListener("focusout", (event) => this.#left(event));
    this.field = field;
    element.replaceWith(field);
    const corrected = word.heard !== undefined;
    this.heard.textContent = corrected ? `Heard: ${word.heard}` : "Enter keeps it, Escape leaves it as it was.";
    this.heard.classList.toggle("keys", !corrected);
    this.restore.hidden = !corrected;
    this.hear.hidden = !this.canHear(word);
    this.bar.hidden = false;
    this.#place();
    field.focus({ preventScroll: true });
    field.select();
  }

  #key(event) {
    event.stopPropagation();
    if (event.isComposing) return;
    if (event.key === "Enter") this.#keep(this.field.value);
    else if (event.key === "Escape") this.#close();
    else return;
    event.preventDefault();
  }

  // To the buttons of the word and back is no leaving.
  #left({ relatedTarget }) {
    if (!this.field || relatedTarget === this.field || this.bar.contains(relatedTarget)) return;
    // Another window took the focus; the word waits.
    if (!relatedTarget && !document.hasFocus()) return;
    this.#keep(this.field.value, false);
  }

  #keep(text, back = true) {
    const { turn, word } = this;
    const before = word.word;
    this.#close(back, () => this.transcript.correct(turn, word, text));
    if (word.word !== before) this.announce(word.word ? `Corrected: ${word.word}` : `Removed: ${word.heard}`);
  }

  #close(back = true, change = () => {}) {
    const { turn, word, field, element } = this;
    if (!field) return;
    this.field = null;
    this.bar.hidden = true;
    field.replaceWith(element);
    change();
    // What came while the word was being corrected.
    this.captions.refresh(turn);
    if (back) this.dispatchEvent(Object.assign(new Event("closed"), { turn, word }));
  }

  // Below the word, as far as there is room.
  #place() {
    if (!this.field) return;
    const box = this.field.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.bar;
    const below = box.bottom + 6 + height < innerHeight - 120;
    this.bar.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
    this.bar.style.top = `${below ? box.bottom + 6 : box.top - height - 6}px`;
  }
}
