// The transcript as a data model: turns and notes, changed by the server's events and by the user's corrections.
//
// Times are seconds since the first recording began. The entries are turns and notes. A turn's `state` is `open` while
// its text may still grow, `done` once the server has completed it, and `cut` if the server never completed it. A note
// stands where sound is missing. A corrected word keeps the recognised word as `heard`, and its turn keeps the
// recognised text as `heard`; both are deleted when the correction is undone.

// Characters: of a speaker's name, of a corrected word, and of a transcript's name.
const MAX_NAME = 64;
const MAX_CORRECTION = 200;
const MAX_TITLE = 120;
// The server's labels of speakers.
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

  // Replaces the transcript by stored entries. Turns that were open when they were stored get no more text.
  load(entries, name = "") {
    const ended = (turn) => turn.words.at(-1)?.end ?? turn.end ?? turn.start;
    this.entries = entries.map((turn) => (turn.state === "open" ? { ...turn, state: "cut", end: ended(turn) } : turn));
    this.name = name;
    // The end of the newest finished turn.
    this.settledUntil = Math.max(0, ...this.entries.slice(-1).map((turn) => turn.end));
    // Open turns by the server's item id.
    this.byId = new Map();
    // Names that the user gave to speakers, by label; and all speakers of finished turns, in order of appearance.
    this.renamed = new Map();
    this.voices = new Set(this.entries.flatMap((turn) => turn.words.map(({ speaker }) => speaker).filter(Boolean)));
    this.newRecording();
    // The number of the next entry. An entry keeps its number when others are removed.
    this.numbers = (entries.at(-1)?.number ?? -1) + 1;
    this.#dispatch("reset");
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

  // The end of the newest text, open or finished. Only the last few entries may be out of order.
  get seconds() {
    const ends = this.entries.slice(-20).map((entry) => Math.max(entry.start, entry.end ?? 0, entry.words.at(-1)?.end ?? 0));
    return Math.max(0, ...ends);
  }

  get openTurns() {
    return [...this.byId.values()];
  }

  // Start of the oldest open turn, or null.
  get openSince() {
    return this.byId.size ? Math.min(...this.openTurns.map((turn) => turn.start)) : null;
  }

  // Applies a server event. `base` is where the server session began on the transcript's clock, in seconds.
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

  // The server labels speakers from A on in each recording. If there were several speakers before, the new recording's
  // speakers get new letters; a single speaker before is assumed to be the same as the new A.
  newRecording() {
    // Speakers of the transcript by the server's letter in this recording.
    this.letters = new Map();
    this.usesNewLetters = this.voices.size > 1;
  }

  setName(text) {
    const name = titleOf(text);
    if (name === this.name) return;
    this.name = name;
    this.#dispatch("named");
  }

  // Replaces a word of a finished turn. An empty text removes the word; the recognised text restores it.
  correct(turn, word, replacement) {
    const text = plain(replacement, MAX_CORRECTION);
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
    this.#dispatch("corrected", turn);
  }

  // Sets the speaker of the finished words between two times; labels may arrive after the words.
  label(letter, start, end) {
    const speaker = this.#voice(letter);
    for (let n = this.#lastIndexAt(end); n >= 0; n -= 1) {
      const turn = this.entries[n];
      if (turn.state === "open" || turn.state === "note") continue;
      if (turn.end <= start) break;
      const labelled = turn.words.filter((word) => isWithin(word, start, end));
      for (const word of labelled) word.speaker = speaker;
      if (labelled.length) this.#dispatch("labelled", turn);
    }
    this.#addVoices([speaker]);
  }

  // Renames a speaker in all turns, also in later ones. Two speakers with the same name become one.
  rename(speaker, newName) {
    const name = plain(newName, MAX_NAME);
    if (!name || name === speaker) return;
    for (const [letter, current] of this.renamed) if (current === speaker) this.renamed.set(letter, name);
    if (!this.renamed.has(speaker)) this.renamed.set(speaker, name);
    this.voices = new Set([...this.voices].map((voice) => (voice === speaker ? name : voice)));
    for (const turn of this.entries) {
      const spoken = turn.words.filter((word) => word.speaker === speaker);
      for (const word of spoken) word.speaker = name;
      if (spoken.length) this.#dispatch("renamed", turn);
    }
    this.#dispatch("voices");
  }

  note(text, at) {
    this.entries.push({ number: this.numbers++, state: "note", text, start: at, end: at, words: [] });
    this.#dispatch("added", this.entries.at(-1));
  }

  // Ends the open turns, which the server will not complete. With `resend` they are removed, because their sound is
  // sent again.
  abandonOpen({ resend }) {
    for (const turn of this.openTurns) {
      this.byId.delete(turn.id);
      if (resend || !turn.text) this.#remove(turn);
      else {
        this.#change(turn, { state: "cut", end: turn.words.at(-1)?.end ?? turn.end ?? turn.start });
        this.#addVoices(turn.words.map(({ speaker }) => speaker));
      }
    }
  }

  // The open turn with this id; a new one begins at `start`.
  #turn(id, start) {
    let turn = this.byId.get(id);
    if (!turn) {
      turn = { id, number: this.numbers++, start, end: null, text: "", words: [], state: "open" };
      this.byId.set(id, turn);
      this.entries.push(turn);
      this.#dispatch("added", turn);
    }
    return turn;
  }

  #grow(turn, event, base) {
    const words = this.#labelledWords(event.words, base);
    // Words after the scored pause: the turn has not ended, so its score is void.
    if (words.some(({ start }) => start > turn.scoredAt)) this.#change(turn, { sure: undefined, scoredAt: undefined });
    turn.text += event.delta;
    turn.words.push(...words);
    this.#dispatch("grown", turn, event.delta);
  }

  // Stores the server's probability that the turn has ended, which it sends in a pause.
  #score(event, base) {
    const turn = this.byId.get(event.item_id);
    if (turn?.text) this.#change(turn, { sure: event.end_of_turn_confidence, scoredAt: base + event.audio_end_ms / 1000 });
  }

  #labelledWords(words, base) {
    return onClock(words, base).map((word) => (word.speaker ? { ...word, speaker: this.#voice(word.speaker) } : word));
  }

  // The speaker of the transcript for a letter of the server in this recording: a letter, or the user's name.
  #voice(letter) {
    if (!this.letters.has(letter)) this.letters.set(letter, this.usesNewLetters && LETTERS.test(letter) ? this.#freeLetter() : letter);
    const voice = this.letters.get(letter);
    return this.renamed.get(voice) ?? voice;
  }

  // The index of the last entry that begins by this time, by binary search; notes may be slightly out of order.
  #lastIndexAt(second) {
    let [low, high] = [0, this.entries.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.entries[middle].start <= second) low = middle + 1;
      else high = middle;
    }
    return Math.min(low, this.entries.length - 1);
  }

  #freeLetter() {
    const used = new Set([...this.voices, ...this.renamed.keys(), ...this.letters.values()]);
    for (let number = 0; ; number += 1) if (!used.has(lettersOf(number))) return lettersOf(number);
  }

  #addVoices(voices) {
    const before = this.voices.size;
    for (const voice of voices) if (voice) this.voices.add(voice);
    if (this.voices.size !== before) this.#dispatch("voices");
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
    const words = this.#labelledWords(event.words, base);
    const sure = event.end_of_turn_confidence;
    this.#change(turn, { state: "done", text: event.transcript, words, start, end, sure, scoredAt: undefined });
    this.#addVoices(words.map(({ speaker }) => speaker));
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
    this.#dispatch("removed", turn);
  }

  #change(turn, values) {
    Object.assign(turn, values);
    this.#dispatch("changed", turn);
  }

  #dispatch(kind, turn, delta) {
    this.dispatchEvent(Object.assign(new Event(kind), { turn, delta }));
  }
}

// The server's words with times on the transcript's clock. Some models also give a `confidence` from 0 to 1.
function onClock(words, base) {
  return (words ?? []).map((word) => ({ ...word, word: word.word.trim(), start: base + word.start, end: base + word.end }));
}

// The text on one line, without control characters, cut to `maxCharacters`.
function plain(text, maxCharacters) {
  return [...text.replaceAll(/[\s\p{Cc}]+/gu, " ").trim()].slice(0, maxCharacters).join("").trim();
}

// A valid name of a transcript, from a text that the user entered.
export function titleOf(text) {
  return plain(text, MAX_TITLE);
}

// Whether the middle of a word is between two times.
export function isWithin(word, start, end) {
  const middle = (word.start + word.end) / 2;
  return middle >= start && middle <= end;
}

// The server's label of a speaker by its number: A to Z, then AA.
function lettersOf(number) {
  const last = String.fromCharCode(65 + (number % 26));
  return number < 26 ? last : lettersOf(Math.floor(number / 26) - 1) + last;
}

// The speaker's name on the page: the user's name for the speaker, or `Speaker` with the server's letter.
export function speakerName(speaker) {
  return LETTERS.test(speaker) ? `Speaker ${speaker}` : speaker;
}

// Divides a text into pieces `{text, word}`: the given words, and the text between them with `word` null. No character
// is lost.
export function alignWords(text, words) {
  const pieces = [];
  let position = 0;
  for (const word of words) {
    const found = word.word ? text.indexOf(word.word, position) : -1;
    if (found < 0) continue;
    if (found > position) pieces.push({ text: text.slice(position, found), word: null });
    position = found + word.word.length;
    pieces.push({ text: text.slice(found, position), word });
  }
  if (position < text.length) pieces.push({ text: text.slice(position), word: null });
  return pieces;
}

// The text of a turn with its corrections, in such pieces. A removed word is a piece with empty text.
export function piecesOf(turn) {
  const heard = turn.words.map((word) => ({ word: word.heard ?? word.word, current: word }));
  const pieces = alignWords(turn.heard ?? turn.text, heard).map(({ text, word }) => ({
    text: word ? word.current.word : text,
    word: word?.current ?? null,
  }));
  pieces.forEach(({ text, word }, n) => {
    if (!word || text) return;
    // With a removed word, remove the space after it, or else the space before it.
    const [before, after] = [pieces[n - 1], pieces[n + 1]];
    if (after && !after.word && after.text.startsWith(" ")) after.text = after.text.slice(1);
    else if (before && !before.word && before.text.endsWith(" ")) before.text = before.text.slice(0, -1);
  });
  return pieces;
}
