// The newest captions in large type: over the whole screen, and in a small window that stays above all others.

import { FloatingWindow, fillLines } from "./floating.js";
import { piecesOf, speakerName } from "./transcript.js";

const CHARACTERS = 240;
const SIZES = [3, 4, 5, 6.5, 8];

export class Overlay {
  constructor(transcript, preferences, { layer, lines, smaller, larger, float, close }, say) {
    Object.assign(this, { transcript, preferences, layer, lines, say });
    this.floating = new FloatingWindow();
    this.opener = null;
    float.hidden = !FloatingWindow.possible;
    smaller.addEventListener("click", () => this.#resize(-1));
    larger.addEventListener("click", () => this.#resize(1));
    close.addEventListener("click", () => this.close());
    float.addEventListener("click", () => this.#float());
    layer.addEventListener("keydown", (event) => this.#key(event));
    // The browser's own way out of fullscreen closes the layer too.
    document.addEventListener("fullscreenchange", () => !document.fullscreenElement && this.#hide());
    for (const kind of ["added", "grown", "changed", "corrected", "labelled", "removed", "voices", "reset"]) {
      transcript.addEventListener(kind, () => this.#later());
    }
    this.#showSize();
  }

  // Browsers that refuse fullscreen show the layer over the page.
  async open() {
    this.opener = document.activeElement;
    this.layer.hidden = false;
    this.#draw();
    this.layer.focus();
    await this.layer.requestFullscreen?.().catch(() => {});
  }

  // Nothing outside can have the focus before fullscreen has ended.
  close() {
    if (document.fullscreenElement) document.exitFullscreen();
    else this.#hide();
  }

  #hide() {
    if (this.layer.hidden) return;
    this.layer.hidden = true;
    this.opener?.focus();
  }

  #key(event) {
    if (event.key === "Escape") this.close();
    else if (event.key === "+" || event.key === "=") this.#resize(1);
    else if (event.key === "-") this.#resize(-1);
  }

  async #float() {
    try {
      await this.floating.open();
      this.close();
      this.#draw();
    } catch (error) {
      this.say(`The small window could not be opened: ${error.message}`);
    }
  }

  #resize(by) {
    const at = SIZES.indexOf(this.preferences.choices.overlay);
    this.preferences.set("overlay", SIZES[Math.max(0, Math.min(SIZES.length - 1, at + by))]);
    this.#showSize();
  }

  #showSize() {
    this.layer.style.setProperty("--overlay-size", this.preferences.choices.overlay);
  }

  #later() {
    if (this.frame || (this.layer.hidden && !this.floating.shown)) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.#draw();
    });
  }

  #draw() {
    const newest = this.#newest();
    if (!this.layer.hidden) fillLines(this.lines, newest);
    this.floating.draw(newest);
  }

  // The last turns with text, as many as viewers can read at once, oldest first.
  #newest() {
    const { entries } = this.transcript;
    const newest = [];
    let length = 0;
    for (let n = entries.length - 1; n >= 0 && length < CHARACTERS; n -= 1) {
      const { state, text } = entries[n];
      if (!text || state === "note") continue;
      newest.unshift({ open: state === "open", parts: this.#parts(entries[n]) });
      length += text.length;
    }
    return newest;
  }

  // A turn as `{name, number, text}`, one part for each change of speaker; without names while there is one speaker, or
  // none is known yet.
  #parts(turn) {
    const voices = [...this.transcript.voices];
    if (turn.state === "open" || voices.length < 2) return [{ name: "", text: turn.text.trim().slice(-CHARACTERS) }];
    const parts = [{ name: "", text: "" }];
    for (const { text, word } of piecesOf(turn)) {
      const name = word?.speaker ? speakerName(word.speaker) : "";
      if (name && name !== parts.at(-1).name) parts.push({ name, number: voices.indexOf(word.speaker), text: "" });
      parts.at(-1).text += text;
    }
    let room = CHARACTERS;
    const shown = [];
    for (const part of parts.reverse()) {
      const text = part.text.trim();
      if (!text || room <= 0) continue;
      shown.unshift({ ...part, text: text.slice(-room) });
      room -= text.length;
    }
    return shown;
  }
}
