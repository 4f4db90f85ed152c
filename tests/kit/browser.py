"""A real browser without a driver: a page runs a script of the test, and is dumped as text."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["BROWSER", "run_at", "run_in_page", "with_script"]

BROWSER = next(
    filter(
        None,
        map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome")),
    ),
    None,
)
"""Path of a Chromium, or None."""

_HARNESS = """
<script>
addEventListener("error", (e) => { document.documentElement.dataset.error = e.message; });
(async () => {
  const wait = (ms) => new Promise((done) => setTimeout(done, ms));
  const until = async (test) => { for (let i = 0; i < 200 && !test(); i++) await wait(20); };
  const $ = (id) => document.getElementById(id);
  const press = (key) =>
    document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const change = (id, value, type) => {
    $(id).value = value;
    $(id).dispatchEvent(new Event(type || "change"));
  };
  const ready = (i) => until(() => document.documentElement.dataset.ready === String(i));
  const seen = {};
  try { await (async () => { %s })(); } catch (error) { seen.error = String(error.stack || error); }
  // Before the page goes: what still runs in it then finds nothing.
  const wrong = document.documentElement.dataset.error;
  if (wrong) seen.error = wrong;
  const box = document.createElement("pre");
  box.id = "seen";
  box.textContent = JSON.stringify(seen);
  document.body.replaceChildren(box);
})();
</script>
"""


def run_in_page(page: Path, script: str, *, width: int = 1280, hash: str = "") -> dict[str, Any]:
    """Open a page in Chromium and run a script in it.

    Args:
        page: HTML file; a copy beside it gets the script.
        script: body of an async function; puts what it saw into `seen`.
        width: of the window.
        hash: behind the address.

    Returns:
        `seen`.
    """
    copy = page.with_suffix(".driven.html")
    copy.write_text(with_script(page.read_text(encoding="utf-8"), script))
    return run_at(f"{copy.as_uri()}{hash}", page.parent / "profile", width=width)


def with_script(html_text: str, script: str) -> str:
    """A page with a script of the test; see `run_in_page`."""
    return html_text.replace("</body>", _HARNESS.replace("%s", script) + "</body>")


def run_at(url: str, profile: Path, *, width: int = 1280) -> dict[str, Any]:
    """Open the address of a page that has a script of the test.

    Args:
        url: of the page.
        profile: folder for the browser.
        width: of the window.

    Returns:
        `seen`.
    """
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-dev-shm-usage", f"--user-data-dir={profile}", f"--window-size={width},900",
        "--virtual-time-budget=20000", "--dump-dom", url,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stdout[-2000:] + done.stderr[-2000:]
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert "error" not in seen, seen["error"]
    return seen
