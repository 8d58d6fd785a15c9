// The user's settings of this page. The access key stays in this tab; the rest stays in this browser.

const KEY = "tickertape.key";
const CHOICES = "tickertape.choices";
const DEFAULTS = {
  theme: "", size: 1, overlay: 5, announce: true, realTime: false, device: "", eagerness: "", language: "", keywords: "",
  speakers: true, keepSound: false,
};
// What may be chosen, beside the type of the default.
const MOST_LETTERS = 20_000;
const ALLOWED = {
  theme: (value) => ["", "dark", "light"].includes(value),
  size: (value) => value >= 0.5 && value <= 2,
  overlay: (value) => value >= 1 && value <= 20,
  eagerness: (value) => ["", "low", "medium", "high"].includes(value),
};

export class Preferences {
  constructor() {
    this.key = read(() => sessionStorage.getItem(KEY)) ?? "";
    const { known, unreadable } = readChoices(read(() => localStorage.getItem(CHOICES)) ?? null);
    this.choices = { ...DEFAULTS, ...known };
    // Something that was kept cannot be read. It is replaced now, so that this is told once.
    this.unreadable = unreadable;
    if (unreadable) this.#keep();
    // What the server's model can be told: some of language, keywords, prompt, speakers.
    this.options = [];
    // Codes of the languages that it has.
    this.languages = [];
    // Whether the server lets viewers read along.
    this.sharing = false;
    this.apply();
  }

  setKey(key) {
    this.key = key.trim();
    read(() => sessionStorage.setItem(KEY, this.key));
  }

  set(name, value) {
    this.choices[name] = value;
    this.#keep();
    this.apply();
  }

  #keep() {
    read(() => localStorage.setItem(CHOICES, JSON.stringify(this.choices)));
  }

  // Asks the server what its model can be told. One that is starting does not know yet.
  async learn() {
    try {
      const headers = this.key ? { Authorization: `Bearer ${this.key}` } : {};
      const models = await (await fetch("v1/models", { headers })).json();
      ({ options: this.options, languages: this.languages } = models.data[0]);
    } catch {
      this.options = this.languages = [];
    }
    try {
      this.sharing = (await (await fetch("capacity")).json()).viewers_total > 0;
    } catch {
      this.sharing = false;
    }
  }

  // The chosen language if there is a choice and the server's model has it; empty: as the model hears it.
  get language() {
    const { language } = this.choices;
    return this.languages.length > 1 && this.languages.includes(language) ? language : "";
  }

  // Language and words to expect, as far as the server's model takes them. A model without keywords may take a prompt.
  get wishes() {
    const { language, keywords } = this.#taken;
    return { ...(language && { language }), ...keywords };
  }

  // Whether to ask who speaks.
  get speakers() {
    return this.choices.speakers && this.options.includes("speakers");
  }

  // How the server ends turns of a live session; undefined: by its default, the length of the pause.
  get turnDetection() {
    const { eagerness } = this.choices;
    return eagerness ? { type: "semantic_vad", eagerness } : undefined;
  }

  get #taken() {
    const words = this.choices.keywords.split(/[,\n]/).map((word) => word.trim()).filter(Boolean);
    const takes = (name) => this.options.includes(name);
    const language = takes("language") ? this.language : "";
    if (!words.length) return { language, keywords: {} };
    if (takes("keywords")) return { language, keywords: { keywords: words } };
    return { language, keywords: takes("prompt") ? { prompt: words.join(", ") } : {} };
  }

  // The theme on the screen, chosen or not.
  get dark() {
    return this.choices.theme ? this.choices.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  apply() {
    const root = document.documentElement;
    if (this.choices.theme) root.dataset.theme = this.choices.theme;
    root.style.setProperty("--caption-scale", this.choices.size);
  }
}

// The choices that a kept text has, and whether it has some that cannot be read. Those of other versions are left out.
function readChoices(text) {
  const found = text === null ? null : read(() => JSON.parse(text));
  if (found === null) return { known: {}, unreadable: false };
  if (typeof found !== "object" || Array.isArray(found)) return { known: {}, unreadable: true };
  const ours = Object.entries(found).filter(([name]) => Object.hasOwn(DEFAULTS, name));
  const known = ours.filter(([name, value]) => isChoice(name, value));
  return { known: Object.fromEntries(known), unreadable: known.length < ours.length };
}

function isChoice(name, value) {
  if (typeof value !== typeof DEFAULTS[name] || value.length > MOST_LETTERS) return false;
  return ALLOWED[name]?.(value) ?? true;
}

// Storage may be switched off; the page then forgets, and works.
function read(action) {
  try {
    return action();
  } catch {
    return undefined;
  }
}
