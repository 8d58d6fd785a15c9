// Cuts the text of a file into captions as live sound has them: at pauses, after sentences, and before one is too long.
//
// Text comes in pieces that may be a word or half a minute, and a word with its times once it is complete. Many models
// let a word last until the next one begins, so a pause is also what a word lasts beyond the time that saying it takes.

const PAUSE_SECONDS = 0.7;
const SENTENCE_PAUSE_SECONDS = 0.4;
// A caption ends after the first sentence that makes it so long, then after a clause, then after any word.
const SENTENCE_CHARACTERS = 120;
const CLAUSE_CHARACTERS = 240;
const MOST_CHARACTERS = 360;
const SENTENCE_END = /[.?!…。？！]["'”’»)\]]*$/u;
const CLAUSE_END = /[,;:，、；：–—]["'”’»)\]]*$/u;

export class TurnCutter {
  constructor() {
    // What belongs to no finished caption yet, and how much of that is in complete words.
    this.text = "";
    this.words = [];
    this.worded = 0;
    // How far the file has been read, by its words.
    this.until = 0;
  }

  // Takes what came. Gives the captions that this finishes: `{text, words, start, end}`.
  push(delta, words) {
    this.text += delta;
    const turns = [];
    for (const word of words) {
      if (this.words.length && this.#endsBefore(word)) turns.push(this.#cut());
      this.#take(word);
    }
    // A model without times of words: its captions are cut by their letters, at the time that is known.
    while (!this.words.length && this.text.length > MOST_CHARACTERS) {
      this.worded = lengthOfSentences(this.text);
      turns.push(this.#cut());
    }
    return turns;
  }

  // The caption that is not finished, or null.
  get open() {
    const text = this.text.trim();
    if (!text) return null;
    const start = this.words[0]?.start ?? this.until;
    return { text, words: this.words, start, end: Math.max(start, this.words.at(-1)?.end ?? this.until) };
  }

  // No more will come: the last caption, or null.
  end() {
    this.worded = this.text.length;
    return this.text.trim() ? this.#cut() : null;
  }

  #take(word) {
    const found = this.text.indexOf(word.word, this.worded);
    // A word that is not in the text (a model that normalises) takes none of it.
    if (found >= 0) this.worded = found + word.word.length;
    this.words.push(word);
    this.until = Math.max(this.until, word.end);
  }

  #endsBefore(next) {
    const last = this.words.at(-1);
    const said = last.word.trim();
    const pause = next.start - last.end + Math.max(0, last.end - last.start - secondsToSay(said));
    if (pause >= PAUSE_SECONDS) return true;
    const length = this.worded;
    if (SENTENCE_END.test(said)) return pause >= SENTENCE_PAUSE_SECONDS || length >= SENTENCE_CHARACTERS;
    if (CLAUSE_END.test(said)) return length >= CLAUSE_CHARACTERS;
    return length >= MOST_CHARACTERS;
  }

  #cut() {
    const rest = this.text.slice(this.worded);
    this.text = this.text.slice(0, this.worded);
    const turn = this.open;
    this.text = rest.trimStart();
    this.words = [];
    this.worded = 0;
    return turn;
  }
}

// Generously. A sign that stands for a syllable or more takes longer than a letter.
function secondsToSay(word) {
  const signs = word.match(/[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}]/gu)?.length ?? 0;
  return 0.25 + 0.07 * word.length + 0.15 * signs;
}

// Whole sentences of at most MOST_CHARACTERS, or else whole words.
function lengthOfSentences(text) {
  const most = text.slice(0, MOST_CHARACTERS);
  const sentences = /^.*[.?!…。？！]["'”’»)\]]*(?=\s)/su.exec(most)?.[0].length;
  return sentences ?? (most.lastIndexOf(" ") > 0 ? most.lastIndexOf(" ") : MOST_CHARACTERS);
}
