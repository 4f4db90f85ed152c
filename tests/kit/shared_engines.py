"""Hands tests to several processes so that those with one engine of the session stay together."""

from __future__ import annotations

import re
from functools import cache

from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from .repository import ROOT

__all__ = ["SharedEngines", "group_of"]

_GROUPS = {
    "server": r"\b(lens_server_url|offline_llm)\b",
    "compiled": r"\bengine: Engine\b|\bfresh: Fresh\b",
}
"""By group, what a file of tests says that uses an engine of the session."""


class SharedEngines(LoadScopeScheduling):  # type: ignore[misc]
    """Files of tests by the engine that they share; each other file is a group of its own."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0])


@cache
def group_of(file: str) -> str:
    """The group of a file of tests.

    Args:
        file: its path in this repository.
    """
    text = (ROOT / file).read_text(encoding="utf-8")
    return next((name for name, says in _GROUPS.items() if re.search(says, text)), file)
