// Finds text in all captions, also in those that are not in the document now, and walks from one place to the next.

// More results than a user steps through. A single letter has so many that finding them all would take noticeable time.
const MOST_FOUND = 5000;

// What finds a text wherever it stands, in capitals or not; null if there is nothing to find.
export function patternOf(text) {
  const wanted = text.trim().replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  return wanted ? new RegExp(wanted, "giu") : null;
}

export class Search {
  constructor(transcript, captions, { bar, field, count, next, previous, close }, announce) {
    Object.assign(this, { transcript, captions, bar, field, count, announce });
    this.found = [];
    this.current = -1;
    field.addEventListener("input", () => this.#look(true));
    next.addEventListener("click", () => this.#step(1));
    previous.addEventListener("click", () => this.#step(-1));
    close.addEventListener("click", () => this.close());
    bar.addEventListener("keydown", (event) => this.#key(event));
    for (const kind of ["added", "grown", "changed", "corrected", "removed", "reset", "shown"]) {
      const source = kind === "shown" ? captions : transcript;
      source.addEventListener(kind, () => this.#later());
    }
  }

  open() {
    this.bar.hidden = false;
    this.field.focus();
    this.field.select();
    this.#look(true);
  }

  // Shows where this text stands in a turn.
  show(text, turn) {
    this.bar.hidden = false;
    this.field.value = text;
    this.#look(true, turn);
    this.field.focus();
  }

  close() {
    this.bar.hidden = true;
    this.found = [];
    this.#paint();
    document.getElementById("captions").focus();
  }

  #key(event) {
    if (event.key === "Escape") this.close();
    else if (event.key === "Enter" && event.target === this.field) this.#step(event.shiftKey ? -1 : 1);
    else return;
    event.preventDefault();
  }

  // New text comes many times a second; once for each picture is enough.
  #later() {
    if (this.bar.hidden || this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.#look(false);
    });
  }

  // `anew`: the words to find have changed, and the first to show is in `turn`, or the newest place.
  #look(anew, turn) {
    const before = this.found[this.current];
    const pattern = patternOf(this.field.value);
    this.found = [];
    if (pattern) {
      const { entries } = this.transcript;
      for (let n = entries.length - 1; n >= 0 && this.found.length < MOST_FOUND; n -= 1) {
        const places = [...entries[n].text.matchAll(pattern)];
        this.found.push(...places.reverse().map(({ index, 0: { length } }) => ({ turn: entries[n], index, length })));
      }
      this.found.reverse();
    }
    const same = ({ turn, index }) => turn === before?.turn && index === before.index;
    const first = turn ? this.found.findIndex((place) => place.turn === turn) : -1;
    this.current = anew ? (first < 0 ? this.found.length - 1 : first) : this.found.findIndex(same);
    if (anew && this.found.length) this.captions.show(this.found[this.current].turn);
    this.#paint();
  }

  #step(by) {
    const { length } = this.found;
    if (!length) return;
    this.current = this.current < 0 ? length - 1 : (this.current + by + length) % length;
    const { turn } = this.found[this.current];
    this.captions.show(turn);
    this.#paint();
    this.announce(`${this.current + 1} of ${length}: ${turn.text}`);
  }

  #paint() {
    const { length } = this.found;
    const asked = this.field.value.trim();
    const all = length < MOST_FOUND ? length : `more than ${MOST_FOUND}`;
    this.count.textContent = length ? `${Math.max(1, this.current + 1)} of ${all}` : asked ? "Not found" : "";
    if (!globalThis.Highlight) return;
    const [found, now] = [new Highlight(), new Highlight()];
    now.priority = 1;
    this.found.forEach((place, number) => {
      const item = this.captions.items.get(place.turn);
      const range = item && rangeIn(item.querySelector(".text"), place.index, place.length);
      if (range) (number === this.current ? now : found).add(range);
    });
    CSS.highlights.set("found", found);
    CSS.highlights.set("found-now", now);
  }
}

// Characters `index` to `index + length` of an element's text, over whatever elements they lie in.
function rangeIn(element, index, length) {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  let at = 0;
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const end = at + node.data.length;
    if (index >= at && index < end) range.setStart(node, index - at);
    if (index + length > at && index + length <= end) {
      range.setEnd(node, index + length - at);
      return range;
    }
    at = end;
  }
  return null;
}
