// Saves the transcript on the page into the transcript store while it grows, and loads earlier ones.
//
// What could not be written stays on the page and is written again with the next turn. Events: `problem` with a `text`,
// once for a series of failed writes; `deleted` with the `id` of a transcript.

import { titleOf } from "./transcript.js";

// Changes of an open turn are written together after this time.
const SAVE_DELAY_MS = 400;
// The store is trimmed to its limits after this many written turns.
const TRIM_TURNS = 200;
// How long the page waits at its start for the lock of the newest transcript: a page that is being reloaded still has
// it.
const RELOAD_LOCK_MS = 1500;

export class Autosave extends EventTarget {
  // `store` is a TranscriptStore that is not yet open.
  constructor(store, transcript) {
    super();
    Object.assign(this, { store, transcript });
    // False until the store is open, and if the browser gives the page no storage.
    this.available = false;
    store.onUnreadable = () => this.#reportUnreadable();
    this.opened = store.open().then(
      () => {
        this.available = true;
        this.flush();
      },
      (error) => this.#failed(error),
    );
    this.turnsSinceTrim = this.activeWrites = 0;
    this.#startTranscript();
    transcript.addEventListener("reset", () => this.#startTranscript());
    for (const kind of ["added", "grown", "changed", "corrected"]) {
      transcript.addEventListener(kind, ({ turn }) => this.#turnChanged(turn));
    }
    // These events come for many turns at once, so they are not written one by one.
    for (const kind of ["renamed", "labelled"]) {
      transcript.addEventListener(kind, ({ turn }) => {
        this.dirty.add(turn);
        this.#saveLater();
      });
    }
    // The name of a transcript without captions is saved with its first caption.
    transcript.addEventListener("named", () => {
      this.headDirty = transcript.entries.length > 0;
      this.#saveLater();
    });
    transcript.addEventListener("removed", ({ turn }) => {
      this.dirty.delete(turn);
      this.removedNumbers.add(turn.number);
      this.#saveLater();
    });
    // A browser may close a page without further events after these.
    addEventListener("pagehide", () => this.flush());
    addEventListener("visibilitychange", () => document.hidden && this.flush());
  }

  // Loads the newest transcript that no other window has open, and returns its head; null if there is none. `mayLoad()`
  // is asked just before.
  async loadNewest(mayLoad) {
    await this.opened;
    if (!this.available) return null;
    try {
      await this.store.trim(this.id);
      let timeoutMs = RELOAD_LOCK_MS;
      for (const head of await this.store.heads()) {
        const release = await lock(head.id, timeoutMs);
        timeoutMs = 0;
        if (release && mayLoad()) return (await this.#load(head, release)) && head;
        release?.();
      }
    } catch (error) {
      this.#failed(error);
    }
    return null;
  }

  // Loads an earlier transcript in place of this one; false if another window has it open.
  async load(head) {
    const release = await lock(head.id, 0);
    return Boolean(release) && this.#load(head, release);
  }

  // Renames a stored transcript; false if another window has it open, or there is no room.
  async rename(head, name) {
    if (head.id === this.id) {
      this.transcript.setName(name);
      await this.flush();
      return this.allSaved;
    }
    const release = await lock(head.id, 0);
    if (!release) return false;
    const written = this.store.write({ ...head, name: titleOf(name) }, [], []).then(() => true, () => false);
    return written.finally(release);
  }

  async #load({ id, name }, release) {
    await this.flush();
    const turns = await this.store.turns(id);
    this.loading = { id, release };
    this.transcript.load(turns, name);
    this.loading = null;
    return true;
  }

  // True if everything on the page is also in the store.
  get allSaved() {
    return this.available && !this.activeWrites && !this.#hasChanges;
  }

  get #hasChanges() {
    return this.dirty.size > 0 || this.removedNumbers.size > 0 || this.headDirty;
  }

  // Deletes the transcript on the page, there and in the store.
  async deleteCurrent() {
    const { id } = this;
    this.transcript.clear();
    await this.delete(id);
  }

  async delete(id) {
    this.dispatchEvent(Object.assign(new Event("deleted"), { id }));
    if (!this.available) return;
    await this.lastWrite;
    await this.store.delete(id).catch((error) => this.#failed(error));
  }

  // Writes what has changed. The write begins without waiting for earlier ones, because the page may be closing;
  // IndexedDB runs the transactions in order.
  flush() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.lastWrite = Promise.all([this.lastWrite, this.#write()]);
    return this.lastWrite;
  }

  // Begins to save a new transcript, or the one that is being loaded.
  #startTranscript() {
    clearTimeout(this.timer);
    this.timer = 0;
    // Turns to write, and the numbers of turns to delete.
    this.dirty = new Set();
    this.removedNumbers = new Set();
    this.headDirty = false;
    this.release?.();
    this.id = this.loading?.id ?? Date.now() + Math.random();
    if (this.loading) this.release = this.loading.release;
    else lock(this.id, 0).then((release) => (this.release = release));
  }

  #turnChanged(turn) {
    this.dirty.add(turn);
    if (turn.state === "open") this.#saveLater();
    else this.flush();
  }

  #saveLater() {
    this.timer ||= setTimeout(() => this.flush(), SAVE_DELAY_MS);
  }

  async #write() {
    const { id, dirty, removedNumbers: removed } = this;
    if (!this.available || !this.#hasChanges) return;
    const [changedTurns, removedNumbers] = [[...dirty], [...removed]];
    dirty.clear();
    removed.clear();
    this.headDirty = false;
    this.activeWrites += 1;
    try {
      const turns = changedTurns.filter((turn) => turn.text || turn.heard);
      await this.store.write(this.#head(id), turns, removedNumbers);
      this.reported = false;
      this.turnsSinceTrim += turns.length;
      if (this.turnsSinceTrim >= TRIM_TURNS) {
        this.turnsSinceTrim = 0;
        await this.store.trim(id);
      }
    } catch (error) {
      changedTurns.forEach((turn) => dirty.add(turn));
      removedNumbers.forEach((number) => removed.add(number));
      this.#failed(error);
    }
    this.activeWrites -= 1;
  }

  #head(id) {
    const { entries, name } = this.transcript;
    const title = entries.find((entry) => entry.text && entry.state !== "note")?.text.trim().slice(0, 120) ?? "";
    return { id, title, name, seconds: this.transcript.seconds, updated: Date.now() };
  }

  #reportUnreadable() {
    if (this.unreadableReported) return;
    this.unreadableReported = true;
    const text = "Some captions that this browser kept could not be read, and were removed.";
    this.dispatchEvent(Object.assign(new Event("problem"), { text }));
  }

  #failed(error) {
    if (this.reported) return;
    this.reported = true;
    const full = error?.name === "QuotaExceededError";
    const why = full ? "There is no room left in this browser to keep captions." : "This browser keeps no captions for this page.";
    this.dispatchEvent(Object.assign(new Event("problem"), { text: `${why} Save them before you close the page.` }));
  }
}

// Locks a transcript, since two windows must not write the same one. Resolves to the function that releases the lock,
// or to null if another window has it and does not release it within `timeoutMs`. Without the Web Locks API the last
// write wins.
function lock(id, timeoutMs) {
  if (!navigator.locks) return Promise.resolve(() => {});
  const options = timeoutMs ? { signal: AbortSignal.timeout(timeoutMs) } : { ifAvailable: true };
  return new Promise((resolve) => {
    const onLock = (granted) => (granted ? new Promise((release) => resolve(release)) : resolve(null));
    navigator.locks.request(`tickertape ${id}`, options, onLock).catch(() => resolve(null));
  });
}
