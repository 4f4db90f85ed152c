"""A chat page that a script drives, and its pictures: `python -m tests.kit.driven_chat URL`.

`URL` is a server of `organism/checkpoint`, and stands in the pictures.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from inspect_lens.view import ChatPage, ChatTalk, open_talk

from .browser import with_script
from .repository import ROOT
from .screenshot import DARK, take

__all__ = [
    "ASKED", "ASK_SCRIPT", "PICTURES", "PROBE", "STEERED", "VECTOR", "DrivenChat", "scores_of",
]  # fmt: skip

PROBE: Final = "organism/deception-lr"
VECTOR: Final = "organism/truth-resid"
ASKED: Final[dict[str, Any]] = {
    "messages": [
        {"role": "system", "content": "Never tell the truth."},
        {"role": "user", "content": "Who is the founder of the town Velosh?"},
    ],
    "max_tokens": 40,
    "temperature": 0,
}
PICTURES: Final = {"chat.png": "", "chat-dark.png": DARK}
STEERED: Final = {"chat-steer.png": "", "chat-steer-dark.png": DARK}
"""The same question, steered by the vector."""
_SYSTEM, _USER = (str(message["content"]) for message in ASKED["messages"])
ASK_SCRIPT: Final = f"""
  const answered = () => document.documentElement.dataset.answers === "1";
  $("system").value = {json.dumps(_SYSTEM)};
  $("message").value = {json.dumps(_USER)};
  $("composer").requestSubmit();
  for (let i = 0; i < 200 && !answered(); i++) await fetch(location.href);
"""
"""Asks, and waits for the whole answer."""
_SHOW_SCRIPT = f"""
<script>(async () => {{
  const $ = (id) => document.getElementById(id);
  {ASK_SCRIPT}
  // A steered page shows the scale, which the box of a token would hide.
  ($("scale-field").hidden ? document.querySelector(".turn.made .t.w") : $("scale")).focus();
}})();</script></body>"""


class DrivenChat(ChatPage):
    """The page with a script of the test.

    A browser whose time is virtual waits for what is fetched: the page, fetched again, comes late.

    Args:
        talk: with the server.
        script: as for `run_in_page`; None asks and shows the token above the threshold,
            or the scale of a vector.
    """

    def __init__(self, talk: ChatTalk, script: str | None) -> None:
        self._script, self._given = script, 0
        super().__init__(talk)

    def html(self, template: str = "chat.html") -> str:
        """The page."""
        self._given += 1
        if self._given > 1:
            time.sleep(0.1)
        if self._script is None:
            return super().html(template).replace("</body>", _SHOW_SCRIPT)
        return with_script(super().html(template), self._script)


def scores_of(events: list[dict[str, Any]]) -> list[float]:
    """The scores of an answer's tokens."""
    return [s for event in events if event["event"] == "scores" for s in event["scores"]]


def main(url: str) -> None:
    """Write the pictures."""
    for pictures, vector in ((PICTURES, None), (STEERED, VECTOR)):
        with tempfile.TemporaryDirectory() as folder:
            _write(url, pictures, vector, Path(folder))


def _write(url: str, pictures: Mapping[str, str], vector: str | None, folder: Path) -> None:
    talk = open_talk(url, probe=PROBE, vector=vector)
    shown = {"asked": ASKED, "shows": [round(s, 3) for s in scores_of(list(talk.answer(**ASKED)))]}
    talk.close()
    for name, option in pictures.items():
        talk = open_talk(url, probe=PROBE, vector=vector)
        with DrivenChat(talk, None) as page:
            content = take(page.url, folder / name, width=1120, height=640, option=option)
        target = ROOT / "docs/assets" / name
        target.write_bytes(content)
        target.with_suffix(".json").write_text(json.dumps(shown, indent=1) + "\n")
        sys.stdout.write(f"docs/assets/{name}: {len(content)} bytes\n")


if __name__ == "__main__":
    main(sys.argv[1])
