// The dialog with all stored transcripts: opens, renames and deletes them, and finds a text in all of them.

import { clock, dateAndTime } from "./format.js";
import { patternOf } from "./search.js";
import { Transcript } from "./transcript.js";

// Matches that are shown of one transcript, and the characters that are shown before and after a match.
const MAX_SHOWN_MATCHES = 3;
const CHARACTERS_BEFORE = 40;
const CHARACTERS_AFTER = 80;

export class Library {
  // `busy()` is true during a recording; `onOpen(head)` is called when a transcript has been loaded, and
  // `onFound(number, text)` to show a turn of the transcript on the page.
  constructor(autosave, { dialog, field, found, list, none }, { busy, onOpen, onFound }) {
    Object.assign(this, { autosave, dialog, field, found, list, none, busy, onOpen, onFound });
    field.addEventListener("input", () => this.#showRows());
    dialog.addEventListener("close", () => (this.texts = null));
  }

  async open() {
    this.field.value = "";
    await this.#fill();
    this.dialog.showModal();
  }

  async #fill() {
    await this.autosave.opened;
    await this.autosave.flush();
    this.texts = null;
    const heads = this.autosave.available ? await this.autosave.store.heads() : [];
    for (const head of heads) head.seconds ||= await this.#seconds(head);
    this.heads = heads;
    this.field.hidden = !heads.length;
    await this.#showRows();
  }

  // Older versions of the page stored transcripts without their length.
  async #seconds({ id }) {
    const transcript = new Transcript();
    transcript.load(await this.autosave.store.turns(id));
    return transcript.seconds;
  }

  // Shows all transcripts, or those with the text in the field. Only the result of the newest search is shown.
  async #showRows() {
    const pattern = patternOf(this.field.value);
    const search = (this.newestSearch = {});
    const rows = pattern ? await this.#matching(pattern) : this.heads.map((head) => ({ head, matches: [] }));
    if (search !== this.newestSearch) return;
    this.none.hidden = rows.length > 0;
    this.none.textContent = !this.autosave.available
      ? "This browser keeps no captions for this page."
      : pattern ? "Not found in any transcript." : "Nothing is kept yet.";
    this.list.replaceChildren(...rows.map((row) => this.#row(row)));
    const count = rows.reduce((sum, { matches }) => sum + matches.length, 0);
    const plural = (number, what) => `${number.toLocaleString()} ${what}${number === 1 ? "" : "s"}`;
    this.found.textContent = pattern && rows.length ? `${plural(count, "place")} in ${plural(rows.length, "transcript")}` : "";
  }

  // `{head, matches}` of each transcript that has the text, or has it in its name.
  async #matching(pattern) {
    // The store is read once, not with each character that is typed.
    this.texts ??= Promise.all(this.heads.map(({ id }) => this.#textsOf(id)));
    const texts = await this.texts;
    const rows = this.heads.map((head, n) => {
      const matches = texts[n].flatMap(({ number, text }) =>
        [...text.matchAll(pattern)].map((match) => ({ number, text, at: match.index, length: match[0].length })),
      );
      return { head, matches };
    });
    return rows.filter(({ head, matches }) => matches.length || head.name?.match(pattern));
  }

  async #textsOf(id) {
    const turns = await this.autosave.store.turns(id);
    return turns.filter(({ state }) => state !== "note").map(({ number, text }) => ({ number, text }));
  }

  #row({ head, matches }) {
    const row = document.createElement("li");
    // A transcript's id is the time at which it began.
    const when = dateAndTime(head.id);
    const isOnPage = head.id === this.autosave.id;
    const label = head.name || head.title;
    const open = button("title", label || "(no words)", () => this.#load(head, open));
    open.disabled = isOnPage;
    const facts = document.createElement("small");
    facts.textContent = `${when}, ${clock(head.seconds)} long${isOnPage ? ", on the page" : ""}`;
    const rename = button("quiet", "Rename", () => this.#rename(head, open));
    rename.ariaLabel = `Rename ${label || when}`;
    const remove = button("quiet", "Delete", () => this.#delete(head));
    remove.ariaLabel = `Delete ${label || when}`;
    const actions = document.createElement("span");
    actions.className = "does";
    actions.append(rename, remove);
    row.append(open, facts, actions);
    for (const match of matches.slice(0, MAX_SHOWN_MATCHES)) {
      const shown = button("place", "", () => (isOnPage ? this.#show(match) : this.#load(head, open, match)));
      shown.append(...excerpt(match));
      row.append(shown);
    }
    if (matches.length > MAX_SHOWN_MATCHES) {
      const more = document.createElement("small");
      more.className = "more-places";
      more.textContent = `and ${(matches.length - MAX_SHOWN_MATCHES).toLocaleString()} more`;
      row.append(more);
    }
    return row;
  }

  async #load(head, opener, match = null) {
    if (this.busy()) this.#refuse(opener, "Stop listening first.");
    else if (!this.autosave.allSaved) this.#refuse(opener, "The captions on the page could not be kept; save them first.");
    else if (await this.autosave.load(head)) {
      this.onOpen(head);
      if (match) this.#show(match);
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
    if (!(await this.autosave.rename(head, name))) {
      this.#refuse(opener, "It could not be renamed: another window goes on with it, or the browser has no room.");
      return;
    }
    const row = [...this.list.children].indexOf(opener.parentElement);
    await this.#fill();
    this.list.children[row]?.querySelector(".quiet").focus();
  }

  async #delete(head) {
    const isOnPage = head.id === this.autosave.id;
    if (isOnPage && this.busy()) return;
    if (!confirm(`Delete “${head.name || head.title || "(no words)"}” from this browser?`)) return;
    if (isOnPage) {
      await this.autosave.deleteCurrent();
    } else await this.autosave.delete(head.id);
    await this.#fill();
    // The button that had the focus is gone.
    (this.list.querySelector("button:enabled") ?? this.dialog.querySelector("[value=close]")).focus();
  }
}

// A match, marked, with the text before and after it.
function excerpt({ text, at, length }) {
  const mark = document.createElement("mark");
  mark.textContent = text.slice(at, at + length);
  const from = Math.max(0, at - CHARACTERS_BEFORE);
  const to = at + length + CHARACTERS_AFTER;
  return [(from ? "…" : "") + text.slice(from, at), mark, text.slice(at + length, to) + (to < text.length ? "…" : "")];
}

function button(className, text, action) {
  const element = document.createElement("button");
  Object.assign(element, { type: "button", className, textContent: text });
  element.addEventListener("click", action);
  return element;
}
