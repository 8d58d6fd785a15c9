// What has been said, as turns: a model without a page. Times are seconds since the first recording began.
//
// A turn is open while its text may still grow, done once the server has completed it, and cut if the server never did.
// A note stands between turns where something is missing. A word that was corrected has what was heard as `heard`, and so
// has its turn the whole text; both go when the last correction is taken back.

const MAX_NAME = 64;
const MAX_CORRECTION = 200;
const MAX_TITLE = 120;
const LETTERS = /^[A-Z]{1,2}$/u;
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
  load(entries, name = "") {
    const ended = (turn) => turn.words.at(-1)?.end ?? turn.end ?? turn.start;
    this.entries = entries.map((turn) => (turn.state === "open" ? { ...turn, state: "cut", end: ended(turn) } : turn));
    this.name = name;
    // Where the newest finished turn ended.
    this.settledUntil = Math.max(0, ...this.entries.slice(-1).map((turn) => turn.end));
    this.byId = new Map();
    // Names that the user gave to the server's speakers, and all speakers of finished turns, in order of appearance.
    this.renamed = new Map();
    this.voices = new Set(this.entries.flatMap((turn) => turn.words.map(({ speaker }) => speaker).filter(Boolean)));
    this.newRecording();
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
      case "input_audio_buffer.pause_scored":
        this.#score(event, base);
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

  // A server gives its letters to speakers anew in each recording. Where a recording before it had several speakers, they
  // are not taken for the same ones; where it had one, that one is taken to speak on.
  newRecording() {
    this.letters = new Map();
    this.apart = this.voices.size > 1;
  }

  setName(wanted) {
    const name = titleOf(wanted);
    if (name === this.name) return;
    this.name = name;
    this.#tell("named");
  }

  // Puts another text in the place of a word of a finished turn: an empty one removes the word, what was heard restores it.
  correct(turn, word, wanted) {
    const text = plain(wanted, MAX_CORRECTION);
    if (turn.state === "open" || text === word.word) return;
    const heard = word.heard ?? word.word;
    turn.heard ??= turn.text;
    word.word = text;
    word.heard = heard;
    if (text === heard) delete word.heard;
    turn.text = piecesOf(turn)
      .map((piece) => piece.text)
      .join("");
    if (!turn.words.some((other) => "heard" in other)) delete turn.heard;
    this.#tell("corrected", turn);
  }

  // Who said the words between two times, which were shown before that was known.
  label(letter, start, end) {
    const speaker = this.#voice(letter);
    for (let n = this.#placeOf(end); n >= 0; n -= 1) {
      const turn = this.entries[n];
      if (turn.state === "open" || turn.state === "note") continue;
      if (turn.end <= start) break;
      const said = turn.words.filter((word) => isWithin(word, start, end));
      for (const word of said) word.speaker = speaker;
      if (said.length) this.#tell("labelled", turn);
    }
    this.#heardVoices([speaker]);
  }

  // Gives a speaker another name, in all turns so far and from now on. Two speakers with one name are one.
  rename(speaker, wanted) {
    const name = plain(wanted, MAX_NAME);
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
      else {
        this.#change(turn, { state: "cut", end: turn.words.at(-1)?.end ?? turn.end ?? turn.start });
        this.#heardVoices(turn.words.map(({ speaker }) => speaker));
      }
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
    const words = this.#timed(event.words, base);
    // The speaker, who seemed to have finished, goes on.
    if (words.some(({ start }) => start > turn.scoredAt)) this.#change(turn, { sure: undefined, scoredAt: undefined });
    turn.text += event.delta;
    turn.words.push(...words);
    this.#tell("grown", turn, event.delta);
  }

  // In a pause: how sure the server is that the turn is over.
  #score(event, base) {
    const turn = this.byId.get(event.item_id);
    if (turn?.text) this.#change(turn, { sure: event.end_of_turn_confidence, scoredAt: base + event.audio_end_ms / 1000 });
  }

  #timed(words, base) {
    return timed(words, base).map((word) => (word.speaker ? { ...word, speaker: this.#voice(word.speaker) } : word));
  }

  // The voice of the transcript that a letter of the server means now, or its name.
  #voice(letter) {
    if (!this.letters.has(letter)) this.letters.set(letter, this.apart && LETTERS.test(letter) ? this.#freeLetter() : letter);
    const voice = this.letters.get(letter);
    return this.renamed.get(voice) ?? voice;
  }

  // The last entry that may have begun by this time; entries are in order, but for a note here and there.
  #placeOf(second) {
    let [low, high] = [0, this.entries.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.entries[middle].start <= second) low = middle + 1;
      else high = middle;
    }
    return Math.min(low, this.entries.length - 1);
  }

  #freeLetter() {
    const taken = new Set([...this.voices, ...this.renamed.keys(), ...this.letters.values()]);
    for (let number = 0; ; number += 1) if (!taken.has(lettersOf(number))) return lettersOf(number);
  }

  #heardVoices(voices) {
    const known = this.voices.size;
    for (const voice of voices) if (voice) this.voices.add(voice);
    if (this.voices.size !== known) this.#tell("voices");
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
    const words = this.#timed(event.words, base);
    const sure = event.end_of_turn_confidence;
    this.#change(turn, { state: "done", text: event.transcript, words, start, end, sure, scoredAt: undefined });
    this.#heardVoices(words.map(({ speaker }) => speaker));
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

// One line of text, whatever was typed or pasted.
function plain(wanted, most) {
  return [...wanted.replaceAll(/[\s\p{Cc}]+/gu, " ").trim()].slice(0, most).join("").trim();
}

// The name of a transcript, as far as it can be one.
export function titleOf(wanted) {
  return plain(wanted, MAX_TITLE);
}

export function isWithin(word, start, end) {
  const middle = (word.start + word.end) / 2;
  return middle >= start && middle <= end;
}

// As the server counts: A to Z, then AA.
function lettersOf(number) {
  const last = String.fromCharCode(65 + (number % 26));
  return number < 26 ? last : lettersOf(Math.floor(number / 26) - 1) + last;
}

// How a speaker is called: by the name that was given, or by the server's letter.
export function speakerName(speaker) {
  return LETTERS.test(speaker) ? `Speaker ${speaker}` : speaker;
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

// The text of a turn as it stands, in pieces as above. A word that was removed is an empty piece.
export function piecesOf(turn) {
  const heard = turn.words.map((word) => ({ word: word.heard ?? word.word, is: word }));
  const pieces = alignWords(turn.heard ?? turn.text, heard).map(({ text, word }) => ({
    text: word ? word.is.word : text,
    word: word?.is ?? null,
  }));
  pieces.forEach(({ text, word }, n) => {
    if (!word || text) return;
    // The space behind it goes with it, or the one before it.
    const [before, after] = [pieces[n - 1], pieces[n + 1]];
    if (after && !after.word && after.text.startsWith(" ")) after.text = after.text.slice(1);
    else if (before && !before.word && before.text.endsWith(" ")) before.text = before.text.slice(0, -1);
  });
  return pieces;
}
