// Transcripts that stay in this browser when the page goes: turn by turn in IndexedDB, the oldest first in order.
//
// A transcript's number is the time it began, so the keys of turns are sorted by age, over all transcripts.

const NAME = "tickertape";
const TURNS = "turns";
const HEADS = "transcripts";
// Of all transcripts together; beyond these the oldest go.
const MOST_TURNS = 20_000;
const MOST_TRANSCRIPTS = 100;

export class Archive {
  // `makeRoom()` may free other storage of the page, and resolves to whether it has.
  constructor({ turns = MOST_TURNS, transcripts = MOST_TRANSCRIPTS, makeRoom = async () => false } = {}) {
    this.most = { turns, transcripts };
    this.makeRoom = makeRoom;
  }

  // Raises where the browser keeps nothing for this page.
  async open() {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore(HEADS, { keyPath: "id" });
      request.result.createObjectStore(TURNS, { keyPath: ["id", "number"] });
    };
    this.database = await answer(request);
    // Another window with a newer page wants to change the database: it goes first.
    this.database.onversionchange = () => this.database.close();
  }

  // What there is, newest first: `{id, title, name, seconds, updated}`.
  async heads() {
    return (await answer(this.#store(HEADS).getAll())).reverse();
  }

  async turns(id) {
    return answer(this.#store(TURNS).getAll(allOf(id)));
  }

  // All or nothing. When there is no room, `makeRoom` makes some, or the oldest transcripts do.
  async write(head, turns, removed) {
    try {
      await this.#write(head, turns, removed);
    } catch (error) {
      if (error?.name !== "QuotaExceededError") throw error;
      // Writes that fail together make room once.
      this.making ??= this.#freeRoom(head.id).finally(() => (this.making = null));
      if (!(await this.making)) throw error;
      await this.write(head, turns, removed);
    }
  }

  async delete(id) {
    const transaction = this.database.transaction([HEADS, TURNS], "readwrite");
    transaction.objectStore(HEADS).delete(id);
    transaction.objectStore(TURNS).delete(allOf(id));
    await done(transaction);
  }

  // Keeps within bounds; `current` stays, if with fewer turns.
  async trim(current) {
    const heads = await this.heads();
    for (const { id } of heads.slice(this.most.transcripts)) if (id !== current) await this.delete(id);
    const surplus = (await answer(this.#store(TURNS).count())) - this.most.turns;
    if (surplus <= 0) return;
    const keys = await answer(this.#store(TURNS).getAllKeys(null, surplus));
    const transaction = this.database.transaction([HEADS, TURNS], "readwrite");
    transaction.objectStore(TURNS).delete(IDBKeyRange.upperBound(keys.at(-1)));
    await done(transaction);
    const [oldest] = await answer(this.#store(TURNS).getAllKeys(null, 1));
    for (const { id } of heads) if (id < oldest[0] && id !== current) await this.delete(id);
  }

  // All requests are made before anything is waited for, and the end is told: the browser then finishes without the page.
  async #write(head, turns, removed) {
    const transaction = this.database.transaction([HEADS, TURNS], "readwrite", { durability: "relaxed" });
    try {
      transaction.objectStore(HEADS).put(head);
      for (const turn of turns) transaction.objectStore(TURNS).put({ ...turn, id: head.id });
      for (const number of removed) transaction.objectStore(TURNS).delete([head.id, number]);
      transaction.commit();
    } catch (error) {
      transaction.abort();
      throw error;
    }
    await done(transaction);
  }

  async #freeRoom(current) {
    if (await this.makeRoom()) return true;
    const oldest = (await this.heads()).at(-1);
    if (!oldest || oldest.id === current) return false;
    await this.delete(oldest.id);
    return true;
  }

  #store(name) {
    return this.database.transaction(name).objectStore(name);
  }
}

function allOf(id) {
  return IDBKeyRange.bound([id], [id, []]);
}

function answer(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new DOMException("in use by an older page", "InvalidStateError"));
  });
}

function done(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error);
  });
}
