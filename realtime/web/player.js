// Plays a stretch of kept sound, one at a time.

export class Player {
  constructor() {
    this.audio = new Audio();
  }

  // Raises where the browser cannot play this sound.
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
