// The search bar: finds a text in all captions of the transcript, marks the matches, and goes from one to the next.
//
// It also finds captions that are not in the document at the moment (see captions.js).

// More matches than a user steps through. A single letter has so many that finding all would take noticeable time.
const MAX_MATCHES = 5000;

// The expression that finds a text, ignoring case; null for an empty text.
export function patternOf(text) {
  const escaped = text.trim().replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  return escaped ? new RegExp(escaped, "giu") : null;
}

export class Search {
  constructor(transcript, captions, { bar, field, count, next, previous, close }, announce) {
    Object.assign(this, { transcript, captions, bar, field, count, announce });
    // `{turn, index, length}` of each match, oldest first; the index of the one that is shown.
    this.matches = [];
    this.current = -1;
    field.addEventListener("input", () => this.#search(true));
    next.addEventListener("click", () => this.#step(1));
    previous.addEventListener("click", () => this.#step(-1));
    close.addEventListener("click", () => this.close());
    bar.addEventListener("keydown", (event) => this.#key(event));
    for (const kind of ["added", "grown", "changed", "corrected", "removed", "reset", "shown"]) {
      const source = kind === "shown" ? captions : transcript;
      source.addEventListener(kind, () => this.#searchNextFrame());
    }
  }

  open() {
    this.bar.hidden = false;
    this.field.focus();
    this.field.select();
    this.#search(true);
  }

  // Searches for this text, and shows its first match in `turn`.
  show(text, turn) {
    this.bar.hidden = false;
    this.field.value = text;
    this.#search(true, turn);
    this.field.focus();
  }

  close() {
    this.bar.hidden = true;
    this.matches = [];
    this.#paint();
    document.getElementById("captions").focus();
  }

  #key(event) {
    if (event.key === "Escape") this.close();
    else if (event.key === "Enter" && event.target === this.field) this.#step(event.shiftKey ? -1 : 1);
    else return;
    event.preventDefault();
  }

  // Text arrives many times a second; the search runs at most once for each frame of the screen.
  #searchNextFrame() {
    if (this.bar.hidden || this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.#search(false);
    });
  }

  // `isNewText`: the user has changed the text to find. Then the first match in `turn` is shown, or else the newest
  // match.
  #search(isNewText, turn) {
    const previous = this.matches[this.current];
    const pattern = patternOf(this.field.value);
    this.matches = [];
    if (pattern) {
      const { entries } = this.transcript;
      for (let n = entries.length - 1; n >= 0 && this.matches.length < MAX_MATCHES; n -= 1) {
        const inTurn = [...entries[n].text.matchAll(pattern)];
        this.matches.push(...inTurn.reverse().map(({ index, 0: { length } }) => ({ turn: entries[n], index, length })));
      }
      this.matches.reverse();
    }
    const isPrevious = ({ turn, index }) => turn === previous?.turn && index === previous.index;
    const first = turn ? this.matches.findIndex((match) => match.turn === turn) : -1;
    this.current = isNewText ? (first < 0 ? this.matches.length - 1 : first) : this.matches.findIndex(isPrevious);
    if (isNewText && this.matches.length) this.captions.show(this.matches[this.current].turn);
    this.#paint();
  }

  #step(by) {
    const { length } = this.matches;
    if (!length) return;
    this.current = this.current < 0 ? length - 1 : (this.current + by + length) % length;
    const { turn } = this.matches[this.current];
    this.captions.show(turn);
    this.#paint();
    this.announce(`${this.current + 1} of ${length}: ${turn.text}`);
  }

  #paint() {
    const { length } = this.matches;
    const text = this.field.value.trim();
    const all = length < MAX_MATCHES ? length : `more than ${MAX_MATCHES}`;
    this.count.textContent = length ? `${Math.max(1, this.current + 1)} of ${all}` : text ? "Not found" : "";
    if (!globalThis.Highlight) return;
    const [others, current] = [new Highlight(), new Highlight()];
    current.priority = 1;
    this.matches.forEach((match, number) => {
      const item = this.captions.items.get(match.turn);
      const range = item && rangeIn(item.querySelector(".text"), match.index, match.length);
      if (range) (number === this.current ? current : others).add(range);
    });
    CSS.highlights.set("found", others);
    CSS.highlights.set("found-now", current);
  }
}

// The range of the characters `index` to `index + length` of an element's text, across its child elements; null if it
// is shorter.
function rangeIn(element, index, length) {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  let nodeStart = 0;
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const end = nodeStart + node.data.length;
    if (index >= nodeStart && index < end) range.setStart(node, index - nodeStart);
    if (index + length > nodeStart && index + length <= end) {
      range.setEnd(node, index + length - nodeStart);
      return range;
    }
    nodeStart = end;
  }
  return null;
}
