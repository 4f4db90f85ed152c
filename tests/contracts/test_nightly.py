"""What `make test` leaves to the night: which tests, and what holds the same by day."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.kit.repository import ROOT

PAGE = (ROOT / "docs/contributing.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


class Mark(NamedTuple):
    """A use of `pytest.mark.nightly`."""

    file: str
    held_by: tuple[str, ...]
    why: str


def marks(path: Path) -> list[Mark]:
    """Uses in a file of tests."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr == "nightly":
            found.append(Mark(str(path.relative_to(ROOT)), (), ""))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.nightly":
            given = {word.arg: ast.literal_eval(word.value) for word in node.keywords}
            held_by = given["held_by"]
            names = (held_by,) if isinstance(held_by, str) else tuple(held_by)
            found.append(Mark(str(path.relative_to(ROOT)), names, given["why"]))
    return found


ALL = [mark for path in sorted((ROOT / "tests").rglob("test_*.py")) for mark in marks(path)]
MARKS = [mark for mark in ALL if mark.why]


def test_every_mark_says_why_and_what_holds_the_same() -> None:
    # A mark without arguments is an attribute and no call.
    assert len(MARKS) * 2 == len(ALL) > 0


@pytest.mark.parametrize("mark", MARKS, ids=lambda mark: mark.file)
def test_what_holds_the_same_is_a_test_of_the_day(mark: Mark) -> None:
    assert mark.held_by
    for name in mark.held_by:
        file, _, function = name.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        (node,) = (
            n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function
        )
        assert not any("nightly" in ast.unparse(one) for one in node.decorator_list), name


def test_the_table_lists_all_of_them() -> None:
    rows = re.findall(r"^\| `(tests/\S+\.py)`[^|]*\| ([^|]+) \|", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted({(mark.file, mark.why) for mark in MARKS})


def test_the_day_leaves_them_out_and_the_night_runs_them() -> None:
    selected = re.findall(r"\$\(PYTEST\)(?: -q)? -m \"([^\"]+)\"", MAKEFILE)
    assert [s for s in selected if "not nightly" not in s and "not engine" not in s] == [
        "nightly and not gpu"
    ]
    assert "make nightly" in (ROOT / ".github/workflows/nightly.yml").read_text(encoding="utf-8")


def test_tests_with_an_engine_lie_where_they_are_looked_for() -> None:
    (line,) = re.findall(r"^ENGINES := (.+)$", MAKEFILE, re.MULTILINE)
    folders = tuple(f"{folder}/" for folder in line.split())
    elsewhere = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.engine" in path.read_text(encoding="utf-8")
        and not str(path.relative_to(ROOT)).startswith((*folders, "tests/contracts/"))
    ]
    assert not elsewhere
