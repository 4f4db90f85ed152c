// The conversation: turns of tokens, filled in where they come near the window.
const PIECE = 384, AT_ONCE = 4096;
const talk = { spans: [], watcher: null };

function drawTalk() {
  const open = state.open, box = $("talk");
  talk.spans = new Array(open.n);
  if (talk.watcher) talk.watcher.disconnect();
  talk.watcher = new IntersectionObserver((seen) => {
    for (const entry of seen) if (entry.isIntersecting) fillPiece(entry.target);
  }, { root: $("main"), rootMargin: "1200px 0px" });
  const parts = [];
  let call = -1;
  open.turns.forEach((turn, t) => {
    if (turn.call !== call) {
      call = turn.call;
      if (open.calls.length > 1) parts.push(callLine(open, call));
    }
    parts.push(makeTurn(open, turn, t));
  });
  if (!parts.length) parts.push(element("p", "empty", "Nothing was captured in this sample."));
  box.replaceChildren(...parts);
  let room = AT_ONCE;
  for (const piece of box.querySelectorAll(".piece")) {
    room -= piece.dataset.stop - piece.dataset.start;
    if (room > 0) fillPiece(piece);
    else talk.watcher.observe(piece);
  }
}

function callLine(open, index) {
  const call = open.calls[index];
  const words = [`model call ${index + 1} of ${open.calls.length}`];
  if (call.folded) words.push(`${call.folded} tokens as above`);
  const value = call.values[state.series];
  if (value !== null) words.push(`score ${number(value)}`);
  if (call.origin === "kept") words.push("token scores as a scorer kept them");
  if (call.origin === "none") words.push("activations not here");
  return element("div", "call", words.join(" · "));
}

function makeTurn(open, turn, t) {
  const box = element("section", turn.made ? "turn made" : "turn");
  box.id = `turn-${t}`;
  box.append(makeWho(open, turn));
  const said = element("div", "said");
  for (let start = turn.start; start < turn.stop; start += PIECE) {
    const stop = Math.min(turn.stop, start + PIECE);
    const piece = element("span", "piece later");
    piece.dataset.start = start;
    piece.dataset.stop = stop;
    piece.style.minHeight = `${Math.ceil((stop - start) / 14) * 1.95}em`;
    said.append(piece);
  }
  box.append(said);
  return box;
}

function makeWho(open, turn) {
  const who = element("div", "who");
  const facts = summary(open, turn);
  who.append(element("b", "", turn.role));
  who.append(element("span", "", countOf(open, turn)));
  if (facts.n) {
    who.append(element("span", "line", `mean ${number(facts.mean)} max ${number(facts.max)}`));
    who.append(element("span", facts.above ? "line warm" : "line", `${facts.above} above`));
  } else who.append(element("span", "line", facts.scored ? "not read by the probe" : "not scored"));
  return who;
}

// Text whose tokens are not known is no token.
function countOf(open, turn) {
  let n = 0;
  for (let i = turn.start; i < turn.stop; i++) if (facts.tokens.ids[open.token[i]] >= 0) n++;
  return n ? `${n} token${n > 1 ? "s" : ""}` : "text";
}

function summary(open, turn) {
  const scores = open.scores[state.series];
  let n = 0, sum = 0, max = -Infinity, above = 0, scored = false;
  for (let i = turn.start; i < turn.stop; i++) {
    if (Number.isNaN(scores[i])) continue;
    scored = true;
    if (!counts(open, i)) continue;
    n++; sum += scores[i];
    if (scores[i] > max) max = scores[i];
    if (scores[i] > state.threshold) above++;
  }
  return { n, mean: sum / n, max, above, scored };
}

// Whether a token has a score and the probe reads it, or all were asked for.
function counts(open, i) {
  return !Number.isNaN(open.scores[state.series][i]) && (state.all || open.read[state.series][i] === 1);
}

function fillPiece(piece) {
  if (!piece.classList.contains("later")) return;
  piece.classList.remove("later");
  piece.style.minHeight = "";
  if (talk.watcher) talk.watcher.unobserve(piece);
  const made = document.createDocumentFragment();
  for (let i = +piece.dataset.start; i < +piece.dataset.stop; i++) {
    const span = document.createElement("span");
    span.dataset.i = i;
    writeText(span, textOf(state.open.token[i]));
    paint(span, i);
    talk.spans[i] = span;
    made.append(span);
  }
  piece.append(made);
}

function paint(span, i) {
  const s = series[state.series], value = state.open.scores[state.series][i];
  let name = "t";
  if (!counts(state.open, i)) name += " u";
  else {
    const part = share(value, state.threshold, reach(s, state.threshold));
    name += part > 0 ? " w" : " c";
    span.style.setProperty("--a", Math.abs(part).toFixed(3));
  }
  if (special.has(state.open.token[i])) name += " s";
  if (i === state.cursor) name += " at";
  span.className = name;
}

function repaint() {
  talk.spans.forEach((span, i) => span && paint(span, i));
  state.open.turns.forEach((turn, t) => {
    const who = $(`turn-${t}`).querySelector(".who");
    who.replaceWith(makeWho(state.open, turn));
  });
}

function spanOf(i) {
  if (!talk.spans[i]) {
    for (const piece of $("talk").querySelectorAll(".piece.later")) {
      if (+piece.dataset.start <= i && i < +piece.dataset.stop) fillPiece(piece);
    }
  }
  return talk.spans[i];
}

// The tooltip of a token.
function tipFor(i) {
  const open = state.open, at = positionOf(open, i), call = open.calls[at.call];
  const turn = open.turns.find((t) => t.start <= i && i < t.stop);
  const value = open.scores[state.series][i], index = open.token[i];
  // Text of a message whose tokens are not known here.
  if (facts.tokens.ids[index] < 0) {
    return { word: shown(textOf(index)).slice(0, 60), rows: [["text", "its tokens were not scored"], ["turn", turn ? turn.role : "–"]] };
  }
  const rows = [
    ["score", number(value)],
    ["against threshold", Number.isNaN(value) ? (call.origin === "activations" ? "not captured" : "not scored") : value > state.threshold ? "▲ above" : "▽ not above"],
    ...(Number.isNaN(value) || open.read[state.series][i] ? [] : [["read by the probe", "no"]]),
    ["position", `${at.position} (${at.position < call.prompt ? "prompt" : `completion ${at.position - call.prompt}`})`],
    ["token id", facts.tokens.ids[index]],
    ["turn", turn ? turn.role : "–"],
  ];
  series.forEach((s, k) => {
    if (k !== state.series && (s.probe === series[state.series].probe || series.length <= 6)) {
      rows.push([s.name, number(open.scores[k][i])]);
    }
  });
  return { word: shown(textOf(index)), rows };
}

function showTip(i, span) {
  const tip = $("tip"), { word, rows } = tipFor(i), table = element("dl");
  for (const [name, value] of rows) table.append(element("dt", "", name), element("dd", "", String(value)));
  tip.replaceChildren(element("div", "word", word), table);
  placeTip(span);
}
