"""Regular expressions of requests: judged, compiled and run by RE2, in bounded time and memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

from inspect_lens.errors import SpecError
from inspect_lens.spec.values._strict import shown

__all__ = ["PatternBudget"]

MOST_PATTERN: Final = 1000
"""Characters of a pattern."""
MOST_PATTERNS: Final = 16
"""Different ones in a request."""
MOST_CHARACTERS: Final = 2000
"""Of all of them."""
MOST_SECONDS: Final = 0.25
"""For all patterns on all prompts of one body."""
MOST_WORK: Final = 1 << 26
"""Instructions of a compiled pattern times bytes of a prompt: a search takes that many steps where
its automaton does not fit into memory, and cannot be interrupted."""
_MEMORY: Final = 1 << 19
"""Bytes of one compiled pattern; `re2.compile` keeps 128 of them."""

SYNTAX: Final = (
    "patterns have the syntax of RE2, which has no look-around, no back-references and repeats at "
    "most 1000 times"
)


def _compiled(pattern: str) -> Any:
    import re2

    options = re2.Options()
    options.max_mem = _MEMORY
    options.log_errors = False
    options.never_capture = True  # only whole matches are asked for
    return re2.compile(pattern, options)


def check_pattern(pattern: str) -> str:
    """The pattern, if it can be run."""
    import re2

    if not 0 < len(pattern) <= MOST_PATTERN:
        raise ValueError(f"has {len(pattern)} characters; give 1 to {MOST_PATTERN}")
    try:
        _compiled(pattern)
    except UnicodeEncodeError:
        raise ValueError(f"{shown(pattern)} holds half of a surrogate pair") from None
    except re2.error as error:
        why = error.args[0].decode(errors="replace") if error.args else "cannot be compiled"
        if "too large" in why:
            why = "it is too large once its classes and repetitions are written out"
        raise ValueError(
            f"{shown(pattern)} is no regular expression that can be run here: {shown(why)}; "
            f"{SYNTAX}. Use a simpler pattern, or give token_ids or positions"
        ) from None
    return pattern


def check_patterns(patterns: Iterable[str | None]) -> None:
    """Judge all patterns of a request together; each alone was judged by `check_pattern`."""
    distinct = {pattern for pattern in patterns if pattern is not None}
    n = sum(map(len, distinct))
    if len(distinct) > MOST_PATTERNS or n > MOST_CHARACTERS:
        raise ValueError(
            f"positions.pattern: {len(distinct)} different patterns of {n} characters together; a "
            f"request has at most {MOST_PATTERNS}, of {MOST_CHARACTERS} characters; join them with "
            "|, or give token_ids or positions"
        )


class PatternBudget:
    """The time that patterns of one body may take, however many prompts it has."""

    def __init__(self) -> None:
        self._left_s = MOST_SECONDS
        self.prompts: dict[tuple[int, ...], Any] = {}
        """What is known of prompts of the body: a server asks for each before its answer begins,
        and where it is sealed."""

    def spans(self, pattern: str, text: str, *, field: str) -> Iterator[tuple[int, int]]:
        """Where a pattern matches: begin and end in characters, matches of no text left out."""
        compiled = _compiled(pattern)
        work = int(compiled.programsize) * len(text.encode())
        if work > MOST_WORK:
            raise SpecError(
                f"{field}.pattern: {compiled.programsize} instructions of {shown(pattern)} on a "
                f"prompt of {len(text)} characters are {work} steps, and {MOST_WORK} is the most; "
                "narrower classes and fewer repetitions make fewer (\\pL has 1200, [A-Za-z] one); "
                "or give token_ids or positions"
            )
        # Each search is linear, but one behind each match may read the rest of the prompt.
        until = time.monotonic() + self._left_s
        try:
            for one in compiled.finditer(text):
                if time.monotonic() > until:
                    break
                start, stop = one.span()
                if stop > start:
                    yield start, stop
        finally:
            self._left_s = until - time.monotonic()
        if self._left_s <= 0:
            raise SpecError(
                f"{field}.pattern: the patterns of this request take more than {MOST_SECONDS} s "
                "on its prompts; give a simpler pattern, fewer prompts, token_ids or positions"
            )
