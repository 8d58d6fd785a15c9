// Stores transcripts in the browser's IndexedDB, one record for each turn, and deletes the oldest beyond the limits.
//
// A transcript's id is the time at which it began (milliseconds), so the keys of all turns are sorted by age. The
// *head* of a transcript is the record with its name and length.

import { committed, isTime, openDatabase, readAll, resultOf } from "./database.js";

const NAME = "tickertape";
const TURNS = "turns";
const HEADS = "transcripts";
// Limits over all transcripts; beyond them the oldest are deleted.
const MAX_TURNS = 20_000;
const MAX_TRANSCRIPTS = 100;
// Larger values in a turn are not from speech, and are treated as unreadable.
const MAX_CHARACTERS = 200_000;
const MAX_WORDS = 20_000;
const STATES = ["open", "done", "cut", "note"];

export class TranscriptStore {
  // `makeRoom()` may free other storage of the page; it resolves to true if it has.
  constructor({ turns = MAX_TURNS, transcripts = MAX_TRANSCRIPTS, makeRoom = async () => false } = {}) {
    this.limits = { turns, transcripts };
    this.makeRoom = makeRoom;
    // Called when an unreadable record has been deleted.
    this.onUnreadable = () => {};
  }

  // Throws if the browser gives this page no storage.
  async open() {
    this.database = await openDatabase(NAME, { [HEADS]: "id", [TURNS]: ["id", "number"] });
  }

  // The heads of all transcripts, newest first: `{id, title, name, seconds, updated}`. `title` is the beginning of the
  // text, `name` what the user entered.
  async heads() {
    const { onUnreadable } = this;
    return (await readAll(this.database, [HEADS], repairHead, { onUnreadable })).reverse();
  }

  async turns(id) {
    const { onUnreadable } = this;
    return readAll(this.database, [TURNS], repairTurn, { range: keysOf(id), onUnreadable });
  }

  // Writes the head and the turns, and deletes the turns with the numbers `removed`, in one transaction. If there is no
  // room, `makeRoom` frees some, or else the oldest transcripts are deleted.
  async write(head, turns, removed) {
    try {
      await this.#write(head, turns, removed);
    } catch (error) {
      if (error?.name !== "QuotaExceededError") throw error;
      // Writes that fail at the same time share one attempt to free room.
      this.freeing ??= this.#freeRoom(head.id).finally(() => (this.freeing = null));
      if (!(await this.freeing)) throw error;
      await this.write(head, turns, removed);
    }
  }

  async delete(id) {
    const transaction = this.database.transaction([HEADS, TURNS], "readwrite");
    transaction.objectStore(HEADS).delete(id);
    transaction.objectStore(TURNS).delete(keysOf(id));
    await committed(transaction);
  }

  // Deletes the oldest beyond the limits. The transcript `current` stays, possibly without its oldest turns.
  async trim(current) {
    const heads = await this.heads();
    for (const { id } of heads.slice(this.limits.transcripts)) if (id !== current) await this.delete(id);
    const surplus = (await resultOf(this.#store(TURNS).count())) - this.limits.turns;
    if (surplus <= 0) return;
    const keys = await resultOf(this.#store(TURNS).getAllKeys(null, surplus));
    const transaction = this.database.transaction([HEADS, TURNS], "readwrite");
    transaction.objectStore(TURNS).delete(IDBKeyRange.upperBound(keys.at(-1)));
    await committed(transaction);
    const [oldest] = await resultOf(this.#store(TURNS).getAllKeys(null, 1));
    for (const { id } of heads) if (id < oldest[0] && id !== current) await this.delete(id);
  }

  // All requests are made, and `commit` is called, before anything is awaited: then the browser completes the
  // transaction even if the page is closed.
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
    await committed(transaction);
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

// The keys of all turns of a transcript.
function keysOf(id) {
  return IDBKeyRange.bound([id], [id, []]);
}

// A head with defaults for unreadable fields; null if its id is not a time.
function repairHead(head) {
  if (!isTime(head?.id)) return null;
  const text = (value) => (isText(value) ? value : "");
  return { ...head, title: text(head.title), name: text(head.name), seconds: isTime(head.seconds) ? head.seconds : 0 };
}

// A turn with defaults for unreadable fields; null if its number or its text is unreadable.
function repairTurn(turn) {
  const { number, text, end, heard, sure, state, words, ...rest } = turn ?? {};
  if (!Number.isInteger(number) || !isText(text)) return null;
  const start = isTime(rest.start) ? rest.start : 0;
  const validState = STATES.includes(state) ? state : "cut";
  return {
    ...rest,
    number,
    text,
    start,
    end: isTime(end) ? end : validState === "open" ? null : start,
    state: validState,
    words: Array.isArray(words) ? words.filter(isWord).slice(0, MAX_WORDS) : [],
    ...(isText(heard) && { heard }),
    ...(Number.isFinite(sure) && { sure }),
  };
}

function isWord(value) {
  const { word, start, end, speaker = "", heard = "", confidence } = value ?? {};
  return isTime(start) && isTime(end) && [word, speaker ?? "", heard].every(isText) && Number.isFinite(confidence ?? 0);
}

function isText(value) {
  return typeof value === "string" && value.length <= MAX_CHARACTERS;
}
