// What pages that ask this machine's program share: complaints, and answers that come line by line.
function complain(text) {
  $("wrong").textContent = text;
  $("wrong").hidden = !text;
}

async function* linesOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line) yield JSON.parse(line);
  }
}

async function* ask(path, body, signal) {
  const response = await fetch(path, {
    method: "POST", body: JSON.stringify(body), signal,
    headers: { "Content-Type": "application/json", "X-Inspect-Lens-Key": facts.key },
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  yield* linesOf(response);
}
