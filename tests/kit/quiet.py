"""What nobody sees is not drawn: Inspect draws tasks and tracebacks also when it is quiet.

It took a third of the time of tests that run evals.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text
from rich.traceback import Traceback

__all__ = ["draw_nothing_in_quiet"]

_print = Console.print


def draw_nothing_in_quiet() -> None:
    """Make a quiet console of `rich` print nothing at once, and a traceback one line."""
    console: Any = Console
    console.print = _print_if_seen
    traceback: Any = Traceback
    traceback.__rich_console__ = _last_line


def _print_if_seen(self: Console, *objects: Any, **options: Any) -> None:
    if not self.quiet:
        _print(self, *objects, **options)


def _last_line(self: Traceback, console: Console, options: Any) -> Any:
    for stack in self.trace.stacks:
        yield Text(f"{stack.exc_type}: {stack.exc_value}")
