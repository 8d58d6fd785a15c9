// Cuts the streamed text of a file into turns: at pauses, at ends of sentences, and where a turn becomes too long.
//
// The upload route sends text in deltas of one word to half a minute, and each word with its times once it is complete.
// Many models give a word a duration up to the next word. So a pause is the gap between two words plus the part of the
// first word's duration that exceeds the time for saying it.

const PAUSE_SECONDS = 0.7;
const SENTENCE_PAUSE_SECONDS = 0.4;
// From these lengths on, a turn ends at the next end of a sentence, then of a clause, then of any word.
const SENTENCE_CHARACTERS = 120;
const CLAUSE_CHARACTERS = 240;
const MAX_CHARACTERS = 360;
const SENTENCE_END = /[.?!…。？！]["'”’»)\]]*$/u;
const CLAUSE_END = /[,;:，、；：–—]["'”’»)\]]*$/u;

export class TurnCutter {
  constructor() {
    // Text and words of the turn that is not finished, and the length of the part of the text that these words cover.
    this.text = "";
    this.words = [];
    this.coveredLength = 0;
    // The end of the last word so far, in seconds of the file.
    this.endSeconds = 0;
  }

  // Adds a delta and its complete words. Returns the turns that these finish: `{text, words, start, end}`.
  push(delta, words) {
    this.text += delta;
    const turns = [];
    for (const word of words) {
      if (this.words.length && this.#endsBefore(word)) turns.push(this.#cut());
      this.#add(word);
    }
    // A model that gives no times of words: the text is cut by its length.
    while (!this.words.length && this.text.length > MAX_CHARACTERS) {
      this.coveredLength = lengthOfSentences(this.text);
      turns.push(this.#cut());
    }
    return turns;
  }

  // The turn that is not finished, or null.
  get open() {
    const text = this.text.trim();
    if (!text) return null;
    const start = this.words[0]?.start ?? this.endSeconds;
    return { text, words: this.words, start, end: Math.max(start, this.words.at(-1)?.end ?? this.endSeconds) };
  }

  // After the last delta: the last turn, or null.
  end() {
    this.coveredLength = this.text.length;
    return this.text.trim() ? this.#cut() : null;
  }

  #add(word) {
    const found = this.text.indexOf(word.word, this.coveredLength);
    // A word that is written otherwise in the text (by a model that normalises) covers none of it.
    if (found >= 0) this.coveredLength = found + word.word.length;
    this.words.push(word);
    this.endSeconds = Math.max(this.endSeconds, word.end);
  }

  #endsBefore(next) {
    const last = this.words.at(-1);
    const spelling = last.word.trim();
    const pause = next.start - last.end + Math.max(0, last.end - last.start - secondsToSay(spelling));
    if (pause >= PAUSE_SECONDS) return true;
    const length = this.coveredLength;
    if (SENTENCE_END.test(spelling)) return pause >= SENTENCE_PAUSE_SECONDS || length >= SENTENCE_CHARACTERS;
    if (CLAUSE_END.test(spelling)) return length >= CLAUSE_CHARACTERS;
    return length >= MAX_CHARACTERS;
  }

  #cut() {
    const rest = this.text.slice(this.coveredLength);
    this.text = this.text.slice(0, this.coveredLength);
    const turn = this.open;
    this.text = rest.trimStart();
    this.words = [];
    this.coveredLength = 0;
    return turn;
  }
}

// An upper estimate. A character for a syllable or more takes longer than a letter.
function secondsToSay(word) {
  const syllabic = word.match(/[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}]/gu)?.length ?? 0;
  return 0.25 + 0.07 * word.length + 0.15 * syllabic;
}

// The length of the complete sentences within MAX_CHARACTERS; if there are none, that of the complete words.
function lengthOfSentences(text) {
  const head = text.slice(0, MAX_CHARACTERS);
  const sentences = /^.*[.?!…。？！]["'”’»)\]]*(?=\s)/su.exec(head)?.[0].length;
  return sentences ?? (head.lastIndexOf(" ") > 0 ? head.lastIndexOf(" ") : MAX_CHARACTERS);
}
