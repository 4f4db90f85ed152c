// Scores along the sample, with the threshold and the turns; a click goes to the token.
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function drawStrip() {
  const canvas = $("curve"), open = state.open, ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth || 600, height = 84;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.clearRect(0, 0, width, height);
  if (!open || !open.n) return;
  const s = series[state.series], scores = open.scores[state.series];
  const low = Math.min(s.q02, state.threshold), high = Math.max(s.q98, state.threshold);
  const pad = (high - low) * 0.25 || 1;
  const y = (v) => 4 + (height - 20) * (1 - Math.max(0, Math.min(1, (v - low + pad) / (high - low + 2 * pad))));
  const x = (i) => (i / open.n) * width;
  drawTurns(pen, open, x, height);
  const base = y(state.threshold), step = Math.max(1, width / open.n);
  // Many tokens share a pixel: the farthest from the threshold is drawn.
  const extreme = new Map(), unread = new Map();
  for (let i = 0; i < open.n; i++) {
    if (Number.isNaN(scores[i])) continue;
    const kept = counts(open, i) ? extreme : unread;
    const at = Math.floor(x(i)), known = kept.get(at);
    if (known === undefined || Math.abs(scores[i] - state.threshold) > Math.abs(known - state.threshold)) {
      kept.set(at, scores[i]);
    }
  }
  const bars = (values, fill) => {
    for (const [at, value] of values) {
      pen.fillStyle = fill(value > state.threshold);
      const top = y(value);
      pen.fillRect(at, Math.min(top, base), Math.max(1, step - (step > 3 ? 1 : 0)), Math.max(1, Math.abs(base - top)));
    }
  };
  bars(unread, () => colour("--line"));
  bars(extreme, (warm) => `rgb(${colour(warm ? "--warm" : "--cool")} / ${warm ? 0.9 : 0.55})`);
  pen.strokeStyle = colour("--ink");
  pen.setLineDash([4, 3]);
  pen.beginPath();
  pen.moveTo(0, base); pen.lineTo(width, base);
  pen.stroke();
  pen.setLineDash([]);
  if (state.cursor >= 0) {
    pen.strokeStyle = colour("--focus");
    pen.lineWidth = 2;
    pen.strokeRect(x(state.cursor) - 1, 2, Math.max(3, step), height - 18);
  }
}

function drawTurns(pen, open, x, height) {
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "bottom";
  open.turns.forEach((turn, t) => {
    const left = x(turn.start), right = x(turn.stop);
    if (turn.made) {
      pen.fillStyle = colour("--pick");
      pen.fillRect(left, 0, right - left, height - 14);
    }
    pen.fillStyle = colour(t === state.turn ? "--pick-line" : "--line");
    pen.fillRect(left + 0.5, height - 14, Math.max(1, right - left - 1), 2);
    if (right - left > pen.measureText(turn.role).width + 6) {
      pen.fillStyle = colour("--soft");
      pen.fillText(turn.role, left + 2, height);
    }
  });
}

function tokenAt(event) {
  const box = $("curve").getBoundingClientRect();
  const i = Math.floor(((event.clientX - box.left) / box.width) * state.open.n);
  return Math.max(0, Math.min(state.open.n - 1, i));
}
