"""Tables of pages, figures, notebooks and schema snapshots are those of the code and results."""

from __future__ import annotations

from tests.kit.generated import COMMAND, generated_files
from tests.kit.repository import ROOT


def test_generated_files_are_current() -> None:
    old = [
        path
        for path, content in generated_files().items()
        if not (target := ROOT / path).exists() or target.read_text(encoding="utf-8") != content
    ]
    assert not old, f"run: {COMMAND}"
