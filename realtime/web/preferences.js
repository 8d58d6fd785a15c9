// What somebody has chosen for this page. The access key stays in this tab; the rest stays in this browser.

const KEY = "tickertape.key";
const CHOICES = "tickertape.choices";
const DEFAULTS = { theme: "", size: 1, announce: true, realTime: true, device: "" };

export class Preferences {
  constructor() {
    this.key = read(() => sessionStorage.getItem(KEY)) ?? "";
    const stored = read(() => JSON.parse(localStorage.getItem(CHOICES)));
    this.choices = { ...DEFAULTS, ...stored };
    this.apply();
  }

  setKey(key) {
    this.key = key.trim();
    read(() => sessionStorage.setItem(KEY, this.key));
  }

  set(name, value) {
    this.choices[name] = value;
    read(() => localStorage.setItem(CHOICES, JSON.stringify(this.choices)));
    this.apply();
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

// Storage may be switched off; the page then forgets, and works.
function read(action) {
  try {
    return action();
  } catch {
    return undefined;
  }
}
