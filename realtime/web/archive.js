// Transcripts that stay in this browser when the page goes: turn by turn in IndexedDB, the oldest first in order.
//
// A transcript's number is the time it began, so the keys of turns are sorted by age, over all transcripts.

import { answer, done, isTime, openDatabase, readAll } from "./database.js";

const NAME = "tickertape";
const TURNS = "turns";
const HEADS = "transcripts";
// Of all transcripts together; beyond these the oldest go.
const MOST_TURNS = 20_000;
const MOST_TRANSCRIPTS = 100;
// Longer texts, and more words of a turn, do not come from speech.
const MOST_LETTERS = 200_000;
const MOST_WORDS = 20_000;
const STATES = ["open", "done", "cut", "note"];

export class Archive {
  // `makeRoom()` may free other storage of the page, and resolves to whether it has.
  constructor({ turns = MOST_TURNS, transcripts = MOST_TRANSCRIPTS, makeRoom = async () => false } = {}) {
    this.most = { turns, transcripts };
    this.makeRoom = makeRoom;
    // Called when something that was kept cannot be read, and was deleted.
    this.onUnreadable = () => {};
  }

  // Raises where the browser keeps nothing for this page.
  async open() {
    this.database = await openDatabase(NAME, { [HEADS]: "id", [TURNS]: ["id", "number"] });
  }

  // What there is, newest first: `{id, title, name, seconds, updated}`.
  async heads() {
    const { onUnreadable } = this;
    return (await readAll(this.database, [HEADS], mendedHead, { onUnreadable })).reverse();
  }

  async turns(id) {
    const { onUnreadable } = this;
    return readAll(this.database, [TURNS], mendedTurn, { range: allOf(id), onUnreadable });
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

// What can be used of the head of a transcript; null if that is nothing. Its number is a time.
function mendedHead(head) {
  if (!isTime(head?.id)) return null;
  const text = (value) => (isText(value) ? value : "");
  return { ...head, title: text(head.title), name: text(head.name), seconds: isTime(head.seconds) ? head.seconds : 0 };
}

// What can be used of a turn: at least its text and its place.
function mendedTurn(turn) {
  const { number, text, end, heard, sure, state, words, ...rest } = turn ?? {};
  if (!Number.isInteger(number) || !isText(text)) return null;
  const start = isTime(rest.start) ? rest.start : 0;
  const known = STATES.includes(state) ? state : "cut";
  return {
    ...rest,
    number,
    text,
    start,
    end: isTime(end) ? end : known === "open" ? null : start,
    state: known,
    words: Array.isArray(words) ? words.filter(isWord).slice(0, MOST_WORDS) : [],
    ...(isText(heard) && { heard }),
    ...(Number.isFinite(sure) && { sure }),
  };
}

function isWord(value) {
  const { word, start, end, speaker = "", heard = "", confidence } = value ?? {};
  return isTime(start) && isTime(end) && [word, speaker ?? "", heard].every(isText) && Number.isFinite(confidence ?? 0);
}

function isText(value) {
  return typeof value === "string" && value.length <= MOST_LETTERS;
}
