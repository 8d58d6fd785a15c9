// The list of transcripts that this browser keeps: open one again, rename or delete it, or find a text in all of them.

import { clock, dateAndTime } from "./format.js";
import { patternOf } from "./search.js";
import { Transcript } from "./transcript.js";

// Places that are shown of one transcript, and letters before a place.
const MOST_PLACES = 3;
const BEFORE = 40;
const AFTER = 80;

export class Library {
  // `busy()` says that something is heard now; `onOpen(head)` follows when a transcript has come back, and
  // `onFound(number, text)` when a turn of the transcript on the page is to be shown.
  constructor(keeper, { dialog, field, found, list, none }, { busy, onOpen, onFound }) {
    Object.assign(this, { keeper, dialog, field, found, list, none, busy, onOpen, onFound });
    field.addEventListener("input", () => this.#look());
    dialog.addEventListener("close", () => (this.texts = null));
  }

  async open() {
    this.field.value = "";
    await this.#fill();
    this.dialog.showModal();
  }

  async #fill() {
    await this.keeper.opened;
    await this.keeper.flush();
    this.texts = null;
    const heads = this.keeper.works ? await this.keeper.archive.heads() : [];
    for (const head of heads) head.seconds ||= await this.#seconds(head);
    this.heads = heads;
    this.field.hidden = !heads.length;
    await this.#look();
  }

  // Some were kept without their length.
  async #seconds({ id }) {
    const transcript = new Transcript();
    transcript.load(await this.keeper.archive.turns(id));
    return transcript.seconds;
  }

  // Shows all transcripts, or those with the text in the field. Only the newest question is answered.
  async #look() {
    const pattern = patternOf(this.field.value);
    const mine = (this.asked = {});
    const rows = pattern ? await this.#matching(pattern) : this.heads.map((head) => ({ head, places: [] }));
    if (mine !== this.asked) return;
    this.none.hidden = rows.length > 0;
    this.none.textContent = !this.keeper.works
      ? "This browser keeps no captions for this page."
      : pattern ? "Not found in any transcript." : "Nothing is kept yet.";
    this.list.replaceChildren(...rows.map((row) => this.#row(row)));
    const count = rows.reduce((sum, { places }) => sum + places.length, 0);
    const plural = (number, what) => `${number.toLocaleString()} ${what}${number === 1 ? "" : "s"}`;
    this.found.textContent = pattern && rows.length ? `${plural(count, "place")} in ${plural(rows.length, "transcript")}` : "";
  }

  // `{head, places}` of each transcript that has the text, or is called so.
  async #matching(pattern) {
    // The archive is read once, not with each letter that is typed.
    this.texts ??= Promise.all(this.heads.map(({ id }) => this.#textsOf(id)));
    const texts = await this.texts;
    const rows = this.heads.map((head, n) => {
      const places = texts[n].flatMap(({ number, text }) =>
        [...text.matchAll(pattern)].map((match) => ({ number, text, at: match.index, length: match[0].length })),
      );
      return { head, places };
    });
    return rows.filter(({ head, places }) => places.length || head.name?.match(pattern));
  }

  async #textsOf(id) {
    const turns = await this.keeper.archive.turns(id);
    return turns.filter(({ state }) => state !== "note").map(({ number, text }) => ({ number, text }));
  }

  #row({ head, places }) {
    const row = document.createElement("li");
    // A transcript's number is the time it began.
    const when = dateAndTime(head.id);
    const here = head.id === this.keeper.id;
    const called = head.name || head.title;
    const open = button("title", called || "(no words)", () => this.#bring(head, open));
    open.disabled = here;
    const facts = document.createElement("small");
    facts.textContent = `${when}, ${clock(head.seconds)} long${here ? ", on the page" : ""}`;
    const rename = button("quiet", "Rename", () => this.#rename(head, open));
    rename.ariaLabel = `Rename ${called || when}`;
    const remove = button("quiet", "Delete", () => this.#delete(head));
    remove.ariaLabel = `Delete ${called || when}`;
    const does = document.createElement("span");
    does.className = "does";
    does.append(rename, remove);
    row.append(open, facts, does);
    for (const place of places.slice(0, MOST_PLACES)) {
      const shown = button("place", "", () => (here ? this.#show(place) : this.#bring(head, open, place)));
      shown.append(...around(place));
      row.append(shown);
    }
    if (places.length > MOST_PLACES) {
      const more = document.createElement("small");
      more.className = "more-places";
      more.textContent = `and ${(places.length - MOST_PLACES).toLocaleString()} more`;
      row.append(more);
    }
    return row;
  }

  async #bring(head, opener, place = null) {
    if (this.busy()) this.#refuse(opener, "Stop listening first.");
    else if (!this.keeper.complete) this.#refuse(opener, "The captions on the page could not be kept; save them first.");
    else if (await this.keeper.bring(head)) {
      this.onOpen(head);
      if (place) this.#show(place);
      else this.dialog.close();
    } else this.#refuse(opener, "Another window goes on with this one.");
  }

  #show({ number }) {
    const text = this.field.value;
    this.dialog.close();
    this.onFound(number, text);
  }

  #refuse(opener, why) {
    opener.nextElementSibling.textContent = why;
  }

  async #rename(head, opener) {
    const name = prompt("What is the name of this transcript?", head.name ?? "");
    if (name === null) return;
    if (!(await this.keeper.rename(head, name))) {
      this.#refuse(opener, "It could not be renamed: another window goes on with it, or the browser has no room.");
      return;
    }
    const at = [...this.list.children].indexOf(opener.parentElement);
    await this.#fill();
    this.list.children[at]?.querySelector(".quiet").focus();
  }

  async #delete(head) {
    const here = head.id === this.keeper.id;
    if (here && this.busy()) return;
    if (!confirm(`Delete “${head.name || head.title || "(no words)"}” from this browser?`)) return;
    if (here) {
      await this.keeper.forget();
    } else await this.keeper.delete(head.id);
    await this.#fill();
    // The button that had the focus is gone.
    (this.list.querySelector("button:enabled") ?? this.dialog.querySelector("[value=close]")).focus();
  }
}

// A place with what stands around it.
function around({ text, at, length }) {
  const mark = document.createElement("mark");
  mark.textContent = text.slice(at, at + length);
  const from = Math.max(0, at - BEFORE);
  const to = at + length + AFTER;
  return [(from ? "…" : "") + text.slice(from, at), mark, text.slice(at + length, to) + (to < text.length ? "…" : "")];
}

function button(className, text, action) {
  const made = document.createElement("button");
  Object.assign(made, { type: "button", className, textContent: text });
  made.addEventListener("click", action);
  return made;
}
