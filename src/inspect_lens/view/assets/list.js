// The list of samples: filter, sort, and rows only where they are seen.
const ROW = 66;
const list = { order: [], selected: -1 };

function verdict(sample) {
  const value = sample.values[state.series];
  return value === null ? null : value > state.threshold;
}

function labelOf(sample) {
  if (sample.label === true || sample.label === 1) return 1;
  if (sample.label === false || sample.label === 0) return 0;
  return null;
}

function labelChip(sample) {
  const label = labelOf(sample);
  if (label !== null) return [element("span", isOdd(sample) ? "chip odd" : "chip", `label ${label}`)];
  return sample.label === null ? [] : [element("span", "chip", String(sample.label))];
}

const filters = {
  all: ["all samples", () => true],
  positive: ["label 1", (s) => labelOf(s) === 1],
  negative: ["label 0", (s) => labelOf(s) === 0],
  above: ["above threshold", (s) => verdict(s) === true],
  below: ["below threshold", (s) => verdict(s) === false],
  odd: ["probe and label differ", (s) => isOdd(s)],
};

function isOdd(sample) {
  const said = verdict(sample), label = labelOf(sample);
  return said !== null && label !== null && said !== (label === 1);
}

function sortings() {
  const made = {
    log: ["order of the log", (i) => i, 1],
    high: ["probe, highest first", (i) => samples[i].values[state.series], -1],
    low: ["probe, lowest first", (i) => samples[i].values[state.series], 1],
    top: ["highest token first", (i) => samples[i].top[state.series], -1],
    tokens: ["longest first", (i) => samples[i].tokens, -1],
    id: ["id", (i) => samples[i].id, 1],
  };
  facts.columns.forEach((name, c) => {
    made[`c${c}`] = [`score ${name}`, (i) => samples[i].scores[c], -1];
  });
  return made;
}

function compare(a, b, sign) {
  const none = (v) => v === null || v === undefined;
  if (none(a) || none(b)) return none(a) - none(b); // what has no value comes last, whatever the order
  if (typeof a === "number" && typeof b === "number") return sign * (a - b);
  return sign * String(a).localeCompare(String(b), undefined, { numeric: true });
}

function refreshList() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const [, keep] = filters[$("filter").value];
  const [, key, sign] = sortings()[$("sort").value];
  list.order = samples.map((_, i) => i).filter((i) => {
    const s = samples[i];
    if (!keep(s)) return false;
    const text = `${s.id} ${s.target} ${s.text} ${s.label}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  list.order.sort((a, b) => compare(key(a), key(b), sign) || a - b);
  const above = samples.filter((s) => verdict(s) === true).length;
  $("count").textContent =
    `${list.order.length} of ${samples.length} samples · ${above} above the threshold`;
  $("rows").style.height = `${list.order.length * ROW}px`;
  drawRows();
}

function drawRows() {
  const box = $("list"), first = Math.max(0, Math.floor(box.scrollTop / ROW) - 4);
  const last = Math.min(list.order.length, first + Math.ceil((box.clientHeight || 800) / ROW) + 8);
  const rows = [];
  for (let at = first; at < last; at++) rows.push(makeRow(at));
  $("rows").replaceChildren(...rows);
  box.setAttribute("aria-activedescendant", list.selected >= 0 ? `row-${list.selected}` : "");
}

function makeRow(at) {
  const index = list.order[at], s = samples[index], said = verdict(s);
  const row = element("div", "row");
  row.id = `row-${index}`;
  row.style.top = `${at * ROW}px`;
  row.setAttribute("role", "option");
  row.setAttribute("aria-selected", String(index === list.selected));
  const first = element("div", "first");
  first.append(element("span", "id", s.epoch > 1 ? `${s.id} · epoch ${s.epoch}` : s.id));
  first.append(...labelChip(s));
  first.append(valueMark(s.values[state.series], said));
  row.append(first, element("div", "text", s.text.replace("\n", "  →  ")));
  row.addEventListener("click", () => openSample(index));
  return row;
}

// A score with a sign that does without colour.
function valueMark(value, said) {
  const name = said === null ? "value none" : said ? "value above" : "value below";
  const mark = element("span", name, said === null ? "–" : `${said ? "▲" : "▽"} ${number(value)}`);
  mark.title = said === null ? "no pooled score" : said ? "above the threshold" : "not above the threshold";
  return mark;
}

function showRow(index) {
  const at = list.order.indexOf(index), box = $("list");
  if (at >= 0) {
    const top = at * ROW;
    if (top < box.scrollTop) box.scrollTop = top;
    else if (top + ROW > box.scrollTop + box.clientHeight) box.scrollTop = top + ROW - box.clientHeight;
  }
  drawRows();
}

function stepSample(by) {
  const at = list.order.indexOf(list.selected);
  const next = list.order[at < 0 ? 0 : Math.max(0, Math.min(list.order.length - 1, at + by))];
  if (next !== undefined && next !== list.selected) openSample(next);
}
