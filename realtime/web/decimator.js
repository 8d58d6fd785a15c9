// Brings a microphone's rate down to what speech needs: a low-pass filter that computes only the samples that are kept.

const TARGET_RATE = 16000;
const TAPS_PER_STEP = 32;

// The largest whole step that leaves a whole rate of at least 16 kHz: 48000 -> 3, 44100 -> 2, 16000 -> 1.
export function stepFor(rate) {
  let step = Math.max(1, Math.floor(rate / TARGET_RATE));
  while (rate % step) step -= 1;
  return step;
}

function lowPass(step) {
  const length = TAPS_PER_STEP * step + 1;
  const middle = (length - 1) / 2;
  // A little below half the new rate, so that the filter's slope ends where folding would begin.
  const cutoff = 0.45 / step;
  const taps = new Float32Array(length);
  let sum = 0;
  for (let i = 0; i < length; i += 1) {
    const x = i - middle;
    const sinc = x === 0 ? 2 * cutoff : Math.sin(2 * Math.PI * cutoff * x) / (Math.PI * x);
    taps[i] = sinc * (0.54 - 0.46 * Math.cos((2 * Math.PI * i) / (length - 1)));
    sum += taps[i];
  }
  return taps.map((tap) => tap / sum);
}

export class Decimator {
  constructor(rate) {
    this.step = stepFor(rate);
    this.rate = rate / this.step;
    this.taps = this.step === 1 ? null : lowPass(this.step);
    this.held = new Float32Array(0);
  }

  // Takes samples in blocks of any size; the result does not depend on how they were cut.
  push(samples) {
    if (!this.taps) return samples;
    const input = new Float32Array(this.held.length + samples.length);
    input.set(this.held);
    input.set(samples, this.held.length);
    const count = Math.max(0, Math.floor((input.length - this.taps.length) / this.step) + 1);
    const output = new Float32Array(count);
    for (let n = 0; n < count; n += 1) {
      const start = n * this.step;
      let sum = 0;
      for (let k = 0; k < this.taps.length; k += 1) sum += this.taps[k] * input[start + k];
      output[n] = sum;
    }
    this.held = input.slice(count * this.step);
    return output;
  }
}

export function toPcm16(samples) {
  const pcm = new Int16Array(samples.length);
  for (let i = 0; i < samples.length; i += 1) {
    pcm[i] = Math.round(Math.max(-1, Math.min(1, samples[i])) * 32767);
  }
  return pcm;
}

// Average of all channels, as one.
export function downmix(channels) {
  if (channels.length === 1) return channels[0];
  const mono = new Float32Array(channels[0].length);
  for (const channel of channels) {
    for (let i = 0; i < mono.length; i += 1) mono[i] += channel[i] / channels.length;
  }
  return mono;
}
