// The transcript on a viewer's page (/watch/NAME): finished and open turns, updated by the server's events.

// Older finished turns are dropped.
const MAX_LINES = 300;

export class WatchTranscript {
  // Texts by turn id: finished turns, and open ones.
  lines = new Map();
  open = new Map();
  live = false;

  // Applies an event of the server; returns the texts of the turns that it finishes.
  apply(event) {
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

  // A snapshot has the newest turns; the server sends it when the viewer connects. After a reconnection, turns that are
  // known keep their place, and the texts of the others are returned.
  #merge({ live, lines, open }) {
    const isReconnection = this.lines.size > 0;
    const added = lines.filter(({ id }) => !this.lines.has(id));
    this.live = live;
    lines.forEach((line) => this.#finish(line));
    this.open = new Map(open.map(({ id, text }) => [id, text]));
    return isReconnection ? added.map(({ text }) => text) : [];
  }

  #finish({ id, text }) {
    this.open.delete(id);
    this.lines.set(id, text);
    if (this.lines.size > MAX_LINES) this.lines.delete(this.lines.keys().next().value);
  }

  // All turns in order: `{ id, text, open }`.
  get turns() {
    const shown = (map, open) => [...map].map(([id, text]) => ({ id, text: text.trim(), open }));
    return [...shown(this.lines, false), ...shown(this.open, true)].filter(({ text }) => text);
  }
}
