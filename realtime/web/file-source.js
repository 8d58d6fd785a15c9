// A sound file as a source of PCM16 chunks: decodes it in the browser, and plays it in real time.

import { downmix, toPcm16 } from "./decimator.js";

const RATE = 16000;
const CHUNK_SECONDS = 0.1;
// Decoding needs memory for the whole file; a larger one may crash the browser's tab.
export const MAX_FILE_BYTES = 600 * 1024 * 1024;

export class FileSource {
  live = false;
  rate = RATE;

  // `room()` resolves when the server has acknowledged enough for more to be sent. `onEnd()` is called after the last
  // chunk.
  constructor(file, { room, onChunk, onEnd }) {
    Object.assign(this, { file, room, onChunk, onEnd });
    this.stopped = false;
    // Resolves when the source is not paused.
    this.unpaused = Promise.resolve();
  }

  async open() {
    if (this.file.size > MAX_FILE_BYTES) throw new DOMException("too large", "QuotaExceededError");
    const bytes = await this.file.arrayBuffer();
    // The browser's decoder resamples to the rate of its audio context.
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
    // When the next chunk is due, in milliseconds.
    let due = performance.now();
    for (let first = 0; first < this.samples.length && !this.stopped; first += size) {
      const msLeft = due - performance.now();
      if (msLeft > 0) await new Promise((done) => setTimeout(done, msLeft));
      await this.unpaused;
      await this.room();
      // After a pause the file continues in real time; it does not catch up.
      due = Math.max(due, performance.now() - 1000 * CHUNK_SECONDS) + 1000 * CHUNK_SECONDS;
      if (!this.stopped) this.onChunk(toPcm16(this.samples.subarray(first, first + size)));
    }
    this.samples = new Float32Array(0);
    if (!this.stopped) this.onEnd();
  }

  pause() {
    this.unpaused = new Promise((resolve) => (this.resume = resolve));
  }

  // Replaced while the source is paused.
  resume() {}

  async close() {
    this.stopped = true;
    this.resume();
  }
}
