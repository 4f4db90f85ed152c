"""Each row of the coverage table names tests that exist, or a reason in plain words."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from pydantic import ValidationError

from tests.kit.coverage import Row, has_test, read_coverage
from tests.kit.repository import ROOT

TABLE = read_coverage()


def test_rows_have_tests_that_exist_or_a_reason() -> None:
    gone = {row.feature: [n for n in row.tests if not has_test(n)] for row in TABLE.rows}
    assert {feature: nodes for feature, nodes in gone.items() if nodes} == {}
    for row in TABLE.rows:
        assert len(set(row.tests)) == len(row.tests), row.feature
        assert set(row.systems) <= set(TABLE.systems), row.feature
        for text in (row.feature, row.reason, row.note):
            assert "|" not in text, f"it would end the cell: {text}"
            assert text.count("`") % 2 == 0, text


def test_nothing_is_listed_twice_and_every_system_has_a_row() -> None:
    assert [name for name, n in Counter(row.feature for row in TABLE.rows).items() if n > 1] == []
    assert {name for row in TABLE.rows for name in row.systems} == set(TABLE.systems)
    titles = [group.title for group in TABLE.groups]
    assert len(set(titles)) == len(titles)


def test_the_page_counts_what_it_lists() -> None:
    page = (ROOT / "docs/coverage.md").read_text(encoding="utf-8")
    counts = Counter(row.state for row in TABLE.rows)
    said = re.search(r"(\d+) work, (\d+) work partly, (\d+) are not here", page)
    assert said is not None
    assert tuple(map(int, said.groups())) == (counts["works"], counts["partly"], counts["not here"])
    for row in TABLE.rows:
        (line,) = re.findall(rf"^\| {re.escape(row.feature)} \|.*$", page, re.MULTILINE)
        assert f" | {row.state} | " in line
        assert row.reason in line
        assert row.note in line
        assert all(f"`{node}`" in line for node in row.tests)


@pytest.mark.parametrize(
    "row",
    [
        {"state": "works"},
        {"state": "works", "tests": ["a.py::test_a"], "reason": "Why, so."},
        {"state": "partly", "tests": ["a.py::test_a"]},
        {"state": "partly", "reason": "Why, so."},
        {"state": "partly", "tests": ["a.py::test_a"], "reason": "Why, so.", "note": "And so."},
        {"state": "not here"},
        {"state": "not here", "tests": ["a.py::test_a"], "reason": "Why, so."},
        {"state": "soon", "reason": "Why, so."},
        {"state": "works", "test": ["a.py::test_a"]},
    ],
)  # fmt: skip
def test_a_row_without_what_its_state_needs_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Row.model_validate({"feature": "f", "systems": ["s"], **row})


def test_a_test_that_is_not_there_is_missed() -> None:
    here = "text/test_coverage.py"
    assert has_test(f"{here}::test_a_test_that_is_not_there_is_missed")
    assert not has_test(f"{here}::test_of_another_name")
    assert not has_test("contracts/test_nowhere.py::test_a")
    assert not has_test(f"{here}::has_test")
    assert not has_test("kit/coverage.py::has_test")
