// Buffers the samples of a recording until they are no longer needed: until they are sent, acknowledged by the server,
// and part of a finished turn.
//
// Positions count samples since the recording began.

export class SampleBuffer {
  // `limit` is in samples; beyond it the oldest are dropped.
  constructor(limit) {
    this.limit = limit;
    // Positions of the oldest buffered sample, and behind the newest.
    this.start = 0;
    this.end = 0;
    this.chunks = [];
  }

  push(samples) {
    this.chunks.push(samples);
    this.end += samples.length;
    if (this.end - this.start > this.limit) this.dropBefore(this.end - this.limit);
  }

  // Drops only whole chunks, so a few samples before `position` may stay.
  dropBefore(position) {
    let count = 0;
    while (count < this.chunks.length && this.start + this.chunks[count].length <= position) {
      this.start += this.chunks[count].length;
      count += 1;
    }
    this.chunks.splice(0, count);
  }

  // A copy of at most `count` samples from `position` on, or from the oldest buffered sample if that is later.
  read(position, count) {
    const from = Math.max(position, this.start);
    const result = new Int16Array(Math.max(0, Math.min(count, this.end - from)));
    let chunkStart = this.start;
    let filled = 0;
    for (const chunk of this.chunks) {
      if (filled === result.length) break;
      const skip = Math.max(0, from - chunkStart);
      if (skip < chunk.length) {
        const part = chunk.subarray(skip, skip + result.length - filled);
        result.set(part, filled);
        filled += part.length;
      }
      chunkStart += chunk.length;
    }
    return result;
  }
}
