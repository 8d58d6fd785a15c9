// Lets others read along: the session is published under a name of its own, and a link for viewers is made. It ends with
// the session, or when the user stops it here.

const NAME_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789";
const NAME_LENGTH = 10;

export class Share {
  // `link()` is the live connection, or null; `key()` the access key; `copy(text, button)` copies.
  constructor({ dialog, begin, made, address, copyButton, stop, problem }, { link, key, copy }) {
    Object.assign(this, { dialog, begin, made, address, problem, link, key });
    this.shared = null;
    begin.addEventListener("click", () => this.#try(() => this.#publish()));
    stop.addEventListener("click", () => this.#try(() => this.#stop()));
    copyButton.addEventListener("click", () => copy(address.value, copyButton));
  }

  open() {
    this.#show("");
    this.dialog.showModal();
  }

  // Whether the session under way is shared.
  get active() {
    return this.shared !== null && this.shared.link === this.link() && this.shared.link.published === this.shared.name;
  }

  async #publish() {
    const link = this.link();
    if (!link) throw new Error("Start listening first.");
    const name = randomName();
    await link.publish(name);
    try {
      const { watch } = await this.#ask(name, { method: "POST" });
      this.shared = { link, name, address: new URL(watch.replace(/^\//, ""), document.baseURI).href };
    } catch (error) {
      // Without a link no viewer could read it, so it is not published either.
      await link.publish(null).catch(() => {});
      throw error;
    }
  }

  async #stop() {
    const { link, name } = this.shared;
    this.shared = null;
    if (!link.over) await link.publish(null);
    await this.#ask(name, { method: "DELETE" });
  }

  async #ask(name, how) {
    const headers = this.key() ? { Authorization: `Bearer ${this.key()}` } : {};
    const answer = await fetch(`v1/sessions/${name}/links`, { ...how, headers, cache: "no-store" }).catch(() => {
      throw new Error("The server could not be reached.");
    });
    const body = await answer.json().catch(() => ({}));
    if (!answer.ok) throw new Error(body.error?.message ?? `The server refused (status ${answer.status}).`);
    return body;
  }

  async #try(action) {
    this.begin.disabled = true;
    let problem = "";
    try {
      await action();
    } catch ({ message }) {
      problem = message;
    }
    this.begin.disabled = false;
    this.#show(problem);
    if (this.active) this.address.select();
  }

  #show(problem) {
    const { active } = this;
    this.begin.hidden = active;
    this.made.hidden = !active;
    this.address.value = active ? this.shared.address : "";
    this.problem.textContent = problem;
  }
}

function randomName() {
  const bytes = crypto.getRandomValues(new Uint8Array(NAME_LENGTH));
  return [...bytes].map((byte) => NAME_LETTERS[byte % NAME_LETTERS.length]).join("");
}
