// The audio worklet that records: on the audio thread it mixes to mono, decimates, and posts PCM16 chunks of 60 ms to
// the page.

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
    // A source that has ended gives no channels. Returning true keeps the node alive until the page disconnects it.
    if (channels.length) this.collect(this.decimator.push(downmix(channels)));
    return true;
  }

  collect(samples) {
    let copied = 0;
    while (copied < samples.length) {
      const part = samples.subarray(copied, copied + this.chunk.length - this.filled);
      this.chunk.set(part, this.filled);
      this.filled += part.length;
      copied += part.length;
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
