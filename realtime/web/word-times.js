// Shows when a word was said: for the word under the pointer, or the one selected with the arrow keys.

// Events from keys: `copy` (C) with the `turn` of the selected word; `edit` (Enter) and `hear` (space bar) with the
// word's element as `word`.
export class WordTimes extends EventTarget {
  constructor(captions, tip, announce) {
    super();
    Object.assign(this, { captions, tip, announce });
    this.current = null;
    // The word that the keyboard has selected, until Escape or the loss of the focus. Scrolling moves the words under a
    // resting pointer, so that pointer events do not end the selection.
    this.selected = null;
    captions.addEventListener("pointerover", ({ target }) => this.#show(target.closest(".word")));
    captions.addEventListener("pointerleave", () => this.#show(null));
    captions.addEventListener("keydown", (event) => this.#key(event));
    captions.addEventListener("blur", () => this.#leave());
    addEventListener("scroll", () => this.#show(null), { passive: true });
  }

  // Moves the keyboard focus back to the captions, with this word selected.
  select(word) {
    this.captions.focus({ preventScroll: true });
    this.#show(word);
  }

  #leave() {
    this.selected = null;
    this.#show(null);
  }

  #show(word) {
    this.current?.classList.remove("current");
    this.current = word;
    this.tip.hidden = !word;
    if (!word) return;
    word.classList.add("current");
    this.tip.textContent = word.dataset.time;
    const box = word.getBoundingClientRect();
    const left = box.left + box.width / 2 - this.tip.offsetWidth / 2;
    this.tip.style.left = `${Math.max(8, Math.min(left, innerWidth - this.tip.offsetWidth - 8))}px`;
    this.tip.style.top = `${box.top - this.tip.offsetHeight - 6}px`;
  }

  #key(event) {
    if (event.target !== this.captions) return;
    const words = [...this.captions.querySelectorAll(".word")];
    const at = words.indexOf(this.current);
    const target = {
      ArrowRight: at + 1,
      ArrowLeft: at < 0 ? words.length - 1 : at - 1,
      Home: 0,
      End: words.length - 1,
    }[event.key];
    if (event.key === "Escape") this.#leave();
    const command = { Enter: "edit", " ": "hear" }[event.key];
    if (command && this.current && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      this.dispatchEvent(Object.assign(new Event(command), { word: this.current }));
      return;
    }
    if (event.key === "c" && !event.ctrlKey && !event.metaKey && this.current) {
      this.dispatchEvent(Object.assign(new Event("copy"), { turn: this.current.closest("li").turn }));
    }
    const word = words[target];
    if (!word) return;
    event.preventDefault();
    word.scrollIntoView({ block: "nearest" });
    this.#show((this.selected = word));
    // The scrolling that this causes hides the time; so show it again after the scroll event.
    requestAnimationFrame(() => requestAnimationFrame(() => this.selected === word && this.#show(word)));
    this.announce(`${word.textContent || "removed word"}, ${word.dataset.time}`);
  }
}
