// Plays a part of stored sound; a new part stops the one before.

export class Player {
  constructor() {
    this.audio = new Audio();
  }

  // Plays `blob` between the seconds `from` and `to`. Throws if the browser cannot play it.
  async play({ blob, from, to }) {
    this.stop();
    const { audio } = this;
    audio.src = URL.createObjectURL(blob);
    audio.currentTime = from;
    await audio.play();
    this.timer = setTimeout(() => this.stop(), Math.max(0, to - from) * 1000);
  }

  stop() {
    clearTimeout(this.timer);
    this.audio.pause();
    if (this.audio.src) URL.revokeObjectURL(this.audio.src);
    this.audio.removeAttribute("src");
  }
}
