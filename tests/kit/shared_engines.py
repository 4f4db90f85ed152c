"""Hands tests to several processes so that those with one engine of the session stay together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from .repository import ROOT

__all__ = ["SharedEngines", "group_of", "longest_first"]

_GROUPS = {
    "shared": r"\boffline_llm\b|\blens_server_url\b",
    "compiled": r"\A(?![\s\S]*^def engine\()[\s\S]*^def test_[^)]*\bengine: Engine\b",
}
"""By group, what a file of tests says that uses an engine of the session."""

_SECONDS = {
    "shared": 500,
    "shared of tests/e2e": 400,
    "compiled": 200,
    "tests/engine/test_hosts.py": 300,
    "tests/e2e/test_eval_benchmark.py": 107,
    "tests/engine/test_unused.py": 96,
    "tests/engine/test_server_sinks.py": 90,
    "tests/engine/test_api_servers.py": 90,
    "tests/engine/test_quantised.py": 80,
    "tests/engine/test_architectures.py": 90,
    "tests/engine/test_kills.py": 80,
    "tests/engine/test_soak.py": 80,
    "tests/unit/wheel/test_wheel.py": 60,
    "tests/e2e/test_organism_agent.py": 60,
    "tests/engine/test_connectors.py": 40,
    "tests/engine/test_step_rows.py": 40,
}
"""By group, about what it takes, where the number of its tests does not tell."""
_SECONDS_OF_A_TEST = 5


class SharedEngines(LoadScopeScheduling):  # type: ignore[misc]
    """Tests by the engine that they share; each file without one is a group of its own."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        # Else groups of many tests go first, and a long one that is left ends alone.
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    """The group of a test, or its file.

    In `tests/docs` a file has tests of all kinds, so there it is the function that tells.

    Args:
        nodeid: the test, by the path of its file in this repository.
    """
    file, _, test = nodeid.partition("::")
    return _group_of(file, test.partition("[")[0] if file.startswith("tests/docs/") else "")


@cache
def _group_of(file: str, function: str) -> str:
    text = (ROOT / file).read_text(encoding="utf-8")
    if function:
        found = re.search(rf"^def {function}\([^)]*\)", text, re.M)
        text = found[0] if found else ""
    name = next((name for name, says in _GROUPS.items() if re.search(says, text, re.M)), file)
    if name == "shared" and file.startswith("tests/e2e/") and "offline_llm" not in text:
        # Another start is cheaper than a process that is still busy when all others have ended.
        return "shared of tests/e2e"
    return name


def longest_first(nodeids: Sequence[str]) -> list[int]:
    """The order in which tests are handed out.

    Args:
        nodeids: the tests.

    Returns:
        Indices: those of groups that take long first, and of one group as they were.
    """
    groups = [group_of(one) for one in nodeids]
    counted = Counter(groups)
    seconds = {group: _SECONDS.get(group, n * _SECONDS_OF_A_TEST) for group, n in counted.items()}
    return sorted(range(len(groups)), key=lambda i: (-seconds[groups[i]], groups[i]))
