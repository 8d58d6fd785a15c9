// Sound that may still be needed: not yet sent, not yet acknowledged, or part of a turn that is not finished.
// Positions count samples since the recording began. It never holds more than `limit` samples; the oldest go first.

export class Backlog {
  constructor(limit) {
    this.limit = limit;
    this.start = 0;
    this.end = 0;
    this.pieces = [];
  }

  push(samples) {
    this.pieces.push(samples);
    this.end += samples.length;
    if (this.end - this.start > this.limit) this.dropBefore(this.end - this.limit);
  }

  // Frees whole pieces only, so a little more may stay than was asked for.
  dropBefore(position) {
    let count = 0;
    while (count < this.pieces.length && this.start + this.pieces[count].length <= position) {
      this.start += this.pieces[count].length;
      count += 1;
    }
    this.pieces.splice(0, count);
  }

  // A copy of at most `count` samples from `position` on.
  read(position, count) {
    const from = Math.max(position, this.start);
    const result = new Int16Array(Math.max(0, Math.min(count, this.end - from)));
    let at = this.start;
    let filled = 0;
    for (const piece of this.pieces) {
      if (filled === result.length) break;
      const skip = Math.max(0, from - at);
      if (skip < piece.length) {
        const part = piece.subarray(skip, skip + result.length - filled);
        result.set(part, filled);
        filled += part.length;
      }
      at += piece.length;
    }
    return result;
  }
}
