// A chat whose tokens have the colour of their score.
const facts = JSON.parse($("page-facts").textContent);
const chat = { turns: [], threshold: facts.threshold, own: facts.threshold, scale: facts.scale, stop: null };
// Ends of the slider; the field beside it takes any number.
const widest = 4 * Math.max(1, Math.abs(facts.scale));

// All scores so far, as scale.js knows a series.
function seen() {
  const all = chat.turns.flatMap((turn) => turn.scores).filter((v) => v !== null);
  const low = Math.min(...all, chat.own - 1), high = Math.max(...all, chat.own + 1);
  return { low, high, q02: low, q98: high, median: chat.own, threshold: chat.own };
}

function setThreshold(value) {
  if (!Number.isFinite(value)) return;
  chat.threshold = value;
  const s = seen(), [low, high] = sliderEnds(s), span = reach(s, value);
  $("threshold").value = Math.round(((value - low) / (high - low)) * 1000);
  $("threshold").setAttribute("aria-valuetext", number(value));
  $("threshold-text").value = number(value);
  $("threshold-reset").disabled = value === chat.own;
  $("legend-low").textContent = number(value - span);
  $("legend-mid").textContent = number(value);
  $("legend-high").textContent = number(value + span);
  chat.turns.forEach((turn) => { turn.spans.forEach((_, i) => paint(turn, i)); drawWho(turn); });
}

function setScale(value) {
  if (!Number.isFinite(value)) value = chat.scale;
  chat.scale = value;
  $("scale").value = Math.round((value / widest) * 1000);
  $("scale").setAttribute("aria-valuetext", value ? number(value) : "off");
  $("scale-text").value = number(value);
  $("scale-off").disabled = value === 0;
}

function paint(turn, i) {
  const span = turn.spans[i], value = turn.scores[i] ?? null;
  if (value === null) { span.className = "t u"; return; }
  const part = share(value, chat.threshold, reach(seen(), chat.threshold));
  span.style.setProperty("--a", Math.abs(part).toFixed(3));
  span.className = value > chat.threshold ? "t w" : "t c";
}

function addTurn(role, text) {
  const turn = { role, text, tokens: [], spans: [], scores: [], lens: null, pooled: null };
  turn.box = element("section", role === "assistant" ? "turn made" : "turn");
  turn.who = element("div", "who");
  turn.said = element("div", "said", role === "assistant" ? undefined : text);
  if (role === "assistant") {
    turn.said.setAttribute("role", "group");
    turn.said.setAttribute("aria-label", "Answer, token by token");
  }
  turn.box.append(turn.who, turn.said);
  chat.turns.push(turn);
  $("talk").append(turn.box);
  drawWho(turn);
  return turn;
}

function drawWho(turn) {
  turn.who.replaceChildren(element("b", "", turn.role));
  if (turn.role !== "assistant") return;
  const add = (text, name) => turn.who.append(element("span", name ?? "line", text));
  add(`${turn.tokens.length} token${turn.tokens.length === 1 ? "" : "s"}`);
  const known = turn.scores.filter((v) => v !== null);
  if (known.length) {
    const above = known.filter((v) => v > chat.threshold).length;
    const { score = null, aggregate } = turn.pooled ?? {};
    add(score === null ? `max ${number(Math.max(...known))}` : `${aggregate} ${number(score)}`);
    add(`${above} above`, above ? "line warm" : "line");
  }
  if (turn.steered) add(`steered × ${number(turn.steered.scale)} at layer ${turn.steered.layers.join(", ")}`);
  if (turn.ended) add(turn.ended);
}

function addTokens(turn, event) {
  turn.text += event.text;
  for (const token of event.tokens) {
    const span = element("span", "t u"), i = turn.tokens.length;
    span.dataset.i = i;
    span.tabIndex = i ? -1 : 0;
    writeText(span, token.text);
    turn.tokens.push(token);
    turn.spans.push(span);
    turn.said.append(span);
    if (i < turn.scores.length) paint(turn, i);
  }
}

function addScores(turn, scores) {
  const before = seen(), first = turn.scores.length;
  turn.scores.push(...scores);
  const after = seen();
  if (before.low !== after.low || before.high !== after.high) setThreshold(chat.threshold);
  else for (let i = first; i < Math.min(turn.scores.length, turn.spans.length); i++) paint(turn, i);
}

const endings = { length: "cut off at the limit", error: "broke off", stopped: "stopped by you" };

const takes = {
  tokens: addTokens,
  scores: (turn, event) => addScores(turn, event.scores),
  lens: (turn, event) => { turn.lens = event; },
  pooled: (turn, event) => { turn.pooled = event; },
  steered: (turn, event) => { turn.steered = event; },
  end: (turn, event) => { turn.ended = endings[event.finish] ?? ""; turn.done = true; },
  error: (turn, event) => { turn.ended = endings.error; turn.done = true; complain(event.message); },
};

function messages() {
  const system = $("system").value.trim();
  const said = chat.turns.map(({ role, text }) => ({ role, content: text }));
  return system ? [{ role: "system", content: system }, ...said] : said;
}

async function send(text) {
  complain("");
  addTurn("user", text);
  const body = {
    messages: messages(), max_tokens: Number($("max-tokens").value), temperature: Number($("temperature").value),
    scale: facts.vector ? chat.scale : 0,
  };
  const turn = addTurn("assistant", "");
  busy(turn, true);
  chat.stop = new AbortController();
  try {
    for await (const event of ask("answer", body, chat.stop.signal)) {
      const main = $("main"), atEnd = main.scrollHeight - main.scrollTop - main.clientHeight < 120;
      takes[event.event](turn, event);
      drawWho(turn);
      if (atEnd) main.scrollTop = main.scrollHeight;
    }
    if (!turn.done) throw new Error("the answer broke off: the program that serves this page has ended");
  } catch (error) {
    turn.ended = chat.stop.signal.aborted ? endings.stopped : endings.error;
    if (!chat.stop.signal.aborted) complain(error.message);
  }
  busy(turn, false);
  if (!turn.tokens.length) {
    // Nothing was said: the message goes back to where it was written.
    chat.turns.splice(-2).forEach((each) => each.box.remove());
    $("message").value ||= text;
  }
  drawWho(turn);
  $("said").textContent = turn.tokens.length ? `answer of ${turn.tokens.length} tokens: ${turn.text}` : "no answer";
  document.documentElement.dataset.answers = String(chat.turns.filter((t) => t.role === "assistant").length);
}

function busy(turn, is) {
  turn.said.classList.toggle("waits", is);
  $("send").hidden = is;
  $("stop").hidden = !is;
  $("clear").disabled = is;
  if (!is) $("message").focus();
}

// The token that has the tooltip.
function tipFor(turn, i) {
  const token = turn.tokens[i], value = turn.scores[i] ?? null, rows = [];
  if (facts.probe) {
    rows.push(["score", number(value)]);
    rows.push(["against threshold", value === null ? "not scored" : value > chat.threshold ? "▲ above" : "▽ not above"]);
  }
  rows.push(["chance", percent(token.p)]);
  if (token.id !== null) rows.push(["token id", String(token.id)]);
  return { word: shown(token.text), rows, layers: layersFor(turn, i), next: turn.tokens[i + 1] };
}

const percent = (p) => (p === null ? "–" : p >= 0.0995 ? `${Math.round(p * 100)}%` : p >= 0.001 ? `${(p * 100).toFixed(1)}%` : "<0.1%");

function layersFor(turn, i) {
  const row = turn.lens && turn.lens.rows[i - turn.lens.first];
  return row ? row.map((best, l) => ({ layer: turn.lens.layers[l], best })) : [];
}

function showTip(turn, i) {
  const { word, rows, layers, next } = tipFor(turn, i), list = element("dl");
  for (const [name, text] of rows) list.append(element("dt", "", name), element("dd", "", text));
  const parts = [element("div", "word", word), list];
  if (layers.length) {
    const table = element("table");
    table.append(element("caption", "", "predicted to come next, by layer"));
    for (const { layer, best } of layers) {
      const line = element("tr"), cell = element("td");
      line.append(element("th", "", String(layer)), cell);
      for (const { id, text, p } of best) {
        const one = element("span", "guess"), word = shown(text);
        if (word.startsWith(" ")) one.append(element("i", "", "·"));
        one.append(element("span", next && next.id === id ? "came" : "", word.trimStart()), element("i", "", ` ${percent(p)}`));
        cell.append(one, " ");
      }
      table.append(line);
    }
    parts.push(table);
  }
  $("tip").replaceChildren(...parts);
  placeTip(turn.spans[i]);
  return [word, ...rows.map((row) => row.join(" ")), ...layers.map(({ layer, best }) => `layer ${layer}: ${shown(best[0].text)}`)].join(", ");
}

function tokenOf(target) {
  const span = target.closest && target.closest("[data-i]");
  const turn = span && chat.turns.find((each) => each.said.contains(span));
  return turn ? [turn, Number(span.dataset.i)] : null;
}

function focusToken(turn, i) {
  turn.spans.forEach((span, k) => { span.tabIndex = k === i ? 0 : -1; });
  turn.spans[i].focus();
}

const moves = {
  ArrowRight: (turn, i) => i + 1, ArrowLeft: (turn, i) => i - 1,
  Home: () => 0, End: (turn) => turn.tokens.length - 1,
  n: (turn, i) => turn.scores.findIndex((v, k) => k > i && v > chat.threshold),
  p: (turn, i) => turn.scores.findLastIndex((v, k) => k < i && v !== null && v > chat.threshold),
};

function wire() {
  const talk = $("talk");
  talk.addEventListener("mouseover", (event) => { const at = tokenOf(event.target); if (at) showTip(...at); });
  talk.addEventListener("mouseleave", hideTip);
  talk.addEventListener("focusin", (event) => {
    const at = tokenOf(event.target);
    if (at) $("said").textContent = showTip(...at);
  });
  talk.addEventListener("focusout", hideTip);
  talk.addEventListener("click", (event) => { const at = tokenOf(event.target); if (at) focusToken(...at); });
  talk.addEventListener("keydown", (event) => {
    const at = tokenOf(event.target), move = moves[event.key];
    if (!at || !move || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const to = move(...at);
    if (to >= 0 && to < at[0].tokens.length) focusToken(at[0], to);
  });
  $("main").addEventListener("scroll", () => {
    const at = tokenOf(document.activeElement);
    if (at) placeTip(at[0].spans[at[1]]);
    else hideTip();
  }, { passive: true });
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || $("help").open) return;
    if (!$("stop").hidden) chat.stop.abort();
    hideTip();
    $("message").focus();
  });
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("message").value.trim();
    if (!text || $("send").hidden) return;
    $("message").value = "";
    send(text);
  });
  $("message").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("composer").requestSubmit();
  });
  $("stop").addEventListener("click", () => chat.stop.abort());
  $("clear").addEventListener("click", () => {
    chat.turns = [];
    $("talk").replaceChildren();
    complain("");
    hideTip();
    $("message").focus();
  });
  $("threshold").addEventListener("input", () => {
    const [low, high] = sliderEnds(seen());
    setThreshold(low + (Number($("threshold").value) / 1000) * (high - low));
  });
  $("threshold-text").addEventListener("change", () => setThreshold(parseFloat($("threshold-text").value)));
  $("threshold-reset").addEventListener("click", () => setThreshold(chat.own));
  $("scale").addEventListener("input", () => setScale(Number(((Number($("scale").value) / 1000) * widest).toFixed(2))));
  $("scale-text").addEventListener("change", () => setScale(parseFloat($("scale-text").value)));
  $("scale-off").addEventListener("click", () => setScale(0));
  $("theme").addEventListener("click", () => wearTheme(otherTheme()));
  $("help-open").addEventListener("click", () => $("help").showModal());
}

function begin() {
  $("task").textContent = `Chat with ${facts.model}`;
  const parts = [facts.probe ? `probe ${facts.probe_shown}` : "no probe"];
  const layers = facts.layers === "all" ? "all layers" : `layers ${facts.layers.join(", ")}`;
  parts.push(facts.layers.length ? `${facts.lens ? `lens ${facts.lens_shown}` : "logit lens"} at ${layers}` : "no lens");
  if (facts.vector) parts.push(`vector ${facts.vector_shown}`);
  parts.push(facts.server);
  $("where").textContent = parts.join(" · ");
  $("where").title = $("where").textContent;
  if (!facts.probe) { $("threshold-field").hidden = true; $("legend").hidden = true; }
  $("scale-field").hidden = $("help-steer").hidden = !facts.vector;
  $("scale-name").textContent = `Steering: ${facts.vector_shown}`;
  wearTheme(firstTheme());
  wire();
  setScale(chat.scale);
  setThreshold(chat.own);
  $("message").focus();
}

begin();
