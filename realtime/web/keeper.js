// Writes the transcript on the page into the archive while it grows, and brings an earlier one back.
//
// What could not be written stays on the page and is tried again with the next turn; a `problem` is told once. `deleted` is
// told with the id of a transcript.

import { titleOf } from "./transcript.js";

const SOON_MS = 400;
const TRIM_EVERY = 200;
// A page that is being reloaded may still have its transcript for a moment.
const LEAVING_MS = 1500;

export class Keeper extends EventTarget {
  // `archive` as in archive.js, not yet open.
  constructor(archive, transcript) {
    super();
    Object.assign(this, { archive, transcript });
    this.works = false;
    archive.onUnreadable = () => this.#tellUnreadable();
    this.opened = archive.open().then(
      () => {
        this.works = true;
        this.flush();
      },
      (error) => this.#failed(error),
    );
    this.written = this.writing = 0;
    this.#begin();
    transcript.addEventListener("reset", () => this.#begin());
    for (const kind of ["added", "grown", "changed", "corrected"]) {
      transcript.addEventListener(kind, ({ turn }) => this.#touch(turn));
    }
    // These come for many turns at once.
    for (const kind of ["renamed", "labelled"]) {
      transcript.addEventListener(kind, ({ turn }) => {
        this.dirty.add(turn);
        this.#soon();
      });
    }
    // A name without captions is kept with the first of them.
    transcript.addEventListener("named", () => {
      this.headDirty = transcript.entries.length > 0;
      this.#soon();
    });
    transcript.addEventListener("removed", ({ turn }) => {
      this.dirty.delete(turn);
      this.removed.add(turn.number);
      this.#soon();
    });
    // The last moment that a browser grants a page.
    addEventListener("pagehide", () => this.flush());
    addEventListener("visibilitychange", () => document.hidden && this.flush());
  }

  // Shows the newest transcript that no other window has, if there is one: its head, or null.
  // `wanted()` says whether it still may be shown by then.
  async start(wanted) {
    await this.opened;
    if (!this.works) return null;
    try {
      await this.archive.trim(this.id);
      let patience = LEAVING_MS;
      for (const head of await this.archive.heads()) {
        const release = await hold(head.id, patience);
        patience = 0;
        if (release && wanted()) return (await this.#load(head, release)) && head;
        release?.();
      }
    } catch (error) {
      this.#failed(error);
    }
    return null;
  }

  // Shows an earlier transcript in place of this one; false if another window goes on with it.
  async bring(head) {
    const release = await hold(head.id, 0);
    return Boolean(release) && this.#load(head, release);
  }

  // Gives a transcript of the archive another name; false if another window goes on with it, or there is no room.
  async rename(head, wanted) {
    if (head.id === this.id) {
      this.transcript.setName(wanted);
      await this.flush();
      return this.complete;
    }
    const release = await hold(head.id, 0);
    if (!release) return false;
    const written = this.archive.write({ ...head, name: titleOf(wanted) }, [], []).then(() => true, () => false);
    return written.finally(release);
  }

  async #load({ id, name }, release) {
    await this.flush();
    const turns = await this.archive.turns(id);
    this.coming = { id, release };
    this.transcript.load(turns, name);
    this.coming = null;
    return true;
  }

  // True if all that is shown is also kept.
  get complete() {
    return this.works && !this.writing && !this.#owes;
  }

  get #owes() {
    return this.dirty.size > 0 || this.removed.size > 0 || this.headDirty;
  }

  // Forgets what is on the page, here and in the archive.
  async forget() {
    const { id } = this;
    this.transcript.clear();
    await this.delete(id);
  }

  async delete(id) {
    this.dispatchEvent(Object.assign(new Event("deleted"), { id }));
    if (!this.works) return;
    await this.last;
    await this.archive.delete(id).catch((error) => this.#failed(error));
  }

  // Writes what has changed. The write begins at once, for a page that is going has no later; the database keeps the order.
  flush() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.last = Promise.all([this.last, this.#write()]);
    return this.last;
  }

  // A transcript that is new, or the one that is coming back.
  #begin() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.dirty = new Set();
    this.removed = new Set();
    this.headDirty = false;
    this.release?.();
    this.id = this.coming?.id ?? Date.now() + Math.random();
    if (this.coming) this.release = this.coming.release;
    else hold(this.id, 0).then((release) => (this.release = release));
  }

  #touch(turn) {
    this.dirty.add(turn);
    if (turn.state === "open") this.#soon();
    else this.flush();
  }

  #soon() {
    this.timer ||= setTimeout(() => this.flush(), SOON_MS);
  }

  async #write() {
    const { id, dirty, removed } = this;
    if (!this.works || !this.#owes) return;
    const [touched, gone] = [[...dirty], [...removed]];
    dirty.clear();
    removed.clear();
    this.headDirty = false;
    this.writing += 1;
    try {
      const turns = touched.filter((turn) => turn.text || turn.heard);
      await this.archive.write(this.#head(id), turns, gone);
      this.told = false;
      this.written += turns.length;
      if (this.written >= TRIM_EVERY) {
        this.written = 0;
        await this.archive.trim(id);
      }
    } catch (error) {
      touched.forEach((turn) => dirty.add(turn));
      gone.forEach((number) => removed.add(number));
      this.#failed(error);
    }
    this.writing -= 1;
  }

  #head(id) {
    const { entries, name } = this.transcript;
    const title = entries.find((entry) => entry.text && entry.state !== "note")?.text.trim().slice(0, 120) ?? "";
    return { id, title, name, seconds: this.transcript.seconds, updated: Date.now() };
  }

  #tellUnreadable() {
    if (this.toldUnreadable) return;
    this.toldUnreadable = true;
    const text = "Some captions that this browser kept could not be read, and were removed.";
    this.dispatchEvent(Object.assign(new Event("problem"), { text }));
  }

  #failed(error) {
    if (this.told) return;
    this.told = true;
    const full = error?.name === "QuotaExceededError";
    const why = full ? "There is no room left in this browser to keep captions." : "This browser keeps no captions for this page.";
    this.dispatchEvent(Object.assign(new Event("problem"), { text: `${why} Save them before you close the page.` }));
  }
}

// Two windows must not write the same transcript: what lets go of it again, or null if another window holds it and does
// not let go within `patience` milliseconds. Where a browser has no locks, the window that wrote last wins.
function hold(id, patience) {
  if (!navigator.locks) return Promise.resolve(() => {});
  const how = patience ? { signal: AbortSignal.timeout(patience) } : { ifAvailable: true };
  return new Promise((resolve) => {
    const held = (lock) => (lock ? new Promise((release) => resolve(release)) : resolve(null));
    navigator.locks.request(`tickertape ${id}`, how, held).catch(() => resolve(null));
  });
}
