// The settings dialog and the theme button.

const $ = (id) => document.getElementById(id);

export function connectSettings(preferences, onTheme) {
  const { choices } = preferences;
  $("key").value = preferences.key;
  $("pace").value = choices.realTime ? "real" : "fast";
  $("size").value = choices.size;
  $("announce").checked = choices.announce;

  $("key").addEventListener("input", () => preferences.setKey($("key").value));
  $("pace").addEventListener("change", () => preferences.set("realTime", $("pace").value === "real"));
  $("size").addEventListener("input", () => preferences.set("size", Number($("size").value)));
  $("announce").addEventListener("change", () => preferences.set("announce", $("announce").checked));
  $("open-settings").addEventListener("click", () => $("settings").showModal());

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

  return {
    open(field) {
      if (!$("settings").open) $("settings").showModal();
      $(field).focus();
    },
  };
}
