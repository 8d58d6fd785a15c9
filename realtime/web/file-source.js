// A sound file as a source of PCM16 chunks: decoded by the browser, played at its own pace.

import { downmix, toPcm16 } from "./decimator.js";

const RATE = 16000;
const CHUNK_SECONDS = 0.1;
// Decoding takes the whole file into memory; beyond this a browser tab may not survive it.
export const MAX_FILE_BYTES = 600 * 1024 * 1024;

export class FileSource {
  live = false;
  rate = RATE;

  // `room()` resolves when the server can take more. `onEnd()` is called after the last chunk.
  constructor(file, { room, onChunk, onEnd }) {
    Object.assign(this, { file, room, onChunk, onEnd });
    this.stopped = false;
    this.going = Promise.resolve();
  }

  async open() {
    if (this.file.size > MAX_FILE_BYTES) throw new DOMException("too large", "QuotaExceededError");
    const bytes = await this.file.arrayBuffer();
    // The decoder resamples to the rate of its context, which here is the rate of speech models.
    const decoded = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(bytes);
    const channels = Array.from({ length: decoded.numberOfChannels }, (_, n) => decoded.getChannelData(n));
    this.samples = downmix(channels);
    this.length = this.samples.length;
  }

  get seconds() {
    return this.length / RATE;
  }

  async start() {
    this.run();
  }

  async run() {
    const size = Math.round(RATE * CHUNK_SECONDS);
    let due = performance.now();
    for (let at = 0; at < this.samples.length && !this.stopped; at += size) {
      const early = due - performance.now();
      if (early > 0) await new Promise((done) => setTimeout(done, early));
      await this.going;
      await this.room();
      // What was missed during a pause is not caught up with.
      due = Math.max(due, performance.now() - 1000 * CHUNK_SECONDS) + 1000 * CHUNK_SECONDS;
      if (!this.stopped) this.onChunk(toPcm16(this.samples.subarray(at, at + size)));
    }
    this.samples = new Float32Array(0);
    if (!this.stopped) this.onEnd();
  }

  pause() {
    this.going = new Promise((go) => (this.resume = go));
  }

  resume() {}

  async close() {
    this.stopped = true;
    this.resume();
  }
}
