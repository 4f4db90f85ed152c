// The page's data: facts as JSON, and one block per sample that is unpacked when it is opened.
const facts = JSON.parse($("page-facts").textContent);
const series = facts.series;
const samples = facts.samples;
const special = new Set(facts.tokens.special);
const blocks = $("page-blocks").textContent.split("\n");

async function gunzip(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function fromBase64(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

// A sample unpacked: calls, turns, index of each token, and per series a Float32Array with NaN
// where a token has no score. Layout: `pack_sample` in _page.py.
async function openBlock(index) {
  const bytes = await gunzip(fromBase64(blocks[index]));
  const view = new DataView(bytes.buffer);
  const headerSize = view.getUint32(0, true), n = view.getUint32(4, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + headerSize)));
  let at = 8 + headerSize;
  const plane = () => { at += n; return bytes.subarray(at - n, at); };
  const [low, middle, high] = [plane(), plane(), plane()];
  const token = new Uint32Array(n);
  for (let i = 0; i < n; i++) token[i] = low[i] | (middle[i] << 8) | (high[i] << 16);
  const scores = series.map((s) => {
    const [a, b] = [plane(), plane()], made = new Float32Array(n);
    const step = (s.high - s.low) / (facts.levels - 1);
    for (let i = 0; i < n; i++) {
      const level = a[i] | (b[i] << 8);
      made[i] = level === 0 ? NaN : s.low + (level - 1) * step;
    }
    return made;
  });
  const read = header.read.map((runs) => {
    const made = new Uint8Array(n);
    for (const [start, stop] of runs) made.fill(1, start, stop);
    return made;
  });
  const turns = [];
  header.calls.forEach((call, c) => {
    for (const [role, start, stop, made] of call.turns) turns.push({ role, start, stop, made: !!made, call: c });
  });
  return { n, token, scores, read, calls: header.calls, turns };
}

const textOf = (index) => facts.tokens.texts[index];

// Position of a token in its call, over prompt and completion.
function positionOf(open, i) {
  let call = 0;
  while (call + 1 < open.calls.length && open.calls[call + 1].start <= i) call++;
  const { start, folded, at } = open.calls[call];
  return { call, position: at.length ? at[i - start] : folded + i - start };
}
