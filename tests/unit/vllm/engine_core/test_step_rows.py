"""Steps are cut so that the rows that are kept fit the capture buffer, whoever shares them."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inspect_lens._engine.protocol.messages import KEPT_KEY
from inspect_lens._vllm.engine_core import SCHEDULER_WRAPPERS, StepRows
from inspect_lens.spec import ENVELOPE_KEY

TAPS, SEQS = 5, 4


class Request(SimpleNamespace):
    """What is read of vLLM's requests."""

    def is_finished(self) -> bool:
        return bool(self.finished)


def request(key: str, n_prompt: int, kept: tuple[int, int, int] | None) -> Request:
    extra = {} if kept is None else {ENVELOPE_KEY: {KEPT_KEY: kept}}
    return Request(
        request_id=key,
        sampling_params=SimpleNamespace(extra_args=extra),
        num_tokens=n_prompt,
        num_computed_tokens=0,
        finished=False,
        kept=kept,
    )


asked = st.tuples(
    st.integers(1, 90),
    st.none()
    | st.tuples(st.integers(1, TAPS), st.integers(0, 60), st.integers(0, 80)).map(
        lambda v: (v[0], v[1], v[1] + v[2])
    ),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(asked, min_size=1, max_size=12), st.integers(SEQS * TAPS, 200), st.integers(0, 99))
def test_no_step_keeps_more_rows_than_there_are_and_everybody_ends(
    requests: list[Any], rows: int, seed: int
) -> None:
    """A scheduler as vLLM's: those that run first, in order, then those that wait."""
    chance = random.Random(seed)
    most = 64
    counts = StepRows(rows=rows, taps=TAPS, most=most, least=SEQS)
    waiting = [request(str(i), n, kept) for i, (n, kept) in enumerate(requests)]
    for one in waiting:
        counts.add(one)
    running: list[Request] = []
    for _ in range(2000):
        if not waiting and not running:
            break
        budget = most if counts.is_idle else counts.limit()
        assert SEQS <= budget <= most
        used = 0
        for one in running + waiting[: SEQS - len(running)]:
            n = min(one.num_tokens - one.num_computed_tokens, budget)
            if not n:
                # All that sample do so in every step.
                assert one.num_tokens - one.num_computed_tokens > 1 or one in waiting
                continue
            budget -= n
            if one in waiting:
                waiting.remove(one)
                running.append(one)
            if one.kept is not None:
                taps, lo, hi = one.kept
                a = max(lo, one.num_computed_tokens)
                used += taps * max(0, min(hi, one.num_computed_tokens + n) - a)
            one.num_computed_tokens += n
            if one.num_computed_tokens == one.num_tokens:
                one.num_tokens += 1
                one.finished = chance.random() < 0.3
        assert used <= rows
        running = [one for one in running if not one.finished]
        if running and chance.random() < 0.1:
            again = running.pop()
            again.num_computed_tokens = 0
            waiting.insert(0, again)
            counts.add(again)
    assert not waiting
    assert not running


def test_an_engine_whose_buffer_holds_its_largest_step_is_left_alone() -> None:
    counts = StepRows(rows=64 * TAPS, taps=TAPS, most=64, least=SEQS)
    counts.add(request("a", 1000, (TAPS, 0, 2000)))
    assert counts.is_idle


def test_few_rows_do_not_cut_the_steps_of_others() -> None:
    counts = StepRows(rows=100, taps=TAPS, most=64, least=SEQS)
    counts.add(request("last", 60, (TAPS, 59, 90)))
    counts.add(request("few", 10, (TAPS, 0, 10)))
    assert counts.limit() == 64
    counts.add(request("many", 60, (TAPS, 0, 60)))
    assert counts.limit() == 20


class Scheduler:
    """What is wrapped of vLLM's scheduler."""

    max_num_scheduled_tokens = 64

    def __init__(self) -> None:
        self.inspect_lens_rows = StepRows(rows=40, taps=TAPS, most=64, least=SEQS)
        self.seen: list[int] = []

    def add_request(self, request: Any) -> None:
        """Nothing but what the wrapper does."""

    def schedule(self) -> None:
        self.seen.append(self.max_num_scheduled_tokens)
        if len(self.seen) == 3:
            raise RuntimeError("vLLM's own")


def test_the_limit_holds_for_one_step_and_a_fault_of_ours_stays_ours() -> None:
    add = SCHEDULER_WRAPPERS["scheduler_add"](Scheduler.add_request)
    schedule = SCHEDULER_WRAPPERS["schedule"](Scheduler.schedule)
    scheduler = Scheduler()
    schedule(scheduler)
    add(scheduler, request("a", 60, (TAPS, 0, 60)))
    add(scheduler, request("plain", 60, None))
    add(scheduler, SimpleNamespace(sampling_params=None))
    schedule(scheduler)
    with pytest.raises(RuntimeError, match="own"):
        schedule(scheduler)
    assert scheduler.seen == [64, 8, 8]
    assert scheduler.max_num_scheduled_tokens == 64
    broken = SimpleNamespace(sampling_params=SimpleNamespace(extra_args={ENVELOPE_KEY: 3}))
    add(scheduler, broken)
    odd = request("odd", 60, (TAPS, 0, 60))
    add(scheduler, odd)
    del odd.num_tokens, scheduler.inspect_lens_rows._prompts["a"]
    schedule(scheduler)
    assert scheduler.seen[3:] == [64]
