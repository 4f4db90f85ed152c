// What the page shows now, and what keys, mouse and address change in it.
const state = { series: 0, threshold: 0, all: false, open: null, turn: 0, cursor: -1 };

function options(select, pairs) {
  select.replaceChildren(...pairs.map(([value, text]) => new Option(text, value)));
}

const probes = [...new Set(series.map((s) => s.probe))];

function chooseSeries(index, keep) {
  state.series = index;
  const s = series[index];
  $("probe").value = s.probe;
  const layers = series.map((other, k) => [k, other]).filter(([, other]) => other.probe === s.probe);
  options($("layer"), layers.map(([k, other]) => [
    k, other.layer === null ? (other.layers.length > 1 ? `mean of ${other.layers.join(", ")}` : other.layers[0]) : other.layer,
  ]));
  $("layer").value = index;
  $("beside").hidden = !s.beside.length;
  $("beside").querySelector("ul").replaceChildren(...s.beside.map((text) => element("li", "", text)));
  setThreshold(keep ?? ownThreshold(s).value);
}

function setThreshold(value) {
  if (!Number.isFinite(value)) return;
  state.threshold = value;
  const s = series[state.series], [low, high] = sliderEnds(s), own = ownThreshold(s);
  $("threshold").value = Math.round(((value - low) / (high - low)) * 1000);
  $("threshold").setAttribute("aria-valuetext", number(value));
  $("threshold-text").value = number(value);
  $("threshold-reset").disabled = value === own.value;
  $("threshold-reset").textContent = own.from === "card" ? "card" : "median";
  $("threshold-reset").title = own.from === "card"
    ? `Back to the card's threshold ${number(own.value)} (false positive rate ${s.fpr}). ${s.finds}`
    : "Back to the median token: the card has no threshold for this";
  const span = reach(s, value);
  $("legend-low").textContent = number(value - span);
  $("legend-mid").textContent = number(value);
  $("legend-high").textContent = number(value + span);
  refreshList();
  if (state.open) { repaint(); drawStrip(); drawFacts(); writeHash(); }
}

async function openSample(index, after) {
  list.selected = index;
  document.body.classList.remove("open");
  $("drawer").setAttribute("aria-expanded", "false");
  showRow(index);
  const open = await openBlock(index);
  if (list.selected !== index) return; // another one was opened meanwhile
  state.open = open;
  state.cursor = -1;
  hideTip();
  drawFacts();
  drawTalk();
  drawTurnList();
  $("main").scrollTop = 0;
  let made = open.turns.findIndex((turn) => turn.made && summary(open, turn).n > 0);
  if (made < 0) made = open.turns.findIndex((turn) => turn.made);
  setTurn(Math.max(0, made), false);
  drawStrip();
  writeHash();
  document.documentElement.dataset.ready = String(index);
  if (after) after();
}

function drawFacts() {
  const s = samples[list.selected], box = element("div", "scores"), head = element("h2");
  head.append(element("span", "", s.epoch > 1 ? `${s.id} · epoch ${s.epoch}` : s.id));
  head.append(...labelChip(s));
  head.append(valueMark(s.values[state.series], verdict(s)));
  const add = (name, value) => {
    const cell = element("div", "", `${name} `);
    cell.append(element("b", "", number(value)));
    box.append(cell);
  };
  facts.columns.forEach((name, c) => { if (s.scores[c] !== null) add(name, s.scores[c]); });
  if (s.target) add("target", s.target);
  add("tokens", s.tokens);
  if (s.calls > 1) add("calls", s.calls);
  if (s.origin) {
    add("token scores", s.origin);
    box.lastChild.classList.add("origin");
    box.lastChild.title = "The activations of this sample are not on the machine that made this page; see the notes.";
  }
  $("facts").replaceChildren(head, box);
}

function drawTurnList() {
  const made = state.open.turns.map((turn, t) => {
    const item = element("li"), button = element("button", "quiet", turn.role);
    button.addEventListener("click", () => setTurn(t, true));
    item.append(button);
    return item;
  });
  $("turn-list").replaceChildren(...made);
}

function setTurn(t, scroll) {
  const turns = state.open.turns;
  if (!turns.length) return;
  state.turn = Math.max(0, Math.min(turns.length - 1, t));
  turns.forEach((_, k) => {
    $(`turn-${k}`).classList.toggle("now", k === state.turn);
    $("turn-list").children[k].firstChild.setAttribute("aria-current", String(k === state.turn));
  });
  if (scroll) {
    $(`turn-${state.turn}`).scrollIntoView({ block: "start" });
    $("turn-list").children[state.turn].scrollIntoView({ block: "nearest", inline: "nearest" });
    $("said").textContent = `turn ${state.turn + 1} of ${turns.length}, ${turns[state.turn].role}`;
  }
  $("turn-back").disabled = state.turn === 0;
  $("turn-next").disabled = state.turn === turns.length - 1;
  drawStrip();
}

function setCursor(i) {
  const before = state.cursor;
  state.cursor = i;
  if (before >= 0 && talk.spans[before]) paint(talk.spans[before], before);
  if (i < 0) { hideTip(); drawStrip(); writeHash(); return; }
  const span = spanOf(i);
  if (!span) return;
  paint(span, i);
  span.scrollIntoView({ block: "center" });
  showTip(i, span);
  const t = state.open.turns.findIndex((turn) => turn.start <= i && i < turn.stop);
  if (t >= 0 && t !== state.turn) setTurn(t, false);
  drawStrip();
  const value = state.open.scores[state.series][i];
  $("said").textContent = `${shown(textOf(state.open.token[i]))}, score ${number(value)}`;
  writeHash();
}

function stepHot(by) {
  const scores = state.open.scores[state.series], n = state.open.n;
  let i = state.cursor >= 0 ? state.cursor : by > 0 ? -1 : n;
  for (i += by; i >= 0 && i < n; i += by) if (counts(state.open, i) && scores[i] > state.threshold) { setCursor(i); return; }
  $("said").textContent = "no further token above the threshold";
}

function writeHash() {
  const parts = { s: list.selected, k: state.series, t: +state.threshold.toPrecision(6) };
  if (state.cursor >= 0) parts.i = state.cursor;
  const text = "#" + new URLSearchParams(parts);
  try { history.replaceState(null, "", text); } catch { /* an embedded page may not */ }
}

function readHash() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const get = (key) => (asked.has(key) ? Number(asked.get(key)) : null);
  const within = (value, n) => (Number.isInteger(value) && value >= 0 && value < n ? value : null);
  return { s: within(get("s"), samples.length), k: within(get("k"), series.length), t: get("t"), i: get("i") };
}

function setTheme(name) {
  wearTheme(name);
  if (state.open) drawStrip();
}

function wireControls() {
  $("search").addEventListener("input", refreshList);
  $("filter").addEventListener("change", refreshList);
  $("sort").addEventListener("change", refreshList);
  $("list").addEventListener("scroll", drawRows, { passive: true });
  $("probe").addEventListener("change", () => chooseSeries(series.findIndex((s) => s.probe === $("probe").value)));
  $("layer").addEventListener("change", () => chooseSeries(+$("layer").value));
  $("threshold").addEventListener("input", () => {
    const [low, high] = sliderEnds(series[state.series]);
    setThreshold(low + (+$("threshold").value / 1000) * (high - low));
  });
  $("threshold-text").addEventListener("change", () => setThreshold(parseFloat($("threshold-text").value)));
  $("threshold-reset").addEventListener("click", () => setThreshold(ownThreshold(series[state.series]).value));
  $("all-tokens").addEventListener("change", () => {
    state.all = $("all-tokens").checked;
    if (state.open) { repaint(); drawStrip(); }
  });
  $("turn-back").addEventListener("click", () => setTurn(state.turn - 1, true));
  $("turn-next").addEventListener("click", () => setTurn(state.turn + 1, true));
  $("hot-back").addEventListener("click", () => stepHot(-1));
  $("hot-next").addEventListener("click", () => stepHot(1));
  $("theme").addEventListener("click", () => setTheme(otherTheme()));
  $("help-open").addEventListener("click", () => $("help").showModal());
  $("notes-open").addEventListener("click", () => $("help").showModal());
  $("drawer").addEventListener("click", () => {
    const open = document.body.classList.toggle("open");
    $("drawer").setAttribute("aria-expanded", String(open));
    drawRows();
  });
  $("main").addEventListener("click", () => document.body.classList.remove("open"));
  $("curve").addEventListener("click", (event) => state.open && state.open.n && setCursor(tokenAt(event)));
  addEventListener("resize", () => { drawRows(); if (state.open) drawStrip(); });
}

function wireTokens() {
  const tokenOf = (event) => event.target.closest("[data-i]");
  $("talk").addEventListener("mouseover", (event) => {
    const span = tokenOf(event);
    if (span) showTip(+span.dataset.i, span);
  });
  $("talk").addEventListener("mouseleave", () => { if (state.cursor < 0) hideTip(); });
  $("talk").addEventListener("click", (event) => {
    const span = tokenOf(event);
    if (span) setCursor(+span.dataset.i === state.cursor ? -1 : +span.dataset.i);
  });
  $("main").addEventListener("scroll", () => {
    const span = state.cursor >= 0 ? talk.spans[state.cursor] : null;
    if (span) showTip(state.cursor, span);
    else hideTip();
  }, { passive: true });
}

const keys = {
  j: () => stepSample(1), k: () => stepSample(-1),
  "]": () => setTurn(state.turn + 1, true), "[": () => setTurn(state.turn - 1, true),
  n: () => stepHot(1), p: () => stepHot(-1),
  ArrowRight: () => state.open.n && setCursor(Math.min(state.open.n - 1, state.cursor + 1)),
  ArrowLeft: () => state.open.n && setCursor(Math.max(0, state.cursor - 1)),
  "+": () => nudge(1), "=": () => nudge(1), "-": () => nudge(-1),
  "/": () => $("search").focus(), d: () => $("theme").click(), "?": () => $("help").showModal(),
  Escape: () => { setCursor(-1); document.body.classList.remove("open"); },
};

function nudge(by) {
  const [low, high] = sliderEnds(series[state.series]);
  setThreshold(state.threshold + (by * (high - low)) / 100);
}

function wireKeys() {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
    const writing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (writing) { if (event.key === "Escape") event.target.blur(); return; }
    const inList = event.target === $("list");
    const key = inList && event.key === "ArrowDown" ? "j" : inList && event.key === "ArrowUp" ? "k" : event.key;
    if (!keys[key] || !state.open) return;
    event.preventDefault();
    keys[key]();
  });
}

// The sample that is looked for first; the first one where none has a score.
function highestSample() {
  const of = (key) => (i) => samples[i][key][state.series];
  const highest = (value) => samples.map((_, i) => i).filter((i) => value(i) !== null)
    .reduce((best, i) => (best === null || value(i) > value(best) ? i : best), null);
  return highest(of("values")) ?? highest(of("top")) ?? 0;
}

function begin() {
  const { task, model, name, created } = facts.log;
  $("task").textContent = task;
  $("where").textContent = `${model} · ${created.slice(0, 16).replace("T", " ")} · ${name}`;
  $("where").title = $("where").textContent;
  const notes = facts.notes.length ? facts.notes : ["None."];
  $("notes").replaceChildren(...notes.map((text) => element("li", "", text)));
  $("notes-open").hidden = !facts.notes.length;
  $("notes-open").textContent = `${facts.notes.length} note${facts.notes.length > 1 ? "s" : ""}`;
  options($("probe"), probes.map((probe) => [probe, probe]));
  options($("filter"), Object.entries(filters).map(([key, [text]]) => [key, text]));
  options($("sort"), Object.entries(sortings()).map(([key, [text]]) => [key, text]));
  setTheme(firstTheme());
  wireControls();
  wireTokens();
  wireKeys();
  const asked = readHash();
  chooseSeries(asked.k ?? 0, asked.t ?? undefined);
  if (samples.length) {
    const first = asked.s ?? highestSample();
    openSample(first, () => asked.i !== null && asked.i < state.open.n && setCursor(asked.i));
  } else $("talk").append(element("p", "empty", "The log has no samples."));
}

begin();
