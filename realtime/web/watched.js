// The words of a published session as a viewer has them: finished turns and open ones, by their ids.

const MOST_LINES = 300;

export class Watched {
  lines = new Map();
  open = new Map();
  live = false;

  // Takes an event of the server; returns the texts of the turns that it has finished.
  take(event) {
    if (event.type === "snapshot") return this.#merge(event);
    if (event.type === "begin" || event.type === "end") {
      this.live = event.type === "begin";
      this.open.clear();
    } else if (event.type === "delta") {
      this.open.set(event.id, (this.open.get(event.id) ?? "") + event.text);
    } else if (event.type === "removed") {
      this.open.delete(event.id);
    } else if (event.type === "final") {
      this.#finish(event);
      return [event.text];
    }
    return [];
  }

  // A snapshot has the newest turns. Turns that are known already stay where they are.
  #merge({ live, lines, open }) {
    const known = this.lines.size > 0;
    const fresh = lines.filter(({ id }) => !this.lines.has(id));
    this.live = live;
    lines.forEach((line) => this.#finish(line));
    this.open = new Map(open.map(({ id, text }) => [id, text]));
    return known ? fresh.map(({ text }) => text) : [];
  }

  #finish({ id, text }) {
    this.open.delete(id);
    this.lines.set(id, text);
    if (this.lines.size > MOST_LINES) this.lines.delete(this.lines.keys().next().value);
  }

  // All turns in order: `{ id, text, open }`.
  get turns() {
    const shown = (map, open) => [...map].map(([id, text]) => ({ id, text: text.trim(), open }));
    return [...shown(this.lines, false), ...shown(this.open, true)].filter(({ text }) => text);
  }
}
