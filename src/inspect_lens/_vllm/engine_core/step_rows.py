"""No more prompt tokens in a step than the capture buffer has room for.

A tap copies rows inside a compiled graph to addresses that stay, so the rows of a step have to fit
the buffer before the step runs. Layers times tokens of a step may be far more than it has: 33 taps
and 16384 tokens need half a million rows. The scheduler cuts prompts into chunks anyhow. So while
prompts whose rows are kept are fed, and only where their rows could be too many, it gets a lower
limit for the tokens of a step. The buffer has room for one token of every sequence at all taps
(`facts_of`), so requests that sample never wait.

An engine whose buffer holds its largest step is left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from inspect_lens._engine.protocol.envelope import KEPT_KEY
from inspect_lens._settings import Settings
from inspect_lens._vllm.compat.engine_facts import facts_of, refusal
from inspect_lens.spec import ENVELOPE_KEY

logger = logging.getLogger("vllm.inspect_lens")

_ATTRIBUTE = "inspect_lens_rows"


class StepRows:
    """How many tokens the next step may have, of one scheduler."""

    def __init__(self, *, rows: int, taps: int, most: int, least: int) -> None:
        self._rows, self._taps, self._most, self._least = rows, taps, most, least
        # What those may fill that feed one token, and drafts.
        self._free = rows - least * taps
        self._prompts: dict[str, tuple[Any, int, int, int]] = {}
        """Requests that may feed many tokens whose rows are kept: rows of a token, and first and
        one past the last position."""
        self._most_taps = 0
        """Of one of them."""

    def add(self, request: Any) -> None:
        """Take note of a request that is about to feed its prompt, or to feed it again."""
        extra = getattr(request.sampling_params, "extra_args", None)
        kept = (extra.get(ENVELOPE_KEY) or {}).get(KEPT_KEY) if extra else None
        if kept is None or self._most * self._taps <= self._rows:
            return
        taps, lo, hi = kept
        self._prompts[request.request_id] = request, taps, lo, hi
        self._most_taps = max(self._most_taps, taps)

    def limit(self) -> int:
        """Tokens that the next step may have."""
        free, over = self._free, []
        for key, (request, taps, lo, hi) in self._prompts.items():
            left = min(hi, request.num_tokens) - max(lo, request.num_computed_tokens)
            if left <= 1 or request.is_finished():
                over.append(key)  # it feeds one token a step from now on
                continue
            free -= min(left, self._most) * taps
            if free < 0:
                break
        for key in over:
            del self._prompts[key]
        if free >= 0:
            return self._most
        fitting = max(self._free // self._most_taps, self._rows // self._taps, self._least)
        return min(fitting, self._most)

    @property
    def is_idle(self) -> bool:
        """Whether no prompt is fed whose rows are kept."""
        return not self._prompts


def _rows_of(scheduler: Any) -> StepRows:
    """The rows of a scheduler's steps, worked out when they are first asked for."""
    found: StepRows | None = getattr(scheduler, _ATTRIBUTE, None)
    if found is None:
        config, most = scheduler.vllm_config, int(scheduler.max_num_scheduled_tokens)
        if refusal(config) is not None:
            found = StepRows(rows=1, taps=0, most=most, least=most)
        else:
            facts = facts_of(config, Settings.load())
            found = StepRows(
                rows=facts.ring_rows,
                taps=facts.rows_of(facts.taps),
                most=most,
                least=facts.least_step_tokens or most,
            )
        setattr(scheduler, _ATTRIBUTE, found)
    return found


def _schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows: StepRows | None = getattr(self, _ATTRIBUTE, None)
        if rows is None or rows.is_idle:
            return original(self, *args, **kwargs)
        most = self.max_num_scheduled_tokens
        try:
            try:
                self.max_num_scheduled_tokens = min(most, rows.limit())
            except Exception:
                # The worker fails those whose rows do not fit.
                logger.exception("inspect_lens: a step's rows could not be counted")
            return original(self, *args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = most

    return schedule


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    def note(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, request, *args, **kwargs)
        try:
            sampling = request.sampling_params
            if sampling is not None and ENVELOPE_KEY in (sampling.extra_args or {}):
                _rows_of(self).add(request)
        except Exception:
            logger.exception("inspect_lens: a request's rows could not be counted")
        return result

    return note


SCHEDULER_WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "schedule": _schedule,
    "scheduler_add": _noting,
    "scheduler_preempt": _noting,
}
"""Wrapper by name of the monkeypatch."""
