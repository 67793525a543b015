// Owns the choice between light, dark and whatever the system prefers.
// Never knows a colour: page.css has them in pairs.

const THEMES = ["auto", "light", "dark"];
const theme = new Kept("localStorage", "chunkserve-theme");

function showTheme() {
  const chosen = THEMES.includes(theme.value) ? theme.value : "auto";
  document.documentElement.dataset.theme = chosen;
  $("theme").textContent = `Colours: ${chosen}`;
  redraw();
}

function nextTheme() {
  const at = THEMES.indexOf(document.documentElement.dataset.theme);
  theme.set(THEMES[(at + 1) % THEMES.length]);
  showTheme();
}
