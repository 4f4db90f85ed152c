"""Every row of the table of faults names a test that is there."""

from __future__ import annotations

import re

from tests.kit.coverage import has_test
from tests.kit.repository import ROOT

PAGE = ROOT / "docs/how-to/serve.md"
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def rows() -> list[str]:
    """Rows of the tables whose last column is the test."""
    found, is_ours = [], False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            is_ours = False
        elif re.search(r"\| test \|$", line):
            is_ours = True
        elif is_ours and not line.startswith("|---"):
            found.append(line)
    return found


def test_rows_name_tests_that_exist() -> None:
    files = {str(p.relative_to(ROOT / "tests")) for p in (ROOT / "tests").rglob("test_*.py")}
    for row in rows():
        last = row.rstrip().rstrip("|").rpartition("|")[2]
        named = NAMED.findall(last)
        assert named, f"the last column names at least one test: {row}"
        assert NAMED.sub("", last).strip(" ,") == "", row
        for file, name in named:
            found = [path for path in files if path.rpartition("/")[2] == file]
            assert any(has_test(f"{path}::{name}") for path in found), f"{file}::{name}"


def test_every_fault_has_a_row() -> None:
    first = [row.split("|")[1] for row in rows()]
    for fault in (
        *("client is killed", "client stops", "client reads slowly"),
        *(
            "API servers is killed",
            "only API server is killed",
            "API server stops",
            "worker is killed",
            "worker stops",
        ),
        *("engine is killed", "engine stops", "disk is full", "shared memory is full"),
        *("body", "registry"),
    ):
        assert any(fault in said for said in first), fault
