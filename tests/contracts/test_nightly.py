"""What `make test` leaves to the night: which tests, and what holds the same by day."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

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


@functools.cache
def every_mark() -> list[Mark]:
    """All uses; one without arguments is an attribute and no call."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [m for p in paths if "nightly" in p.read_text(encoding="utf-8") for m in marks(p)]
    said = [mark for mark in found if mark.why]
    assert len(said) * 2 == len(found) > 0, "every mark says why and what holds the same"
    return said


def test_what_holds_the_same_is_a_test_of_the_day() -> None:
    for mark in every_mark():
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
    assert sorted(rows) == sorted({(mark.file, mark.why) for mark in every_mark()})


def test_the_day_leaves_them_out_and_the_night_runs_them() -> None:
    selected = re.findall(r"\$\(PYTEST\)(?: -q)? -m \"([^\"]+)\"", MAKEFILE)
    assert [s for s in selected if "not nightly" not in s] == ["nightly and not gpu"]
    assert "make nightly" in (ROOT / ".github/workflows/nightly.yml").read_text(encoding="utf-8")


def test_tests_with_an_engine_lie_where_they_are_looked_for() -> None:
    engines, plain = (
        re.findall(rf"^{name} := (.+)$", MAKEFILE, re.MULTILINE)[0].split()
        for name in ("ENGINES", "PLAIN")
    )
    for path in (ROOT / "tests").rglob("test_*.py"):
        found, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        if "pytest.mark.engine" in text and not found.startswith("tests/contracts/"):
            assert found.startswith(tuple(engines)), found
        # `make docs` runs what tests text, `make real` what needs real weights.
        elif not found.startswith(("tests/text/", "tests/gpu/", "tests/real/")):
            assert found.startswith(tuple(plain)), found
