"""Tutorials as notebooks, made from their pages: `python -m tests.kit.generated`.

The code cells are the blocks that tests run on the page, in the same order, so a notebook runs if
its page does. Cells show the output that the page shows.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any, Final

from .blocks import Block, read_blocks
from .repository import ROOT

__all__ = ["FOLDER", "NOTEBOOKS", "notebook_files", "read_cells"]

FOLDER: Final = "docs/notebooks"
NOTEBOOKS: Final = {
    "train-an-honest-probe": "docs/how-to/probe.md",
    "steer-with-controls": "docs/how-to/vectors.md",
}
"""Page of each notebook."""

_FENCE = re.compile(r"^```(?P<info>\S.*)?$")
_DARK = re.compile(r"^!\[[^\]]*\]\([^)]*#only-dark\)\n", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(?!https?:|#)(?P<path>[^)#]+)(?P<anchor>#[^)]*)?(?=\))")
_MARK = re.compile(r"^\s*<!-- .* -->\s*$")

_SETUP = """\
# Paths are those of a clone: go to its root.
import os
from pathlib import Path

os.chdir(next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "organism/checkpoint").exists()))
"""
_SITES = 'os.environ["INSPECT_LENS_SITES"] = "all"  # the vector is for the attention\'s output\n'


def notebook_files() -> dict[str, str]:
    """Content of each notebook, by path from the root."""
    return {f"{FOLDER}/{name}.ipynb": _notebook(Path(page)) for name, page in NOTEBOOKS.items()}


def read_cells(name: str) -> list[dict[str, Any]]:
    """Cells of a committed notebook."""
    made = json.loads((ROOT / FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    cells: list[dict[str, Any]] = made["cells"]
    return cells


def _notebook(page: Path) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    intro, *parts = _parts(page, text)
    setup = _SETUP + (_SITES if "INSPECT_LENS_SITES" in text else "")
    cells = [intro, _code(setup), *parts]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    made = {
        "cells": [dict(sorted(cell.items())) for cell in cells],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _parts(page: Path, text: str) -> list[dict[str, Any]]:
    """Cells of a page; the first is text."""
    blocks = {block.line: block for block in read_blocks(page)}
    lines = text.splitlines()
    cells: list[dict[str, Any]] = []
    said: list[str] = []
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        if fence is None:
            if not _MARK.match(lines[number]):
                said.append(lines[number])
            number += 1
            continue
        end = next(i for i in range(number + 1, len(lines)) if lines[i] == "```")
        block = blocks.get(number + 1)
        if block is not None and _runs(block):
            cells += _text(page, said)
            said = []
            cells.append(_code(_source(block), block.output))
        elif "<!-- output -->" not in lines[number - 1]:
            said += lines[number : end + 1]
        number = end + 1
    return cells + _text(page, said)


def _runs(block: Block) -> bool:
    """Commands that only have their options checked may wait for ever, so they are text."""
    return block.language == "python" or block.mode != "run"


def _source(block: Block) -> str:
    return block.code if block.language == "python" else f"%%bash\n{block.code}"


def _text(page: Path, lines: list[str]) -> list[dict[str, Any]]:
    text = re.sub(r"\n{3,}", "\n\n", _DARK.sub("", "\n".join(lines) + "\n")).strip()
    if not text:
        return []

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(page.parent.as_posix(), match["path"]))
        anchor = (match["anchor"] or "").replace("#only-light", "")
        return posixpath.relpath(target, FOLDER) + anchor

    return [{"cell_type": "markdown", "metadata": {}, "source": _lines(_LINK.sub(moved, text))}]


def _code(source: str, output: str = "") -> dict[str, Any]:
    shown = {"name": "stdout", "output_type": "stream", "text": _lines(output + "\n")}
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [shown] if output else [],
        "source": _lines(source.rstrip("\n")),
    }


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)
