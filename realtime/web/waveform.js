// Draws the waveform at the top of the page: the last seconds of sound as bars that scroll to the left.
//
// Bars are pale until the server has acknowledged their sound, and a line below the bars marks speech.

// CSS pixels: the width of a bar, and the distance from one bar to the next.
const BAR_WIDTH = 3;
const BAR_PITCH = 5;
const BAR_SECONDS = 0.1;
// More bars than the page is wide; beyond them the older half is dropped.
const MAX_BARS = 1024;

export class Waveform {
  constructor(canvas, transcript) {
    Object.assign(this, { canvas, transcript });
    this.context = canvas.getContext("2d");
    // `{level, end}` of each bar; all times are seconds on the transcript's clock.
    this.bars = [];
    // The highest level since the newest bar.
    this.peak = 0;
    this.ackedSeconds = 0;
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  clear() {
    this.bars = [];
    this.draw();
  }

  // `level` from 0 to 1; `end` is where the newest sound ends.
  push(level, end) {
    this.peak = Math.max(this.peak, level);
    const last = this.bars.at(-1)?.end ?? 0;
    if (end - last < BAR_SECONDS) return;
    this.bars.push({ level: this.peak, end });
    this.peak = 0;
    if (this.bars.length > MAX_BARS) this.bars.splice(0, MAX_BARS / 2);
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
    const turns = this.#shownTurns();
    const middle = (height - 8) / 2;
    let x = width - BAR_PITCH;
    for (let i = this.bars.length - 1; i >= 0 && x > -BAR_PITCH; i -= 1, x -= BAR_PITCH) {
      const { level, end } = this.bars[i];
      const size = Math.max(2, level * (height - 10));
      context.fillStyle = colour(end <= this.ackedSeconds ? "--waveform-acked" : "--waveform-waiting");
      context.beginPath();
      context.roundRect(x, middle - size / 2, BAR_WIDTH, size, BAR_WIDTH / 2);
      context.fill();
      // The first bar of a turn has no line, so that neighbouring turns are distinguishable.
      if (turns.some((turn) => end > turn.start + BAR_SECONDS && end <= (turn.end ?? Infinity))) {
        context.fillStyle = colour("--waveform-speech");
        context.fillRect(x - 1, height - 5, BAR_PITCH, 2);
      }
    }
    context.fillStyle = colour("--waveform-blank");
    for (; x > -BAR_PITCH; x -= BAR_PITCH) context.fillRect(x, middle - 1, BAR_WIDTH, 2);
  }

  // The turns that may overlap the bars on the screen.
  #shownTurns() {
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
