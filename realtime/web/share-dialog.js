// The dialog for sharing: publishes the session under a random name and shows a link for viewers.
//
// The link ends with the session, or when the user stops sharing here.

// Letters and digits that are not mistaken for each other.
const NAME_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789";
const NAME_LENGTH = 10;

export class ShareDialog {
  // `connection()` returns the live RealtimeConnection or null; `key()` the access key; `copy(text, button)` copies a
  // text.
  constructor({ dialog, begin, made, address, copyButton, stop, problem }, { connection, key, copy }) {
    Object.assign(this, { dialog, begin, made, address, problem, connection, key });
    // `{connection, name, address}` of the published session.
    this.shared = null;
    begin.addEventListener("click", () => this.#run(() => this.#publish()));
    stop.addEventListener("click", () => this.#run(() => this.#stop()));
    copyButton.addEventListener("click", () => copy(address.value, copyButton));
  }

  open() {
    this.#show("");
    this.dialog.showModal();
  }

  // Whether the current session is shared.
  get active() {
    return this.shared !== null && this.shared.connection === this.connection() && this.shared.connection.published === this.shared.name;
  }

  async #publish() {
    const connection = this.connection();
    if (!connection) throw new Error("Start listening first.");
    const name = randomName();
    await connection.publish(name);
    try {
      const { watch } = await this.#requestLinks(name, { method: "POST" });
      this.shared = { connection, name, address: new URL(watch.replace(/^\//, ""), document.baseURI).href };
    } catch (error) {
      // Without a link no viewer could read the session, so it is not published either.
      await connection.publish(null).catch(() => {});
      throw error;
    }
  }

  async #stop() {
    const { connection, name } = this.shared;
    this.shared = null;
    if (!connection.closed) await connection.publish(null);
    await this.#requestLinks(name, { method: "DELETE" });
  }

  async #requestLinks(name, options) {
    const headers = this.key() ? { Authorization: `Bearer ${this.key()}` } : {};
    const answer = await fetch(`v1/sessions/${name}/links`, { ...options, headers, cache: "no-store" }).catch(() => {
      throw new Error("The server could not be reached.");
    });
    const body = await answer.json().catch(() => ({}));
    if (!answer.ok) throw new Error(body.error?.message ?? `The server refused (status ${answer.status}).`);
    return body;
  }

  async #run(action) {
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
