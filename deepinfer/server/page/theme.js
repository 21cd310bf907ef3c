// Colours: as the system has them, or one of both always, for this tab.

import { tab } from "./api.js";
import { byId } from "./dom.js";

const STORE = "deepinfer.theme";
const THEMES = ["system", "light", "dark"];

export function nextTheme() {
  const now = document.documentElement.dataset.theme ?? "system";
  setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
}

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").setAttribute("aria-label", `Colours: ${theme === "system" ? "as the system" : theme}`);
  byId("theme").title = byId("theme").getAttribute("aria-label");
  tab.set(STORE, theme === "system" ? "" : theme);
}

export function restoreTheme() {
  setTheme(tab.get(STORE) ?? "system");
}
