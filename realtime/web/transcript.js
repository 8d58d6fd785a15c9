// What has been said, as turns: a model without a page. Times are seconds since the first recording began.
//
// A turn is open while its text may still grow, done once the server has completed it, and cut if the server never did.
// A note stands between turns where something is missing.

const MAX_NAME = 64;
const TRANSCRIPTION = "conversation.item.input_audio_transcription.";

export class Transcript extends EventTarget {
  constructor() {
    super();
    this.clear();
  }

  clear() {
    this.load([]);
  }

  // What was kept of an earlier visit. Turns that were open then get no more text.
  load(entries) {
    const ended = (turn) => turn.words.at(-1)?.end ?? turn.end ?? turn.start;
    this.entries = entries.map((turn) => (turn.state === "open" ? { ...turn, state: "cut", end: ended(turn) } : turn));
    // Where the newest finished turn ended.
    this.settledUntil = Math.max(0, ...this.entries.slice(-1).map((turn) => turn.end));
    this.byId = new Map();
    // Names that somebody gave to the server's speakers, and all speakers of finished turns, in order of appearance.
    this.renamed = new Map();
    this.voices = new Set(this.entries.flatMap((turn) => turn.words.map(({ speaker }) => speaker).filter(Boolean)));
    // Entries are numbered for good, so that one can be told from another when some have gone.
    this.numbers = (entries.at(-1)?.number ?? -1) + 1;
    this.#tell("reset");
  }

  get turns() {
    return this.entries.filter((entry) => entry.state !== "note" && entry.text);
  }

  get finished() {
    return this.turns.filter((turn) => turn.state !== "open");
  }

  get hasFinished() {
    return this.entries.some((entry) => entry.text && entry.state !== "note" && entry.state !== "open");
  }

  // Where the newest text ends, finished or not. Later turns end later, all but the last few surely.
  get seconds() {
    const ends = this.entries.slice(-20).map((entry) => Math.max(entry.start, entry.end ?? 0, entry.words.at(-1)?.end ?? 0));
    return Math.max(0, ...ends);
  }

  get openTurns() {
    return [...this.byId.values()];
  }

  // Start of the oldest turn that is not finished, if there is one.
  get openSince() {
    return this.byId.size ? Math.min(...this.openTurns.map((turn) => turn.start)) : null;
  }

  // Takes a server event; `base` is where the server's clock began on ours.
  apply(event, base) {
    const id = event.item_id;
    switch (event.type) {
      case "input_audio_buffer.speech_started":
        this.#turn(id, base + event.audio_start_ms / 1000);
        break;
      case "input_audio_buffer.speech_stopped":
        this.#change(this.#turn(id, this.settledUntil), { end: base + event.audio_end_ms / 1000 });
        break;
      case `${TRANSCRIPTION}delta`:
        this.#grow(this.#turn(id, this.settledUntil), event, base);
        break;
      case `${TRANSCRIPTION}completed`:
        this.#complete(this.#turn(id, base + event.audio_start_ms / 1000), event, base);
        break;
      case `${TRANSCRIPTION}failed`:
        this.#fail(this.#turn(id, this.settledUntil), event);
        break;
    }
  }

  // Gives a speaker another name, in all turns so far and from now on. Two speakers with one name are one.
  rename(speaker, wanted) {
    const name = wanted.replaceAll(/\s+/gu, " ").trim().slice(0, MAX_NAME);
    if (!name || name === speaker) return;
    for (const [letters, given] of this.renamed) if (given === speaker) this.renamed.set(letters, name);
    if (!this.renamed.has(speaker)) this.renamed.set(speaker, name);
    this.voices = new Set([...this.voices].map((voice) => (voice === speaker ? name : voice)));
    for (const turn of this.entries) {
      const said = turn.words.filter((word) => word.speaker === speaker);
      for (const word of said) word.speaker = name;
      if (said.length) this.#tell("renamed", turn);
    }
    this.#tell("voices");
  }

  note(text, at) {
    this.entries.push({ number: this.numbers++, state: "note", text, start: at, end: at, words: [] });
    this.#tell("added", this.entries.at(-1));
  }

  // The server has forgotten its open turns. With `again`, their sound will be sent once more.
  abandonOpen({ again }) {
    for (const turn of this.openTurns) {
      this.byId.delete(turn.id);
      if (again || !turn.text) this.#remove(turn);
      else this.#change(turn, { state: "cut", end: turn.words.at(-1)?.end ?? turn.end ?? turn.start });
    }
  }

  #turn(id, start) {
    let turn = this.byId.get(id);
    if (!turn) {
      turn = { id, number: this.numbers++, start, end: null, text: "", words: [], state: "open" };
      this.byId.set(id, turn);
      this.entries.push(turn);
      this.#tell("added", turn);
    }
    return turn;
  }

  #grow(turn, event, base) {
    turn.text += event.delta;
    turn.words.push(...timed(event.words, base));
    this.#tell("grown", turn, event.delta);
  }

  #complete(turn, event, base) {
    this.byId.delete(turn.id);
    const end = base + event.audio_end_ms / 1000;
    this.settledUntil = Math.max(this.settledUntil, end);
    if (!event.transcript.trim()) {
      this.#remove(turn);
      return;
    }
    const start = base + event.audio_start_ms / 1000;
    const words = timed(event.words, base);
    const known = this.voices.size;
    for (const word of words.filter(({ speaker }) => speaker)) {
      word.speaker = this.renamed.get(word.speaker) ?? word.speaker;
      this.voices.add(word.speaker);
    }
    this.#change(turn, { state: "done", text: event.transcript, words, start, end });
    if (this.voices.size !== known) this.#tell("voices");
  }

  #fail(turn, event) {
    this.byId.delete(turn.id);
    const end = turn.end ?? turn.start;
    this.settledUntil = Math.max(this.settledUntil, end);
    if (turn.text) this.#change(turn, { state: "cut", end });
    else this.#remove(turn);
    this.note(`Nothing could be made of this part: ${event.error.message}`, turn.start);
  }

  #remove(turn) {
    this.entries.splice(this.entries.lastIndexOf(turn), 1);
    this.#tell("removed", turn);
  }

  #change(turn, values) {
    Object.assign(turn, values);
    this.#tell("changed", turn);
  }

  #tell(kind, turn, delta) {
    this.dispatchEvent(Object.assign(new Event(kind), { turn, delta }));
  }
}

// `confidence`, from 0 to 1, is there where the server's model tells it.
function timed(words, base) {
  return (words ?? []).map((word) => ({ ...word, word: word.word.trim(), start: base + word.start, end: base + word.end }));
}

// How a speaker is called: by the name that was given, or by the server's letter.
export function speakerName(speaker) {
  return /^[A-Z]{1,2}$/u.test(speaker) ? `Speaker ${speaker}` : speaker;
}

// The text of a turn in pieces: words with their times, and what stands between them. No character is lost.
export function alignWords(text, words) {
  const pieces = [];
  let at = 0;
  for (const word of words) {
    const found = word.word ? text.indexOf(word.word, at) : -1;
    if (found < 0) continue;
    if (found > at) pieces.push({ text: text.slice(at, found), word: null });
    at = found + word.word.length;
    pieces.push({ text: text.slice(found, at), word });
  }
  if (at < text.length) pieces.push({ text: text.slice(at), word: null });
  return pieces;
}
