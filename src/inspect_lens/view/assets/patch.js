// A patch sweep that is drawn while its cells come.
const facts = JSON.parse($("page-facts").textContent);
const sweep = { start: null, floor: 0, cells: new Map(), values: [], stop: null };

function layersOf(text) {
  if (text.trim() === "all") return null;
  const found = [];
  for (const part of text.split(",").map((each) => each.trim()).filter(Boolean)) {
    const [, first, last] = /^(\d{1,5})(?:-(\d{1,5}))?$/.exec(part) ?? [];
    if (first === undefined || Number(last ?? first) < Number(first)) throw new Error(`Layers: ${part}; write numbers, such as 0, 4-7`);
    for (let n = Number(first); n <= Number(last ?? first); n++) found.push(n);
  }
  return found.length ? found : null;
}

function asked() {
  const body = { align: $("align").value, source: $("source").value, sites: [$("site").value.trim()] };
  for (const name of ["clean", "corrupted", "answer"]) {
    if (!$(name).value) throw new Error(`${$(name).dataset.name}: is empty`);
    body[name] = $(name).value;
  }
  if ($("foil").value) body.foil = $("foil").value;
  const layers = layersOf($("layers").value);
  return layers ? { ...body, layers } : body;
}

function metricOf({ logprob, foil_logprob: foil }) {
  return foil === null ? logprob : logprob - foil;
}

function begin(event) {
  Object.assign(sweep, { start: event, floor: 0, values: [] });
  sweep.cells.clear();
  const table = element("table"), head = element("tr");
  head.append(element("th", "", "layer"));
  for (const at of event.positions) {
    const cell = element("th", "token");
    cell.scope = "col";
    cell.title = `position ${at}`;
    writeText(cell, event.tokens[at]);
    head.append(cell);
  }
  table.append(element("thead"), element("tbody"));
  table.tHead.append(head);
  for (const layer of [...event.layers].reverse()) {
    const row = element("tr"), name = element("th", "", String(layer));
    name.scope = "row";
    row.append(name);
    for (const at of event.positions) {
      const cell = element("td");
      sweep.cells.set(`${layer} ${at}`, cell);
      row.append(cell);
    }
    table.tBodies[0].append(row);
  }
  $("map").replaceChildren(table);
  tell();
}

function draw({ layer, position, value, recovered }) {
  const cell = sweep.cells.get(`${layer} ${position}`);
  const moved = Math.abs(value - metricOf(sweep.start.corrupted)) > sweep.floor;
  const part = recovered === null ? 0 : Math.max(-1, Math.min(1, recovered));
  cell.className = !moved ? "floor" : part > 0 ? "w" : "c";
  cell.style.setProperty("--a", Math.abs(part).toFixed(3));
  cell.textContent = recovered === null ? "–" : recovered.toFixed(2);
  cell.title = `layer ${layer}, ${JSON.stringify(sweep.start.tokens[position])} at ${position}: ${sweep.start.metric} `
    + `${number(value)}, recovered ${recovered === null ? "–" : recovered.toFixed(3)}${moved ? "" : ", within the noise"}`;
}

function tell() {
  const { metric, clean, corrupted, cells } = sweep.start;
  $("told").textContent = `${metric}: clean ${number(metricOf(clean))}, corrupted ${number(metricOf(corrupted))}, `
    + `noise ${number(sweep.floor)}; ${sweep.values.length} of ${cells} cells`;
}

const takes = {
  start: begin,
  floor: (event) => { sweep.floor = event.floor; sweep.values.forEach(draw); tell(); },
  cell: (event) => { sweep.values.push(event); draw(event); tell(); },
  end: () => { sweep.done = true; },
  error: (event) => { sweep.done = true; complain(event.message); },
};

function busy(is) {
  $("start").hidden = is;
  $("stop").hidden = !is;
}

async function run() {
  complain("");
  sweep.stop = new AbortController();
  sweep.done = false;
  busy(true);
  try {
    for await (const event of ask("sweep", asked(), sweep.stop.signal)) takes[event.event](event);
    if (!sweep.done) throw new Error("the sweep broke off: the program that serves this page has ended");
  } catch (error) {
    complain(sweep.stop.signal.aborted ? "stopped by you; the server has ended the sweep" : error.message);
  }
  busy(false);
  document.documentElement.dataset.sweeps = String(Number(document.documentElement.dataset.sweeps ?? 0) + 1);
}

$("model").textContent = facts.model;
$("where").textContent = facts.server;
wearTheme(firstTheme());
$("theme").addEventListener("click", () => wearTheme(otherTheme()));
$("stop").addEventListener("click", () => sweep.stop.abort());
$("asking").addEventListener("submit", (event) => { event.preventDefault(); if (!$("start").hidden) run(); });
