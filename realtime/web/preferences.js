// The user's preferences, stored in the browser, and what the server's model offers.
//
// The access key is in the tab's session storage; all other choices are in the browser's local storage.

const KEY = "tickertape.key";
const CHOICES = "tickertape.choices";
const DEFAULTS = {
  theme: "", size: 1, overlay: 5, announce: true, realTime: false, device: "", eagerness: "", language: "", keywords: "",
  speakers: true, keepSound: false,
};
// Stored values that are longer, or that fail the check of ALLOWED, are unreadable. A value must also have the type of
// its default.
const MAX_CHARACTERS = 20_000;
const ALLOWED = {
  theme: (value) => ["", "dark", "light"].includes(value),
  size: (value) => value >= 0.5 && value <= 2,
  overlay: (value) => value >= 1 && value <= 20,
  eagerness: (value) => ["", "low", "medium", "high"].includes(value),
};

export class Preferences {
  constructor() {
    this.key = tryStorage(() => sessionStorage.getItem(KEY)) ?? "";
    const { stored, unreadable } = readChoices(tryStorage(() => localStorage.getItem(CHOICES)) ?? null);
    this.choices = { ...DEFAULTS, ...stored };
    // True if a stored choice is unreadable. It is overwritten now, so that this is reported once.
    this.unreadable = unreadable;
    if (unreadable) this.#store();
    // The options that the server's model accepts: some of language, keywords, prompt, speakers.
    this.options = [];
    // Codes of the model's languages.
    this.languages = [];
    // Whether the server lets sessions be published for viewers.
    this.sharing = false;
    this.apply();
  }

  setKey(key) {
    this.key = key.trim();
    tryStorage(() => sessionStorage.setItem(KEY, this.key));
  }

  set(name, value) {
    this.choices[name] = value;
    this.#store();
    this.apply();
  }

  #store() {
    tryStorage(() => localStorage.setItem(CHOICES, JSON.stringify(this.choices)));
  }

  // Asks the server for its model's options and languages. A server that is still starting answers with an error.
  async loadModelInfo() {
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

  // The chosen language if the server's model has it and others; empty: the model detects it.
  get language() {
    const { language } = this.choices;
    return this.languages.length > 1 && this.languages.includes(language) ? language : "";
  }

  // The fields of a request for the model: language and keywords, if it accepts them. The keywords of a model without
  // that option become its prompt.
  get modelOptions() {
    const words = this.choices.keywords.split(/[,\n]/).map((word) => word.trim()).filter(Boolean);
    const accepts = (name) => this.options.includes(name);
    const language = accepts("language") ? this.language : "";
    const fields = language ? { language } : {};
    if (!words.length) return fields;
    if (accepts("keywords")) return { ...fields, keywords: words };
    return accepts("prompt") ? { ...fields, prompt: words.join(", ") } : fields;
  }

  // Whether to request speaker labels.
  get speakers() {
    return this.choices.speakers && this.options.includes("speakers");
  }

  // The turn detection to request for a live session; undefined: the server's default.
  get turnDetection() {
    const { eagerness } = this.choices;
    return eagerness ? { type: "semantic_vad", eagerness } : undefined;
  }

  // Whether the page is shown in the dark theme, chosen by the user or by the system.
  get dark() {
    return this.choices.theme ? this.choices.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  apply() {
    const root = document.documentElement;
    if (this.choices.theme) root.dataset.theme = this.choices.theme;
    root.style.setProperty("--caption-scale", this.choices.size);
  }
}

// The readable choices in a stored text, and whether it has unreadable ones. Choices that only other versions of the
// page have are ignored.
function readChoices(text) {
  const parsed = text === null ? null : tryStorage(() => JSON.parse(text));
  if (parsed === null) return { stored: {}, unreadable: false };
  if (typeof parsed !== "object" || Array.isArray(parsed)) return { stored: {}, unreadable: true };
  const current = Object.entries(parsed).filter(([name]) => Object.hasOwn(DEFAULTS, name));
  const readable = current.filter(([name, value]) => isChoice(name, value));
  return { stored: Object.fromEntries(readable), unreadable: readable.length < current.length };
}

function isChoice(name, value) {
  if (typeof value !== typeof DEFAULTS[name] || value.length > MAX_CHARACTERS) return false;
  return ALLOWED[name]?.(value) ?? true;
}

// Storage may be disabled. The page then works without it.
function tryStorage(action) {
  try {
    return action();
  } catch {
    return undefined;
  }
}
