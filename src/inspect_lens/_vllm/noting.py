"""What notes things beside the work, metrics and spans: free where it is off, and never a fault."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Concatenate, Generic, ParamSpec, TypeVar

__all__ = ["KINDS", "Holder"]

logger = logging.getLogger("vllm.inspect_lens")

KINDS = ("capture", "edit", "probe", "lens", "qk", "hook")
"""What a request may ask for, each the value of a label."""

T = TypeVar("T")
P = ParamSpec("P")


class Holder(Generic[T]):
    """Holds what notes things in this process, once there is somebody to read them."""

    def __init__(self, what: str) -> None:
        """Begin with nothing."""
        self._what = what
        self.made: T | None = None

    def guarded(self, note: Callable[Concatenate[T, P], None]) -> Callable[P, None]:
        """Make a function do nothing where nothing is held, and never raise."""

        @functools.wraps(note)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            if (made := self.made) is None:
                return
            try:
                note(made, *args, **kwargs)
            except Exception:
                # Once: what fails for one request would for all.
                self.made = None
                logger.exception("inspect_lens: %s are off from now on", self._what)

        return run
