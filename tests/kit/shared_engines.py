"""Hands tests to several processes so that those with one engine of the session stay together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from .repository import ROOT

__all__ = ["SharedEngines", "group_of", "longest_first"]

_GROUPS = {
    "offline": r"\boffline_llm\b",
    "server": r"\blens_server_url\b",
    "compiled": r"\A(?![\s\S]*^def engine\()[\s\S]*^def test_[^)]*\bengine: Engine\b",
}
"""By group, what a file of tests says that uses an engine of the session."""

_SECONDS = {
    "offline": 330,
    "server tests/e2e": 400,
    "server tests/engine": 200,
    "compiled": 200,
    "tests/engine/test_hosts.py": 110,
    "tests/e2e/test_eval_benchmark.py": 107,
    "tests/engine/test_unused.py": 96,
    "tests/engine/test_server_sinks.py": 90,
    "tests/engine/test_api_servers.py": 90,
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
    """Files of tests by the engine that they share; each other file is a group of its own."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        # Else groups of many tests go first, and a long one that is left ends alone.
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0])


@cache
def group_of(file: str) -> str:
    """The group of a file of tests.

    Args:
        file: its path in this repository.
    """
    text = (ROOT / file).read_text(encoding="utf-8")
    name = next((name for name, says in _GROUPS.items() if re.search(says, text, re.M)), file)
    # Another start is cheaper than a process that is still busy when all others have ended.
    return f"{name} {Path(file).parent}" if name == "server" else name


def longest_first(files: Sequence[str]) -> list[int]:
    """The order in which tests are handed out.

    Args:
        files: of each test, its path in this repository.

    Returns:
        Indices: those of groups that take long first, and of one group as they were.
    """
    groups = [group_of(file) for file in files]
    seconds = {
        group: _SECONDS.get(group, n * _SECONDS_OF_A_TEST) for group, n in Counter(groups).items()
    }
    return sorted(range(len(files)), key=lambda i: (-seconds[groups[i]], groups[i]))
