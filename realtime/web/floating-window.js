// The small window with the newest captions that stays above all other windows.
//
// It is a document picture-in-picture window where the browser has them, and elsewhere a video of drawn text.

import { SPEAKER_COLOURS } from "./captions.js";

// In CSS pixels, as the other sizes.
const SIZE = { width: 640, height: 220 };
// Pixels of the video for each CSS pixel.
const SCALE = 2;
const FONT_PIXELS = 30;
const LINE_PIXELS = 40;
const MARGIN = 20;

export class FloatingWindow {
  static get isSupported() {
    return "documentPictureInPicture" in window || Boolean(document.pictureInPictureEnabled);
  }

  constructor() {
    // One of them is set while the window is shown.
    this.body = this.canvas = null;
  }

  get shown() {
    return Boolean(this.body || this.canvas);
  }

  // Browsers open such a window only right after a click.
  async open() {
    if (this.shown) return;
    if ("documentPictureInPicture" in window) await this.#openDocument();
    else await this.#openVideo();
  }

  // `newest` as for `fillLines`.
  draw(newest) {
    if (this.body) fillLines(this.body, newest);
    else if (this.canvas) this.#drawVideo(newest);
  }

  async #openDocument() {
    const other = await documentPictureInPicture.requestWindow(SIZE);
    const style = other.document.createElement("link");
    style.rel = "stylesheet";
    style.href = new URL("style.css", document.baseURI);
    other.document.head.append(style);
    other.document.title = "Captions";
    other.document.documentElement.dataset.theme = document.documentElement.dataset.theme ?? "";
    this.body = other.document.body;
    this.body.className = "floating";
    other.addEventListener("pagehide", () => (this.body = null));
  }

  async #openVideo() {
    const canvas = document.createElement("canvas");
    canvas.width = SIZE.width * SCALE;
    canvas.height = SIZE.height * SCALE;
    this.canvas = canvas;
    this.#drawVideo([]);
    const video = document.createElement("video");
    video.muted = true;
    video.srcObject = canvas.captureStream();
    try {
      await video.play();
      await video.requestPictureInPicture();
    } catch (error) {
      this.canvas = null;
      throw error;
    }
    video.addEventListener("leavepictureinpicture", () => (this.canvas = null));
  }

  // Draws the newest lines at the bottom, in the colours of the page.
  #drawVideo(newest) {
    const context = this.canvas.getContext("2d");
    const style = getComputedStyle(document.body);
    context.setTransform(SCALE, 0, 0, SCALE, 0, 0);
    context.fillStyle = getComputedStyle(document.documentElement).backgroundColor;
    context.fillRect(0, 0, SIZE.width, SIZE.height);
    context.fillStyle = style.color;
    context.font = `${FONT_PIXELS}px ${style.getPropertyValue("--serif")}`;
    const lines = newest.flatMap(({ parts }) => wrap(context, plainText(parts), SIZE.width - 2 * MARGIN));
    let y = SIZE.height - MARGIN;
    for (let n = lines.length - 1; n >= 0 && y > FONT_PIXELS; n -= 1, y -= LINE_PIXELS) context.fillText(lines[n], MARGIN, y);
  }
}

// Fills an element of any document with one paragraph for each turn, `{open, parts}`; `parts` as `#parts` in overlay.js
// makes them.
export function fillLines(element, newest) {
  const document = element.ownerDocument;
  const lines = newest.map(({ open, parts }) => {
    const line = document.createElement("p");
    line.className = open ? "open" : "";
    for (const { name, number, text } of parts) {
      if (line.hasChildNodes()) line.append(" ");
      if (name) {
        const who = document.createElement("b");
        who.className = "speaker";
        who.dataset.colour = number % SPEAKER_COLOURS;
        who.textContent = `${name}: `;
        line.append(who);
      }
      line.append(text);
    }
    return line;
  });
  element.replaceChildren(...lines);
}

function plainText(parts) {
  return parts.map(({ name, text }) => (name ? `${name}: ${text}` : text)).join(" ");
}

function wrap(context, text, width) {
  const lines = [];
  let line = "";
  for (const word of text.split(/\s+/)) {
    const longer = line ? `${line} ${word}` : word;
    if (line && context.measureText(longer).width > width) {
      lines.push(line);
      line = word;
    } else {
      line = longer;
    }
  }
  return line ? [...lines, line] : lines;
}
