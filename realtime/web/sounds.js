// The sound of transcripts, if the user wants to keep it: in a database of its own in this browser, up to a bound.
// The oldest goes first, also when the browser has no room left.

import { answer, done, isTime, openDatabase, readAll } from "./database.js";

const NAME = "tickertape-sound";
const SOUND = "sound";
const SPANS = "spans";
export const MOST_BYTES = 500 * 2 ** 20;
const PIECE_SECONDS = 5;
const DAY_MS = 24 * 3600 * 1000;

// Tells `changed` when more or less is kept, and `problem` with a text, once, when the browser does not keep more.
export class Sounds extends EventTarget {
  constructor(most = MOST_BYTES) {
    super();
    this.most = most;
    this.works = false;
    // What is kept of all transcripts: `{id, start, end, bytes, rate}`, `rate` only for samples; seconds of the transcript.
    this.spans = [];
    this.pending = null;
    this.last = this.opened = this.#open();
  }

  async #open() {
    try {
      this.database = await openDatabase(NAME, { [SOUND]: ["id", "start"], [SPANS]: ["id", "start"] });
      this.works = true;
      await this.#count();
    } catch {
      this.works = false;
    }
  }

  get bytes() {
    return this.spans.reduce((sum, { bytes }) => sum + bytes, 0);
  }

  // The kept sound that has this second of a transcript.
  at(id, second) {
    return this.spans.find((span) => span.id === id && span.start <= second && second < span.end);
  }

  // Samples of a recording, which end at second `end` of transcript `id`.
  take(id, samples, rate, end) {
    const start = end - samples.length / rate;
    const { pending } = this;
    if (pending && (pending.id !== id || pending.rate !== rate || Math.abs(pending.end - start) > 0.01)) this.flush();
    this.pending ??= { id, rate, start, pieces: [] };
    this.pending.pieces.push(samples);
    this.pending.end = end;
    if (end - this.pending.start >= PIECE_SECONDS) this.flush();
  }

  // Writes the samples that wait.
  flush() {
    if (this.pending) {
      const { id, rate, start, end, pieces } = this.pending;
      this.pending = null;
      this.#add({ id, start, end, rate }, joined(pieces).buffer);
    }
    return this.last;
  }

  // A whole file, which begins at second `start` of a transcript.
  takeFile(id, file, start, end) {
    return this.#add({ id, start, end }, file);
  }

  delete(id) {
    return this.#after((transaction) => {
      for (const store of [SOUND, SPANS]) transaction.objectStore(store).delete(IDBKeyRange.bound([id], [id, []]));
    });
  }

  deleteAll() {
    this.pending = null;
    return this.#after((transaction) => {
      for (const store of [SOUND, SPANS]) transaction.objectStore(store).clear();
    });
  }

  // Deletes the sound of transcripts that are not among these. One that has just begun may not be listed yet.
  async prune(ids) {
    await this.opened;
    const gone = new Set(this.spans.map(({ id }) => id).filter((id) => !ids.has(id) && Date.now() - id > DAY_MS));
    for (const id of gone) await this.delete(id);
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

  // What can be played of a stretch of a transcript: `{blob, from, to}`, seconds in the blob; null if there is nothing.
  async read(id, start, end) {
    await this.flush();
    const spans = this.spans.filter((span) => span.id === id && span.end > start && span.start < end);
    if (!spans.length) return null;
    const store = this.database.transaction(SOUND).objectStore(SOUND);
    const kept = await Promise.all(spans.map((span) => answer(store.get([id, span.start]))));
    const [first] = spans;
    if (!kept[0]) return null;
    if (!first.rate) return { blob: kept[0].data, from: Math.max(0, start - first.start), to: end - first.start };
    const parts = spans.flatMap((span, n) => {
      const samples = new Int16Array(kept[n]?.data ?? new ArrayBuffer(0));
      const place = (second) => Math.max(0, Math.round((second - span.start) * span.rate));
      return span.rate === first.rate ? [samples.subarray(place(start), place(end))] : [];
    });
    const samples = joined(parts);
    return { blob: wav(samples, first.rate), from: 0, to: samples.length / first.rate };
  }

  #add(span, data) {
    const bytes = data.byteLength ?? data.size;
    this.last = this.last.then(async () => {
      if (!this.works || bytes > this.most) {
        this.#refuse(this.works ? "This file is too large to keep its sound." : "This browser keeps no sound for this page.");
        return;
      }
      try {
        await this.#make(bytes);
        await this.#write({ ...span, bytes }, data);
        this.told = false;
      } catch {
        this.#refuse("There is no room left in this browser to keep sound.");
      }
    });
    return this.last;
  }

  // Room for so many bytes, within the bound. Other windows keep sound too, so what there is is counted anew.
  async #make(bytes) {
    await this.#count();
    while (this.spans.length && this.bytes + bytes > this.most) await this.dropOldest();
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

  // In order with the writes before it.
  #after(requests) {
    this.last = this.last.then(() => this.works && this.#change(requests)).catch(() => {});
    return this.last;
  }

  async #change(requests) {
    const transaction = this.database.transaction([SOUND, SPANS], "readwrite", { durability: "relaxed" });
    requests(transaction);
    await done(transaction);
    await this.#count();
  }

  async #count() {
    this.spans = await readAll(this.database, [SPANS, SOUND], (span) => (isSpan(span) ? span : null));
    this.dispatchEvent(new Event("changed"));
  }

  #refuse(text) {
    if (this.told === text) return;
    this.told = text;
    this.dispatchEvent(Object.assign(new Event("problem"), { text: `${text} Captions are kept as before.` }));
  }
}

function isSpan({ id, start, end, bytes, rate }) {
  return [id, start, end, bytes].every(isTime) && (rate === undefined || (Number.isFinite(rate) && rate > 0));
}

function joined(pieces) {
  const whole = new Int16Array(pieces.reduce((sum, { length }) => sum + length, 0));
  let at = 0;
  for (const piece of pieces) {
    whole.set(piece, at);
    at += piece.length;
  }
  return whole;
}

// Samples as a file that every browser plays.
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
