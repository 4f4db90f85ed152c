"""The page of patch sweeps: what it draws are the cells that the server's arithmetic makes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from inspect_lens._patching.sweep import EventLines, specs_of, sweep
from inspect_lens.errors import LensError
from inspect_lens.patch import patch_sweep
from inspect_lens.view._chat_talk import ChatSetup, ChatTalk
from tests.kit.browser import BROWSER, run_at
from tests.kit.driven_chat import DrivenChat
from tests.kit.toy_runs import ToyRuns

CLEAN, CORRUPTED = "The river Talmo is in", "The river Velosh is in"
SETUP = ChatSetup(model="toy", probe=None, threshold=0.0, lens=None, layers=(), top_k=1)


class Sweeping(BaseHTTPRequestHandler):
    """`POST /v1/inspect_lens/patch_sweep` with the toy behind it."""

    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        try:
            _, (spec,) = specs_of(body)
            lines, events = EventLines(), sweep(ToyRuns(), spec)
            found = [lines.line(event) for event in events]
        except LensError as error:
            self.send_response(400)
            self.end_headers()
            self.wfile.write(json.dumps({"error": {"message": str(error)}}).encode())
            return
        self.send_response(200)
        self.end_headers()
        for line in (*found, lines.end()):
            self.wfile.write(json.dumps(line).encode() + b"\n")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def talk() -> Iterator[ChatTalk]:
    Sweeping.bodies = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Sweeping)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield ChatTalk(httpx.Client(base_url=f"http://127.0.0.1:{server.server_address[1]}"), SETUP)
    server.shutdown()
    server.server_close()


def wanted(**options: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inspect_lens.patch._sweep.open_runs", lambda _: ToyRuns())
        return patch_sweep(None, CLEAN, CORRUPTED, answer=" Verun", foil=" Sar", **options)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_in_a_browser_cells_have_the_share_that_they_bring_back(
    talk: ChatTalk, tmp_path: Path
) -> None:
    script = f"""
      const swept = (n) => document.documentElement.dataset.sweeps === String(n);
      $("asking").requestSubmit();
      await until(() => swept(1));
      seen.empty = $("wrong").textContent;
      $("clean").value = {json.dumps(CLEAN)};
      $("corrupted").value = {json.dumps(CORRUPTED)};
      $("answer").value = " Verun"; $("foil").value = " Sar"; $("layers").value = "0, 1-2";
      $("asking").requestSubmit();
      for (let i = 0; i < 200 && !swept(2); i++) await fetch(location.href);
      const rows = [...document.querySelectorAll("#map tbody tr")];
      seen.layers = rows.map((row) => row.querySelector("th").textContent);
      seen.cells = rows.map((row) => [...row.querySelectorAll("td")].map((c) => [c.textContent, c.className]));
      seen.tokens = [...document.querySelectorAll("#map th.token")].map((th) => th.textContent);
      seen.told = $("told").textContent; seen.wrong = $("wrong").hidden;
      $("foil").value = " Verun";
      $("asking").requestSubmit();
      for (let i = 0; i < 200 && !swept(3); i++) await fetch(location.href);
      seen.refused = $("wrong").textContent;
    """  # noqa: E501
    with DrivenChat(talk, script) as page:
        seen = run_at(page.url.replace("/?", "/patch?"), tmp_path / "profile")
    assert seen["empty"] == "Clean prompt: is empty"
    found = wanted(layers=[0, 1, 2])
    assert seen["layers"] == ["2", "1", "0"]
    assert seen["tokens"] == [found.tokens[at] for at in found.positions]
    drawn = [[float(text) for text, _ in row] for row in reversed(seen["cells"])]
    assert drawn == [[pytest.approx(share, abs=0.006) for share in row] for row in found.recovered]
    moved = abs(found.metric - found.corrupted.metric) > found.floor
    for row, own, shares in zip(reversed(seen["cells"]), moved, found.recovered, strict=True):
        names = ["floor" if not far else "w" if share > 0 else "c"
                 for far, share in zip(own, shares, strict=True)]  # fmt: skip
        assert [name for _, name in row] == names
    assert f"{found.metric.size} of {found.metric.size} cells" in seen["told"]
    assert f"clean {found.clean.metric:.3f}, corrupted {found.corrupted.metric:.3f}" in seen["told"]
    assert seen["wrong"]
    assert "begins with the same token as the answer" in seen["refused"]
    assert Sweeping.bodies[0]["model"] == "toy"


def test_only_the_page_itself_sweeps(talk: ChatTalk) -> None:
    with DrivenChat(talk, "") as page:
        root, key = page.url.partition("?")[0], page.url.partition("key=")[2]
        assert httpx.get(f"{root}patch").status_code == 403
        assert httpx.get(f"{root}patch?key={key}").status_code == 200
        body = {"clean": CLEAN, "corrupted": CORRUPTED, "answer": " Verun"}
        assert httpx.post(f"{root}sweep", json=body).status_code == 403
        mine = {"X-Inspect-Lens-Key": key}
        assert httpx.post(f"{root}sweep", json=[body], headers=mine).status_code == 400
        answer = httpx.post(f"{root}sweep", json=body, headers=mine)
        assert json.loads(answer.text.splitlines()[-1])["event"] == "end"
        wrong = httpx.post(f"{root}sweep", json=body | {"source": "none"}, headers=mine)
        assert "source" in json.loads(wrong.text)["message"]
