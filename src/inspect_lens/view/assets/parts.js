// What the token page and the chat page share: elements, texts of tokens, tooltip, theme.
const $ = (id) => document.getElementById(id);

function element(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

// Line ends get a sign, so that a coloured one is seen.
function writeText(span, text) {
  if (text === "") { span.append(element("span", "mark", "·")); return; }
  const lines = text.split("\n");
  lines.forEach((line, l) => {
    if (l) span.append(element("span", "mark", "↵"), "\n");
    if (line) span.append(line);
  });
}

// The tooltip, above what it is about where there is room.
function placeTip(span) {
  const tip = $("tip");
  tip.hidden = false;
  const box = span.getClientRects()[0] || span.getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8));
  const above = box.top - tip.offsetHeight - 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : box.bottom + 8}px`;
}

function hideTip() { $("tip").hidden = true; }

function wearTheme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "☀" : "☾";
}

// Only a choice is kept, so that a page whose reader has made none follows the system.
function otherTheme() {
  const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("inspect-lens-theme", name); } catch { /* private windows */ }
  return name;
}

function firstTheme() {
  let theme = null;
  try { theme = localStorage.getItem("inspect-lens-theme"); } catch { /* private windows */ }
  return theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}
