// Shows the newest captions in large type: full screen, or in a small window above all others.

import { FloatingWindow, fillLines } from "./floating-window.js";
import { piecesOf, speakerName } from "./transcript.js";

// As much text as a viewer can read at once.
const CHARACTERS = 240;
// Type sizes in percent of the window's width.
const SIZES = [3, 4, 5, 6.5, 8];

export class Overlay {
  constructor(transcript, preferences, { layer, lines, smaller, larger, float, close }, showProblem) {
    Object.assign(this, { transcript, preferences, layer, lines, showProblem });
    this.floating = new FloatingWindow();
    this.opener = null;
    float.hidden = !FloatingWindow.isSupported;
    smaller.addEventListener("click", () => this.#resize(-1));
    larger.addEventListener("click", () => this.#resize(1));
    close.addEventListener("click", () => this.close());
    float.addEventListener("click", () => this.#float());
    layer.addEventListener("keydown", (event) => this.#key(event));
    // Leaving fullscreen by the browser's own control also closes the layer.
    document.addEventListener("fullscreenchange", () => !document.fullscreenElement && this.#hide());
    for (const kind of ["added", "grown", "changed", "corrected", "labelled", "removed", "voices", "reset"]) {
      transcript.addEventListener(kind, () => this.#drawNextFrame());
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

  // In fullscreen the layer is hidden when fullscreen has ended; no element outside can have the focus before.
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
      this.showProblem(`The small window could not be opened: ${error.message}`);
    }
  }

  #resize(by) {
    const index = SIZES.indexOf(this.preferences.choices.overlay);
    this.preferences.set("overlay", SIZES[Math.max(0, Math.min(SIZES.length - 1, index + by))]);
    this.#showSize();
  }

  #showSize() {
    this.layer.style.setProperty("--overlay-size", this.preferences.choices.overlay);
  }

  #drawNextFrame() {
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

  // The last turns with text, oldest first, as many as fit in CHARACTERS.
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

  // A turn as parts `{name, number, text}`, one for each change of speaker; `number` selects the colour. Without names
  // while the turn is open or there is only one speaker.
  #parts(turn) {
    const voices = [...this.transcript.voices];
    if (turn.state === "open" || voices.length < 2) return [{ name: "", text: turn.text.trim().slice(-CHARACTERS) }];
    const parts = [{ name: "", text: "" }];
    for (const { text, word } of piecesOf(turn)) {
      const name = word?.speaker ? speakerName(word.speaker) : "";
      if (name && name !== parts.at(-1).name) parts.push({ name, number: voices.indexOf(word.speaker), text: "" });
      parts.at(-1).text += text;
    }
    let remaining = CHARACTERS;
    const shown = [];
    for (const part of parts.reverse()) {
      const text = part.text.trim();
      if (!text || remaining <= 0) continue;
      shown.unshift({ ...part, text: text.slice(-remaining) });
      remaining -= text.length;
    }
    return shown;
  }
}
