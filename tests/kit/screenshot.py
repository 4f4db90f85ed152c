"""Pictures that are screenshots: `python -m tests.kit.screenshot`.

Shows the live page, the report of a probe, and the live log in Inspect's viewer, in a Chromium.
Colours are reduced, so that the pictures stay small. Each picture has a `.json` beside it with the
numbers that it shows, which a test compares with the log and the card.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final, NamedTuple

from inspect_ai.log import bundle_log_dir, read_eval_log

from .browser import BROWSER
from .live_page import LOG, PAGE
from .page import read_page
from .repository import ROOT

__all__ = ["DARK", "REPORT", "SHOTS", "Shot", "box_numbers", "numbers_of", "take"]

REPORT: Final = ROOT / "probes/organism/deception-lr/report.html"
DARK: Final = "--blink-settings=preferredColorScheme=0"


_SHOWN: Final = "demo-0007"
_VIEW_PORT: Final = 7575
"""That of `inspect view`, since the viewer shows its address."""
_TRIES: Final = 40
_EMPTY: Final = 12_000
"""Bytes of a picture of Inspect's viewer that shows no sample yet, and some more."""


class Shot(NamedTuple):
    """How a picture is taken."""

    source: Path
    width: int
    height: int
    option: str = ""


SHOTS: Final = {
    "view.png": Shot(PAGE, 1280, 800),
    "view-dark.png": Shot(PAGE, 1280, 800, option=DARK),
    "view-phone.png": Shot(PAGE, 500, 720),
    "view-phone-dark.png": Shot(PAGE, 500, 720, option=DARK),
    "report.png": Shot(REPORT, 1020, 705),
    "inspect-score.png": Shot(LOG, 1040, 400),
    "inspect-score-dark.png": Shot(LOG, 1040, 400, option=DARK),
}
"""Pictures in docs/assets, by name."""


def page_numbers() -> list[str]:
    """The score of each sample, as the list on the left of the page shows it."""
    return [f"{sample['values'][0]:.3f}" for sample in read_page(PAGE).facts["samples"]]


def box_numbers() -> list[str]:
    """The cells of the box on top of the report, line by line."""
    found = re.search(
        r'<div class="box">(.*?)</div>', REPORT.read_text(encoding="utf-8"), re.DOTALL
    )
    assert found is not None
    return [unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", found[1])]


def score_texts() -> list[str]:
    """What the scorer says of the sample that is shown in Inspect's viewer."""
    (sample,) = (s for s in read_eval_log(str(LOG)).samples or () if s.id == _SHOWN)
    score = (sample.scores or {})["deception_probe"]
    return [str(score.value), str(score.answer), str(score.explanation)]


def numbers_of(source: Path) -> list[str]:
    """The numbers that a picture of a page, a report or a log shows."""
    return {PAGE: page_numbers, REPORT: box_numbers, LOG: score_texts}[source]()


@contextmanager
def _inspect_viewer(folder: Path) -> Iterator[str]:
    """The address of the log's samples in Inspect's own viewer, served for as long as needed."""
    logs = folder / "logs"
    logs.mkdir()
    (logs / LOG.name).write_bytes(LOG.read_bytes())
    bundle_log_dir(log_dir=str(logs), output_dir=str(folder / "viewer"))
    handler = partial(_Quiet, directory=str(folder / "viewer"))
    server = ThreadingHTTPServer(("localhost", _VIEW_PORT), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://localhost:{_VIEW_PORT}/index.html#/logs/{LOG.name}/samples"
    finally:
        server.shutdown()
        server.server_close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of a request."""


def take(url: str, target: Path, *, width: int, height: int, option: str = "") -> bytes:
    """Show a page in Chromium.

    Args:
        url: of the page.
        target: file for the picture as the browser takes it; its profile lies beside it.
        width: of the window.
        height: of the window.
        option: of Chromium, such as `DARK`.

    Returns:
        PNG of few colours.
    """
    from PIL import Image

    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--user-data-dir={target}-profile", f"--window-size={width},{height}",
        "--virtual-time-budget=12000", f"--screenshot={target}", url,
    ]  # fmt: skip
    subprocess.run(
        [*command, *filter(None, [option])], check=True, timeout=120, capture_output=True
    )
    packed = io.BytesIO()
    Image.open(target).convert("RGB").quantize(96).save(packed, "PNG", optimize=True)
    return packed.getvalue()


def main() -> None:
    """Write the pictures."""
    if BROWSER is None:
        raise SystemExit("no Chromium on this machine")
    with tempfile.TemporaryDirectory() as folder, _inspect_viewer(Path(folder)) as viewer:
        for name, shot in SHOTS.items():
            url = f"{viewer}/sample/{_SHOWN}/1/scoring"
            if shot.source != LOG:
                url = shot.source.as_uri()
            for _ in range(_TRIES):
                content = take(
                    url,
                    Path(folder, name),
                    width=shot.width,
                    height=shot.height,
                    option=shot.option,
                )
                # Inspect's viewer reads the log in a worker, for which virtual time does not wait.
                if shot.source != LOG or len(content) > _EMPTY:
                    break
            target = ROOT / "docs/assets" / name
            target.write_bytes(content)
            shown = {"source": str(shot.source.relative_to(ROOT)), "shows": numbers_of(shot.source)}
            target.with_suffix(".json").write_text(json.dumps(shown, indent=1) + "\n")
            sys.stdout.write(f"docs/assets/{name}: {len(content)} bytes\n")


if __name__ == "__main__":
    main()
