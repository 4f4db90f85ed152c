"""Pictures that are screenshots: `python -m tests.kit.screenshot`.

Shows the live page and the report of a probe in a Chromium. Colours are reduced, so that the
pictures stay small. Each picture has a `.json` beside it with the numbers that it shows, which a
test compares with the log and the card.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tempfile
from html import unescape
from pathlib import Path
from typing import Final, NamedTuple

from .browser import BROWSER
from .live_page import PAGE
from .page import read_page
from .repository import ROOT

__all__ = ["DARK", "REPORT", "SHOTS", "Shot", "box_numbers", "page_numbers", "take"]

REPORT: Final = ROOT / "probes/organism/deception-lr/report.html"
DARK: Final = "--blink-settings=preferredColorScheme=0"


class Shot(NamedTuple):
    """How a picture is taken."""

    source: Path
    width: int
    height: int
    hash: str = ""
    option: str = ""


SHOTS: Final = {
    "view.png": Shot(PAGE, 1280, 800, ""),
    "view-dark.png": Shot(PAGE, 1280, 800, "", DARK),
    "view-phone.png": Shot(PAGE, 500, 720, ""),
    "view-phone-dark.png": Shot(PAGE, 500, 720, "", DARK),
    "report.png": Shot(REPORT, 1020, 705),
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
        "--virtual-time-budget=5000", f"--screenshot={target}", url,
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
    numbers = {PAGE: page_numbers(), REPORT: box_numbers()}
    with tempfile.TemporaryDirectory() as folder:
        for name, shot in SHOTS.items():
            content = take(
                f"{shot.source.as_uri()}{shot.hash}", Path(folder, name),
                width=shot.width, height=shot.height, option=shot.option,
            )  # fmt: skip
            target = ROOT / "docs/assets" / name
            target.write_bytes(content)
            shown = {"source": str(shot.source.relative_to(ROOT)), "shows": numbers[shot.source]}
            target.with_suffix(".json").write_text(json.dumps(shown, indent=1) + "\n")
            sys.stdout.write(f"docs/assets/{name}: {len(content)} bytes\n")


if __name__ == "__main__":
    main()
