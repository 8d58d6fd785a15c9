// The settings dialog and the theme button: shows the preferences, and changes them.

import { fileSize } from "./format.js";
import { TAB, TAB_AND_MICROPHONE, listMicrophones } from "./microphone.js";
import { MAX_BYTES } from "./sound-store.js";
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
  $("sound-bound").textContent = fileSize(MAX_BYTES);
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
  $("key").addEventListener("change", () => showModelOptions(preferences));
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
    // A server that was still starting when the page was loaded had no information about its model.
    if (!preferences.options.length) showModelOptions(preferences);
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
  showModelOptions(preferences);
  showSources(preferences);
  navigator.mediaDevices?.addEventListener("devicechange", () => showSources(preferences));

  return {
    open(field) {
      if (!$("settings").open) $("settings").showModal();
      $(field).focus();
    },
    // A browser gives the names of devices only after one has been opened.
    onDeviceOpened: () => showSources(preferences),
  };
}

// Stored sound is listed and can be deleted even after its storing was switched off.
function showSound(sounds, { keepSound }) {
  const unavailable = keepSound && !sounds.available;
  $("sound-box").hidden = !sounds.bytes && !keepSound;
  $("sound-delete").hidden = !sounds.bytes;
  $("sound-size").textContent = unavailable
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

// Only options that the server's model accepts are shown.
async function showModelOptions(preferences) {
  await preferences.loadModelInfo();
  const accepts = (name) => preferences.options.includes(name);
  $("language-box").hidden = !accepts("language");
  showLanguages(preferences);
  $("keywords-box").hidden = !accepts("keywords") && !accepts("prompt");
  $("speakers-box").hidden = !accepts("speakers");
}

// The languages of the server's model. If it has only one, the list shows which.
function showLanguages({ languages, language }) {
  const names = new Intl.DisplayNames(["en"], { type: "language" });
  const options = languages.map((code) => new Option(UNNAMED[code] ?? names.of(code), code));
  options.sort((one, other) => one.text.localeCompare(other.text, "en"));
  if (options.length > 1) options.unshift(new Option("as the model hears it", ""));
  $("language").replaceChildren(...options);
  if (language) $("language").value = language;
}
