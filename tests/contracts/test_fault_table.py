"""Every row of the table of faults names a test that is there."""

from __future__ import annotations

import ast
import re

import pytest

from tests.kit.repository import ROOT

PAGE = ROOT / "docs/how-to/serve.md"
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")
FILES = sorted((ROOT / "tests").rglob("test_*.py"))


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


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.split("|")[1].strip()[:60])
def test_a_row_names_tests_that_exist(row: str) -> None:
    last = row.rstrip().rstrip("|").rpartition("|")[2]
    named = NAMED.findall(last)
    assert named, "the last column names at least one test"
    assert NAMED.sub("", last).strip(" ,") == ""
    for file, name in named:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        trees = [ast.parse(p.read_text(encoding="utf-8")) for p in FILES if p.name == file]
        nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]
        assert name in [node.name for node in nodes], file


@pytest.mark.parametrize(
    "fault",
    [
        *("client is killed", "client stops", "client reads slowly"),
        *("API server is killed", "API server stops", "worker is killed", "worker stops"),
        *("engine is killed", "engine stops", "disk is full", "shared memory is full"),
        *("body", "registry"),
    ],
)
def test_every_fault_has_a_row(fault: str) -> None:
    assert any(fault in row.split("|")[1] for row in rows())
