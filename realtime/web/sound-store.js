// Stores the sound of transcripts in the browser's IndexedDB, if the user wants it, up to a number of bytes.
//
// The database is separate from that of the transcripts. The oldest sound is deleted first, also when the browser has
// no room. A *span* is one stored piece of sound: some seconds of a recording as samples, or a whole file.

import { committed, isTime, openDatabase, readAll, resultOf } from "./database.js";

const NAME = "tickertape-sound";
const SOUND = "sound";
const SPANS = "spans";
export const MAX_BYTES = 500 * 2 ** 20;
// Samples of a recording are written in spans of this length.
const SPAN_SECONDS = 5;
const DAY_MS = 24 * 3600 * 1000;

// Events: `changed` when the stored spans have changed; `problem` with a `text`, once, when sound cannot be stored.
export class SoundStore extends EventTarget {
  constructor(maxBytes = MAX_BYTES) {
    super();
    this.maxBytes = maxBytes;
    this.available = false;
    // All stored spans: `{id, start, end, bytes, rate}`. `id` is that of the transcript, `start` and `end` are its
    // seconds; only samples have a `rate`.
    this.spans = [];
    // Samples that are not written yet.
    this.pending = null;
    // Writes run one after another; this is the promise of the last.
    this.lastWrite = this.opened = this.#open();
  }

  async #open() {
    try {
      this.database = await openDatabase(NAME, { [SOUND]: ["id", "start"], [SPANS]: ["id", "start"] });
      this.available = true;
      await this.#reloadSpans();
    } catch {
      this.available = false;
    }
  }

  get bytes() {
    return this.spans.reduce((sum, { bytes }) => sum + bytes, 0);
  }

  // The stored span that contains this second of a transcript.
  spanAt(id, second) {
    return this.spans.find((span) => span.id === id && span.start <= second && second < span.end);
  }

  // Adds samples of a recording, which end at second `end` of transcript `id`.
  addSamples(id, samples, rate, end) {
    const start = end - samples.length / rate;
    const { pending } = this;
    if (pending && (pending.id !== id || pending.rate !== rate || Math.abs(pending.end - start) > 0.01)) this.flush();
    this.pending ??= { id, rate, start, pieces: [] };
    this.pending.pieces.push(samples);
    this.pending.end = end;
    if (end - this.pending.start >= SPAN_SECONDS) this.flush();
  }

  // Writes the pending samples.
  flush() {
    if (this.pending) {
      const { id, rate, start, end, pieces } = this.pending;
      this.pending = null;
      this.#add({ id, start, end, rate }, concatenate(pieces).buffer);
    }
    return this.lastWrite;
  }

  // Adds a whole file, which begins at second `start` of a transcript.
  addFile(id, file, start, end) {
    return this.#add({ id, start, end }, file);
  }

  delete(id) {
    return this.#enqueue((transaction) => {
      for (const store of [SOUND, SPANS]) transaction.objectStore(store).delete(IDBKeyRange.bound([id], [id, []]));
    });
  }

  deleteAll() {
    this.pending = null;
    return this.#enqueue((transaction) => {
      for (const store of [SOUND, SPANS]) transaction.objectStore(store).clear();
    });
  }

  // Deletes the sound of transcripts whose ids are not in `ids`. A transcript of the last day is spared: it may not be
  // stored yet.
  async prune(ids) {
    await this.opened;
    const orphans = new Set(this.spans.map(({ id }) => id).filter((id) => !ids.has(id) && Date.now() - id > DAY_MS));
    for (const id of orphans) await this.delete(id);
  }

  // Deletes the oldest sound; false if there is none.
  async dropOldest() {
    await this.opened;
    const [oldest] = this.spans;
    if (!oldest) return false;
    await this.#change((transaction) => {
      for (const store of [SOUND, SPANS]) transaction.objectStore(store).delete([oldest.id, oldest.start]);
    });
    return true;
  }

  // The stored sound between two seconds of a transcript: `{blob, from, to}`, where `from` and `to` are seconds in the
  // blob; null if none is stored.
  async read(id, start, end) {
    await this.flush();
    const spans = this.spans.filter((span) => span.id === id && span.end > start && span.start < end);
    if (!spans.length) return null;
    const store = this.database.transaction(SOUND).objectStore(SOUND);
    const records = await Promise.all(spans.map((span) => resultOf(store.get([id, span.start]))));
    const [first] = spans;
    if (!records[0]) return null;
    if (!first.rate) return { blob: records[0].data, from: Math.max(0, start - first.start), to: end - first.start };
    const parts = spans.flatMap((span, n) => {
      const samples = new Int16Array(records[n]?.data ?? new ArrayBuffer(0));
      const indexAt = (second) => Math.max(0, Math.round((second - span.start) * span.rate));
      return span.rate === first.rate ? [samples.subarray(indexAt(start), indexAt(end))] : [];
    });
    const samples = concatenate(parts);
    return { blob: wav(samples, first.rate), from: 0, to: samples.length / first.rate };
  }

  #add(span, data) {
    const bytes = data.byteLength ?? data.size;
    this.lastWrite = this.lastWrite.then(async () => {
      if (!this.available || bytes > this.maxBytes) {
        this.#report(this.available ? "This file is too large to keep its sound." : "This browser keeps no sound for this page.");
        return;
      }
      try {
        await this.#makeRoom(bytes);
        await this.#write({ ...span, bytes }, data);
        this.reported = false;
      } catch {
        this.#report("There is no room left in this browser to keep sound.");
      }
    });
    return this.lastWrite;
  }

  // Deletes the oldest sound until `bytes` more fit. Other windows store sound too, so the spans are read again first.
  async #makeRoom(bytes) {
    await this.#reloadSpans();
    while (this.spans.length && this.bytes + bytes > this.maxBytes) await this.dropOldest();
  }

  async #write(span, data) {
    try {
      await this.#change((transaction) => {
        transaction.objectStore(SOUND).put({ id: span.id, start: span.start, data });
        transaction.objectStore(SPANS).put(span);
      });
    } catch (error) {
      if (error?.name !== "QuotaExceededError" || !(await this.dropOldest())) throw error;
      await this.#write(span, data);
    }
  }

  // Makes these requests in one transaction, after all earlier writes.
  #enqueue(requests) {
    this.lastWrite = this.lastWrite.then(() => this.available && this.#change(requests)).catch(() => {});
    return this.lastWrite;
  }

  async #change(requests) {
    const transaction = this.database.transaction([SOUND, SPANS], "readwrite", { durability: "relaxed" });
    requests(transaction);
    await committed(transaction);
    await this.#reloadSpans();
  }

  async #reloadSpans() {
    this.spans = await readAll(this.database, [SPANS, SOUND], (span) => (isSpan(span) ? span : null));
    this.dispatchEvent(new Event("changed"));
  }

  #report(text) {
    if (this.reported === text) return;
    this.reported = text;
    this.dispatchEvent(Object.assign(new Event("problem"), { text: `${text} Captions are kept as before.` }));
  }
}

function isSpan({ id, start, end, bytes, rate }) {
  return [id, start, end, bytes].every(isTime) && (rate === undefined || (Number.isFinite(rate) && rate > 0));
}

function concatenate(pieces) {
  const result = new Int16Array(pieces.reduce((sum, { length }) => sum + length, 0));
  let at = 0;
  for (const piece of pieces) {
    result.set(piece, at);
    at += piece.length;
  }
  return result;
}

// The samples as a WAV file.
export function wav(samples, rate) {
  const head = new DataView(new ArrayBuffer(44));
  const text = (at, letters) => [...letters].forEach((letter, n) => head.setUint8(at + n, letter.charCodeAt(0)));
  text(0, "RIFF");
  head.setUint32(4, 36 + samples.byteLength, true);
  text(8, "WAVEfmt ");
  head.setUint32(16, 16, true);
  head.setUint16(20, 1, true);
  head.setUint16(22, 1, true);
  head.setUint32(24, rate, true);
  head.setUint32(28, 2 * rate, true);
  head.setUint16(32, 2, true);
  head.setUint16(34, 16, true);
  text(36, "data");
  head.setUint32(40, samples.byteLength, true);
  return new Blob([head, samples], { type: "audio/wav" });
}
