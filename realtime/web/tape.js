// The tape: the last seconds of sound as bars that run to the left. Bars are pale until the server has acknowledged them,
// and a line beneath them marks speech.

const BAR = 3;
const PITCH = 5;
const BAR_SECONDS = 0.1;

export class Tape {
  constructor(canvas, transcript) {
    Object.assign(this, { canvas, transcript });
    this.context = canvas.getContext("2d");
    this.bars = [];
    this.peak = 0;
    this.edge = this.acked = 0;
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  clear() {
    this.bars = [];
    this.draw();
  }

  // `level` from 0 to 1, `edge` the time of the newest sound.
  push(level, edge) {
    this.peak = Math.max(this.peak, level);
    this.edge = edge;
    const last = this.bars.at(-1)?.end ?? 0;
    if (edge - last < BAR_SECONDS) return;
    this.bars.push({ level: this.peak, end: edge });
    this.peak = 0;
    if (this.bars.length > 1024) this.bars.splice(0, 512);
    this.draw();
  }

  draw() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.#paint();
    });
  }

  #paint() {
    const { canvas, context } = this;
    const ratio = devicePixelRatio;
    const { clientWidth: width, clientHeight: height } = canvas;
    if (!width) return;
    if (canvas.width !== width * ratio || canvas.height !== height * ratio) {
      canvas.width = width * ratio;
      canvas.height = height * ratio;
    }
    const style = getComputedStyle(canvas);
    const colour = (name) => style.getPropertyValue(name);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const speech = this.#speech();
    const middle = (height - 8) / 2;
    let x = width - PITCH;
    for (let i = this.bars.length - 1; i >= 0 && x > -PITCH; i -= 1, x -= PITCH) {
      const { level, end } = this.bars[i];
      const size = Math.max(2, level * (height - 10));
      context.fillStyle = colour(end <= this.acked ? "--tape-heard" : "--tape-waiting");
      context.beginPath();
      context.roundRect(x, middle - size / 2, BAR, size, BAR / 2);
      context.fill();
      // The first bar of a turn stays bare, so that turns can be told apart.
      if (speech.some((turn) => end > turn.start + BAR_SECONDS && end <= (turn.end ?? Infinity))) {
        context.fillStyle = colour("--tape-speech");
        context.fillRect(x - 1, height - 5, PITCH, 2);
      }
    }
    context.fillStyle = colour("--tape-blank");
    for (; x > -PITCH; x -= PITCH) context.fillRect(x, middle - 1, BAR, 2);
  }

  #speech() {
    const oldest = this.bars.at(-200)?.end ?? 0;
    return this.transcript.entries.slice(-40).filter((turn) => turn.state !== "note" && (turn.end ?? Infinity) > oldest);
  }
}

// Loudness of a chunk on a scale that fits speech: 0 at -60 dB, 1 at full scale.
export function levelOf(samples) {
  let sum = 0;
  for (const sample of samples) sum += sample * sample;
  const rms = Math.sqrt(sum / samples.length) / 32768;
  return rms > 0 ? Math.max(0, Math.min(1, 1 + Math.log10(rms) / 3)) : 0;
}
