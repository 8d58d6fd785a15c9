// Runs on the audio thread: channels -> one channel -> speech rate -> PCM16, handed over in chunks of 60 ms.

import { Decimator, downmix, toPcm16 } from "./decimator.js";

const CHUNK_SECONDS = 0.06;

class Recorder extends AudioWorkletProcessor {
  constructor() {
    super();
    this.decimator = new Decimator(sampleRate);
    this.chunk = new Float32Array(Math.round(this.decimator.rate * CHUNK_SECONDS));
    this.filled = 0;
  }

  process(inputs) {
    const channels = inputs[0];
    // A source that has ended gives no channels; the node stays alive until the page lets it go.
    if (channels.length) this.take(this.decimator.push(downmix(channels)));
    return true;
  }

  take(samples) {
    let taken = 0;
    while (taken < samples.length) {
      const part = samples.subarray(taken, taken + this.chunk.length - this.filled);
      this.chunk.set(part, this.filled);
      this.filled += part.length;
      taken += part.length;
      if (this.filled === this.chunk.length) this.send();
    }
  }

  send() {
    const pcm = toPcm16(this.chunk);
    this.port.postMessage(pcm, [pcm.buffer]);
    this.filled = 0;
  }
}

registerProcessor("recorder", Recorder);
