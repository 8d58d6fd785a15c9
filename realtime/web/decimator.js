// Reduces the sample rate of microphone audio to what speech needs (`Decimator`), and converts samples to mono and to
// PCM16.

// The rate of speech models, in Hz.
const TARGET_RATE = 16000;
// Length of the filter: taps for each step of the decimation.
const TAPS_PER_STEP = 32;

// The decimation step: every `step`-th sample is kept. It is the largest for which the new rate is an integer and not
// below 16 kHz: 48000 -> 3, 44100 -> 2. For rates below 16 kHz it is 1.
export function stepFor(rate) {
  let step = Math.max(1, Math.floor(rate / TARGET_RATE));
  while (rate % step) step -= 1;
  return step;
}

// The taps of a windowed-sinc low-pass filter (Hamming window).
function lowPass(step) {
  const length = TAPS_PER_STEP * step + 1;
  const middle = (length - 1) / 2;
  // A little below half the new rate, so that the stopband begins where aliasing would.
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

// A low-pass filter that computes only the samples that are kept.
export class Decimator {
  constructor(rate) {
    this.step = stepFor(rate);
    this.rate = rate / this.step;
    this.taps = this.step === 1 ? null : lowPass(this.step);
    // Input samples that the next outputs need again.
    this.history = new Float32Array(0);
  }

  // Filters the next block of samples; the output does not depend on how the input is divided into blocks.
  push(samples) {
    if (!this.taps) return samples;
    const input = new Float32Array(this.history.length + samples.length);
    input.set(this.history);
    input.set(samples, this.history.length);
    const count = Math.max(0, Math.floor((input.length - this.taps.length) / this.step) + 1);
    const output = new Float32Array(count);
    for (let n = 0; n < count; n += 1) {
      const start = n * this.step;
      let sum = 0;
      for (let k = 0; k < this.taps.length; k += 1) sum += this.taps[k] * input[start + k];
      output[n] = sum;
    }
    this.history = input.slice(count * this.step);
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

// The mean of all channels.
export function downmix(channels) {
  if (channels.length === 1) return channels[0];
  const mono = new Float32Array(channels[0].length);
  for (const channel of channels) {
    for (let i = 0; i < mono.length; i += 1) mono[i] += channel[i] / channels.length;
  }
  return mono;
}
