"""Speculative decoding: how far a request is past what may be fed again.

A step feeds one token that is certain and some drafts. Those that are rejected are fed again,
corrected, by the next step, and their rows are written a second time. So what a step writes is
settled up to its first draft, and the rest when the next step has come.
"""

from __future__ import annotations

from dataclasses import dataclass

from .step_plan import Batch

__all__ = ["Drafts"]


@dataclass
class _Request:
    n_prompt: int
    """Prompt tokens are never drafts."""
    until: int
    """Up to where it has to be reported."""
    reported: int = 0


class Drafts:
    """The requests of one worker that may be fed drafts, by slot."""

    def __init__(self) -> None:
        self._requests: dict[int, _Request] = {}
        self.running: dict[int, int] = {}
        """By slot: one past the last position that the running step settles."""

    def add(self, slot: int, n_prompt: int, until: int) -> None:
        """Follow a request.

        Args:
            slot: of the request.
            n_prompt: its prompt tokens.
            until: one past the last position that it captures or steers here.
        """
        self._requests[slot] = _Request(n_prompt, until)

    def remove(self, slot: int) -> None:
        """Forget a request; one that is not followed is fine."""
        self._requests.pop(slot, None)

    def begin(self, batch: Batch) -> None:
        """Work out what a step settles, for requests that still have to report."""
        self.running = {}
        if not self._requests:
            return
        for i, slot in enumerate(batch.slots.tolist()):
            request = self._requests.get(slot)
            if request is not None and request.reported < request.until:
                position = int(batch.position[i])
                end = position + int(batch.n_tokens[i])
                self.running[slot] = min(end, max(position + 1, request.n_prompt))
                request.reported = self.running[slot]
