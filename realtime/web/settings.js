// The settings dialog and the theme button.

import { fileSize } from "./format.js";
import { TAB, TAB_AND_MICROPHONE, listMicrophones } from "./microphone.js";
import { MOST_BYTES } from "./sounds.js";
import { canShareSound } from "./tab-sound.js";

// Languages of Whisper for which Chromium has no name.
const UNNAMED = { ba: "Bashkir", bo: "Tibetan" };
const $ = (id) => document.getElementById(id);

export function connectSettings(preferences, sounds, onTheme) {
  const { choices } = preferences;
  $("key").value = preferences.key;
  $("pace").value = choices.realTime ? "real" : "whole";
  $("size").value = choices.size;
  $("announce").checked = choices.announce;
  $("eagerness").value = choices.eagerness;
  $("keywords").value = choices.keywords;
  $("speakers").checked = choices.speakers;

  $("keep-sound").checked = choices.keepSound;
  $("sound-bound").textContent = fileSize(MOST_BYTES);
  $("keep-sound").addEventListener("change", async () => {
    preferences.set("keepSound", $("keep-sound").checked);
    await sounds.opened;
    showSound(sounds, choices);
  });
  $("sound-delete").addEventListener("click", async () => {
    if (!confirm("Delete all sound that this browser keeps? The captions stay.")) return;
    await sounds.deleteAll();
    $("keep-sound").focus();
  });
  sounds.addEventListener("changed", () => showSound(sounds, choices));
  sounds.opened.then(() => showSound(sounds, choices));

  $("key").addEventListener("input", () => preferences.setKey($("key").value));
  $("key").addEventListener("change", () => showWishes(preferences));
  $("pace").addEventListener("change", () => preferences.set("realTime", $("pace").value === "real"));
  $("size").addEventListener("input", () => preferences.set("size", Number($("size").value)));
  $("announce").addEventListener("change", () => preferences.set("announce", $("announce").checked));
  $("eagerness").addEventListener("change", () => preferences.set("eagerness", $("eagerness").value));
  $("device").addEventListener("change", () => preferences.set("device", $("device").value));
  $("language").addEventListener("change", () => preferences.set("language", $("language").value));
  $("speakers").addEventListener("change", () => preferences.set("speakers", $("speakers").checked));
  $("keywords").addEventListener("input", () => preferences.set("keywords", $("keywords").value));
  $("open-settings").addEventListener("click", () => {
    $("settings").showModal();
    // A server that was starting when the page came told nothing of its model then.
    if (!preferences.options.length) showWishes(preferences);
  });

  const showTheme = () => {
    $("theme").setAttribute("aria-pressed", String(preferences.dark));
    onTheme();
  };
  $("theme").addEventListener("click", () => {
    preferences.set("theme", preferences.dark ? "light" : "dark");
    showTheme();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
  showTheme();
  showWishes(preferences);
  showSources(preferences);
  navigator.mediaDevices?.addEventListener("devicechange", () => showSources(preferences));

  return {
    open(field) {
      if (!$("settings").open) $("settings").showModal();
      $(field).focus();
    },
    // A browser tells names of devices once one has been opened.
    devicesKnown: () => showSources(preferences),
  };
}

// What is kept can be seen and deleted, also when no more is kept.
function showSound(sounds, { keepSound }) {
  const refused = keepSound && !sounds.works;
  $("sound-box").hidden = !sounds.bytes && !keepSound;
  $("sound-delete").hidden = !sounds.bytes;
  $("sound-size").textContent = refused
    ? "This browser keeps no sound for this page."
    : sounds.bytes ? `${fileSize(sounds.bytes)} of sound are kept in this browser.` : "No sound is kept yet.";
}

async function showSources(preferences) {
  const chosen = $("device").value || preferences.choices.device;
  const options = [new Option("Default microphone", "")];
  for (const device of await listMicrophones()) {
    if (device.deviceId !== "default") options.push(new Option(device.label || "Microphone", device.deviceId));
  }
  if (canShareSound()) {
    options.push(new Option("Sound of a tab or the screen", TAB));
    options.push(new Option("Microphone and sound of a tab", TAB_AND_MICROPHONE));
  }
  $("device").replaceChildren(...options);
  if (options.some((option) => option.value === chosen)) $("device").value = chosen;
}

// Only what the server's model takes can be filled in.
async function showWishes(preferences) {
  await preferences.learn();
  const takes = (name) => preferences.options.includes(name);
  $("language-box").hidden = !takes("language");
  showLanguages(preferences);
  $("keywords-box").hidden = !takes("keywords") && !takes("prompt");
  $("speakers-box").hidden = !takes("speakers");
}

// Those of the server's model. Where it has only one, the list says which.
function showLanguages({ languages, language }) {
  const names = new Intl.DisplayNames(["en"], { type: "language" });
  const options = languages.map((code) => new Option(UNNAMED[code] ?? names.of(code), code));
  options.sort((one, other) => one.text.localeCompare(other.text, "en"));
  if (options.length > 1) options.unshift(new Option("as the model hears it", ""));
  $("language").replaceChildren(...options);
  if (language) $("language").value = language;
}
