"""A pytest plug-in: where vLLM only says that an engine did not start, the report says why.

The cause is in what the engine's process printed, which pytest captured and few people keep.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

__all__ = ["last_error"]

_NO_CAUSE = re.compile(r"initialization failed|See (stack trace|root cause)", re.IGNORECASE)
"""Of messages that say that something went wrong elsewhere."""
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_PREFIX = re.compile(
    r"(?:\((?P<process>[\w-]+) pid=\d+\) ?)?"
    r"(?:(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[(?P<place>[^\]]+)\] ?)?"
)
_ERROR = re.compile(
    r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Unsupported)(?::|$)|Fatal Python error"
)
_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[\w.+-]+/)+")
_MAX_MORE_LINES, _MAX_LENGTH = 3, 600
_SAID = "its process said: "


def last_error(log: str) -> str:
    """The last error of an engine's log that says what went wrong, in one line and without folders.

    Args:
        log: what vLLM's processes printed.

    Returns:
        Type, message, and where it was raised; without an error the last line.
    """
    lines = [_line(line) for line in log.splitlines()]
    lines = [line for line in lines if line[1].strip()]
    errors = [i for i, (_, text) in enumerate(lines) if _ERROR.match(text)]
    errors = [i for i in errors if not _NO_CAUSE.search(lines[i][1])]
    # Behind the log of an engine's end, its helpers may complain of that.
    logged = [i for i in errors if lines[i][0][1] == "ERROR"]
    if not errors:
        return _short(lines[-1][1]) if lines else "nothing"
    at = (logged or errors)[-1]
    said = [lines[at][1]]
    for prefix, text in lines[at + 1 : at + 1 + _MAX_MORE_LINES]:
        if prefix != lines[at][0] or _ERROR.match(text) or text.startswith("Traceback"):
            break
        said.append(text.strip())
    frames = (_FRAME.match(text) for _, text in reversed(lines[:at]))
    frame = next(filter(None, frames), None)
    where = ""
    if frame:
        file = re.sub(r".*/(?:site-packages|src)/|^.*/", "", frame["file"])
        where = f" ({file}:{frame['line']}, {frame['function']})"
    return _short(" ".join(said)) + where


def _line(line: str) -> tuple[tuple[str | None, ...], str]:
    """Process, level and place, which vLLM puts in front of a line, and what is behind them."""
    line = _COLOUR.sub("", line)
    found = _PREFIX.match(line)
    assert found is not None  # all of it is optional
    return found.group("process", "level", "place"), line[found.end() :].rstrip()


def _short(text: str) -> str:
    text = " ".join(_FOLDERS.sub("", text).split())
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}…"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Put the cause into the message that the summary and files of results have."""
    report: pytest.TestReport = yield
    crash = getattr(report.longrepr, "reprcrash", None)
    if report.failed and crash is not None and _NO_CAUSE.search(crash.message):
        cause = last_error(f"{report.capstdout}\n{report.capstderr}")
        crash.message = f"{crash.message.partition(chr(10))[0]} - {_SAID}{cause}"
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print them in full: the closing lines are cut at the terminal's width."""
    for state in ("failed", "error"):
        for report in terminalreporter.stats.get(state, ()):
            crash = getattr(report.longrepr, "reprcrash", None)
            if crash is not None and _SAID in crash.message:
                terminalreporter.write_line(f"{report.nodeid}: {crash.message}")
