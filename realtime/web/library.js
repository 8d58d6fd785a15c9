// The list of transcripts that this browser keeps: open one again, or delete it.

import { clock, dateAndTime } from "./format.js";
import { Transcript } from "./transcript.js";

export class Library {
  // `busy()` says that something is heard now; `onOpen(head)` follows when a transcript has come back.
  constructor(keeper, { dialog, list, none }, { busy, onOpen }) {
    Object.assign(this, { keeper, dialog, list, none, busy, onOpen });
  }

  async open() {
    await this.#fill();
    this.dialog.showModal();
  }

  async #fill() {
    await this.keeper.opened;
    await this.keeper.flush();
    const heads = this.keeper.works ? await this.keeper.archive.heads() : [];
    this.none.hidden = heads.length > 0;
    this.none.textContent = this.keeper.works ? "Nothing is kept yet." : "This browser keeps no captions for this page.";
    for (const head of heads) head.seconds ||= await this.#seconds(head);
    this.list.replaceChildren(...heads.map((head) => this.#row(head)));
  }

  // Some were kept without their length.
  async #seconds({ id }) {
    const transcript = new Transcript();
    transcript.load(await this.keeper.archive.turns(id));
    return transcript.seconds;
  }

  #row(head) {
    const row = document.createElement("li");
    // A transcript's number is the time it began.
    const when = dateAndTime(head.id);
    const here = head.id === this.keeper.id;
    const open = button("title", head.title || "(no words)", () => this.#bring(head, open));
    open.disabled = here;
    const facts = document.createElement("small");
    facts.textContent = `${when}, ${clock(head.seconds)} long${here ? ", on the page" : ""}`;
    const remove = button("quiet", "Delete", () => this.#delete(head));
    remove.ariaLabel = `Delete ${head.title || when}`;
    row.append(open, facts, remove);
    return row;
  }

  async #bring(head, opener) {
    if (this.busy()) this.#refuse(opener, "Stop listening first.");
    else if (!this.keeper.complete) this.#refuse(opener, "The captions on the page could not be kept; save them first.");
    else if (await this.keeper.bring(head)) {
      this.dialog.close();
      this.onOpen(head);
    } else this.#refuse(opener, "Another window goes on with this one.");
  }

  #refuse(opener, why) {
    opener.nextElementSibling.textContent = why;
  }

  async #delete(head) {
    const here = head.id === this.keeper.id;
    if (here && this.busy()) return;
    if (!confirm(`Delete “${head.title || "(no words)"}” from this browser?`)) return;
    if (here) {
      await this.keeper.forget();
    } else await this.keeper.delete(head.id);
    await this.#fill();
    // The button that had the focus is gone.
    (this.list.querySelector("button:enabled") ?? this.dialog.querySelector("[value=close]")).focus();
  }
}

function button(className, text, action) {
  const made = document.createElement("button");
  Object.assign(made, { type: "button", className, textContent: text });
  made.addEventListener("click", action);
  return made;
}
