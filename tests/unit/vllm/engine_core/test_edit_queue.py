"""Requests whose edits do not fit the table wait, in order, instead of being refused."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inspect_lens._engine.protocol.messages import Envelope, seal
from inspect_lens._engine.tap.edit_table import Placements, Steering
from inspect_lens._vllm.engine_core import SCHEDULER_WRAPPERS, EditQueue, StepRows, kept_back
from inspect_lens.errors import CapacityError
from inspect_lens.spec import ENVELOPE_KEY, Add, EngineFacts, Gate, LensRequest
from tests.kit.edit_cases import WIDTH
from tests.kit.edit_table import LAYERS, facts

SEQS = 4


class Request(SimpleNamespace):
    """What is read of vLLM's requests."""

    def __lt__(self, other: Request) -> bool:
        return bool((self.priority, self.arrival) < (other.priority, other.arrival))


def request(
    key: str,
    seeds: tuple[int, ...],
    known: EngineFacts,
    *,
    positions: Any = "all",
    when: Gate | None = None,
    max_tokens: int = 4,
) -> Request:
    """One that adds some vectors to all layers; seeds say which."""
    edits = [
        Add(
            vector=np.random.default_rng(seed).standard_normal(WIDTH).astype("f4"),
            layers=LAYERS,
            positions=positions,
            when=when,
        )
        for seed in seeds
    ]
    extra: dict[str, Any] = {}
    if edits:
        asked = LensRequest(edits=tuple(edits))
        envelope = seal(asked, known, reply="r", n_prompt=9, max_tokens=max_tokens)
        extra[ENVELOPE_KEY] = dict(envelope.pack())
    return Request(
        request_id=key,
        sampling_params=SimpleNamespace(extra_args=extra),
        is_edited=bool(edits),
        priority=0,
        arrival=int(key),
    )


class Heap:
    """vLLM's queue by priority, as far as it is used."""

    def __init__(self) -> None:
        self.found: list[Request] = []

    def __iter__(self) -> Any:
        return iter(sorted(self.found))

    def __len__(self) -> int:
        return len(self.found)

    def add(self, one: Request) -> None:
        self.found.append(one)

    def pop(self) -> Request:
        first = min(self.found)
        self.found.remove(first)
        return first

    def remove_requests(self, requests: list[Request]) -> None:
        self.found = [one for one in self.found if one not in requests]

    def prepend_requests(self, requests: list[Request]) -> None:
        self.found += requests


class Queue(deque[Request]):
    """vLLM's queue by arrival, as far as it is used."""

    add, pop = deque.append, deque.popleft

    def remove_requests(self, requests: list[Request]) -> None:
        gone = set(map(id, requests))
        kept = [one for one in self if id(one) not in gone]
        self.clear()
        self.extend(kept)


class Scheduler:
    """vLLM's, and a worker behind it that has the real table."""

    def __init__(self, known: EngineFacts, waiting: Any, **options: Any) -> None:
        self.waiting, self.running = waiting, []
        self.max_num_running_reqs, self.max_num_scheduled_tokens = SEQS, 64
        self.finished_req_ids: set[str] = set()
        self.inspect_lens_rows = StepRows(rows=64, taps=3, most=64, least=SEQS)
        now = options.pop("now", lambda: 0.0)
        queue = {"most_s": 60.0, "most_waiting": 1000} | options
        self.inspect_lens_edits = EditQueue(known, now=now, **queue)
        self.table = Placements(known.bank_rows + 1, WIDTH, [(0, WIDTH)] * 3)
        self.tap_index = {tap: i for i, tap in enumerate(known.taps)}
        self.held: dict[str, Steering] = {}
        self.began: list[str] = []
        self.refused: list[str] = []

    def add_request(self, one: Request) -> None:
        self.waiting.add(one)

    def preempt(self, one: Request) -> None:
        """Put a running request back, in front."""

    def schedule(self) -> Any:
        """One step, and what the worker does of it: first it lets go, then it takes up."""
        for key in self.finished_req_ids:
            if (steering := self.held.pop(key, None)) is not None:
                self.table.release(steering)
                self.table.drop_history(key)
        self.finished_req_ids = set()
        new = []
        while len(self.waiting) and len(self.running) < SEQS:
            one = self.waiting.pop()
            self.running.append(one)
            new.append(SimpleNamespace(req_id=one.request_id))
            self.began.append(one.request_id)
            if one.is_edited:
                envelope = Envelope.unpack(one.sampling_params.extra_args[ENVELOPE_KEY])
                try:
                    self.held[one.request_id] = self.table.admit(envelope, self.tap_index)
                    self.table.keep_history(one.request_id, 0, envelope, self.tap_index)
                except CapacityError:
                    self.refused.append(one.request_id)
        return SimpleNamespace(scheduled_new_reqs=new)

    def end(self, one: Request) -> None:
        """A request is over, or was cancelled while it waits."""
        if one in self.running:
            self.running.remove(one)
        else:
            self.waiting.remove_requests([one])
        self.finished_req_ids.add(one.request_id)


add = SCHEDULER_WRAPPERS["scheduler_add"](Scheduler.add_request)
step = SCHEDULER_WRAPPERS["schedule"](Scheduler.schedule)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 8), max_size=3).map(tuple), min_size=1, max_size=16),
    st.integers(3, 7),
    st.booleans(),
    st.integers(0, 99),
)
def test_no_request_is_refused_all_end_and_edited_ones_start_in_order(
    asked: list[tuple[int, ...]], rows: int, is_heap: bool, seed: int
) -> None:
    known, chance = facts(bank_rows=rows), random.Random(seed)
    scheduler = Scheduler(known, Heap() if is_heap else Queue())
    # Some have a gate that keeps decisions, in up to all rows but two side by side.
    gate = Gate(direction=np.ones(WIDTH), layer=0, scope="next")
    gated = {"positions": "completion", "when": gate}
    requests = [
        request(str(i), seeds, known)
        if len(seeds) != 1 or chance.random() < 0.3
        else request(
            str(i), seeds, known, max_tokens=chance.randrange(2, WIDTH * (rows - 2) - 7), **gated
        )
        for i, seeds in enumerate(asked)
    ]
    for one in requests:
        add(scheduler, one)
    cancelled = {one.request_id for one in requests if chance.random() < 0.1}
    for one in requests:
        if one.request_id in cancelled:
            scheduler.end(one)
    for _ in range(200):
        if not scheduler.running and not len(scheduler.waiting):
            break
        before = [one.request_id for one in scheduler.waiting]
        step(scheduler)
        # A queue keeps its order, whatever was taken out of it for the step.
        left = [one.request_id for one in scheduler.waiting]
        assert left == [key for key in before if key in left]
        for one in [one for one in scheduler.running if chance.random() < 0.4]:
            scheduler.end(one)
    assert sorted(scheduler.began) == sorted(
        one.request_id for one in requests if one.request_id not in cancelled
    )
    assert scheduler.refused == []
    edited = [int(key) for key in scheduler.began if requests[int(key)].is_edited]
    assert edited == sorted(edited)
    step(scheduler)
    assert scheduler.inspect_lens_edits.is_idle
    assert not scheduler.inspect_lens_edits._contents
    assert scheduler.inspect_lens_edits._most == 0


def test_what_waits_keeps_nobody_without_edits_waiting_and_fits_when_rows_are_given_back() -> None:
    known = facts(bank_rows=3)
    scheduler = Scheduler(known, Queue())
    # Layers share vectors and instructions.
    large, second, plain, small = (
        request(str(i), seeds, known) for i, seeds in enumerate([(1, 2), (3, 4), (), (5,)])
    )
    for one in (large, second, plain, small):
        add(scheduler, one)
    step(scheduler)
    assert scheduler.began == ["0", "2"], "the small one does not pass the second"
    step(scheduler)
    scheduler.end(plain)
    step(scheduler)
    assert scheduler.began == ["0", "2"]
    scheduler.end(large)
    step(scheduler)
    assert scheduler.began == ["0", "2", "1", "3"]
    assert scheduler.refused == []


def test_what_requests_have_in_common_is_counted_once() -> None:
    known = facts(bank_rows=3)
    scheduler = Scheduler(known, Queue())
    # The same vectors at other positions: other contents, the same rows.
    for i in range(SEQS):
        add(scheduler, request(str(i), (1, 2), known, positions=(i,)))
    step(scheduler)
    assert len(scheduler.began) == SEQS
    assert scheduler.refused == []


def test_what_gates_keep_is_counted_for_each_request() -> None:
    # Two rows that they share, and for each request those of 96 decisions.
    known = facts(bank_rows=12)
    gate = Gate(direction=np.ones(WIDTH), layer=0, scope="next")
    scheduler = Scheduler(known, Queue())
    requests = [
        request(str(i), (1,), known, positions="completion", when=gate, max_tokens=96)
        for i in range(SEQS)
    ]
    for one in requests:
        add(scheduler, one)
    step(scheduler)
    assert (scheduler.began, scheduler.refused) == (["0", "1"], [])
    for one in requests:
        scheduler.end(one)
        step(scheduler)
    assert (len(scheduler.began), scheduler.refused) == (SEQS, [])
    assert scheduler.inspect_lens_edits.is_idle
    assert scheduler.inspect_lens_edits._most == 0


def test_the_wait_and_the_queue_are_bounded_and_the_worker_refuses_what_is_beyond() -> None:
    known, clock = facts(bank_rows=3), [0.0]
    scheduler = Scheduler(known, Queue(), most_s=60.0, most_waiting=2, now=lambda: clock[0])
    for i, seeds in enumerate([(1, 2), (3, 4), (5, 6), (7, 8)]):
        add(scheduler, request(str(i), seeds, known))
    step(scheduler)
    assert (scheduler.began, scheduler.refused) == (["0", "3"], ["3"]), "two wait, not three"
    clock[0] = 59.0
    step(scheduler)
    assert scheduler.refused == ["3"]
    clock[0] = 61.0
    step(scheduler)
    assert scheduler.refused == ["3", "1"]
    # The next one's time begins when it is the first.
    assert scheduler.began == ["0", "3", "1"]


def test_what_waits_is_looked_at_again_only_when_something_was_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, looked_at = facts(bank_rows=3), []
    place = EditQueue._place

    def counting(self: EditQueue, key: str, one: Any, *, may_fail: bool) -> Any:
        looked_at.append(key)
        return place(self, key, one, may_fail=may_fail)

    monkeypatch.setattr(EditQueue, "_place", counting)
    scheduler = Scheduler(known, Queue())
    large, second, third = (
        request(str(i), seeds, known) for i, seeds in enumerate([(1, 2), (3, 4), (5, 6)])
    )
    add(scheduler, large)
    add(scheduler, second)
    for _ in range(3):
        step(scheduler)
    assert looked_at == ["0", "1"]
    add(scheduler, third)
    step(scheduler)
    scheduler.end(third)
    step(scheduler)
    assert looked_at == ["0", "1"], "one that waits holds nothing that it could give back"
    scheduler.end(large)
    step(scheduler)
    assert scheduler.began == ["0", "1"]


def test_one_that_came_back_under_its_name_is_looked_at_anew() -> None:
    known = facts(bank_rows=3)
    scheduler = Scheduler(known, Queue())
    large, second = (request(str(i), seeds, known) for i, seeds in enumerate([(1, 2), (3, 4)]))
    add(scheduler, large)
    add(scheduler, second)
    step(scheduler)
    scheduler.end(second)
    step(scheduler)
    add(scheduler, request("1", (1, 2), known, positions=(0,)))
    step(scheduler)
    assert scheduler.began == ["0", "1"]


def test_what_starts_without_having_waited_takes_its_rows_as_well() -> None:
    known = facts(bank_rows=3)
    scheduler = Scheduler(known, Queue(), most_waiting=1)
    first, waits, beyond, later = (
        request(str(i), seeds, known) for i, seeds in enumerate([(1, 2), (3, 4), (5,), (6,)])
    )
    for one in (first, waits, beyond):
        add(scheduler, one)
    step(scheduler)
    assert scheduler.began == ["0", "2"], "one waits, and the worker has room for the next"
    scheduler.end(first)
    add(scheduler, later)
    step(scheduler)
    step(scheduler)
    assert (scheduler.began, scheduler.refused) == (["0", "2", "1"], [])


@pytest.mark.parametrize("name", ["FCFSRequestQueue", "PriorityRequestQueue"])
def test_only_what_stands_in_the_queue_is_taken_out_of_it_and_put_back(name: str) -> None:
    from vllm.v1.core.sched import request_queue

    class One(Request):
        __hash__ = object.__hash__

    elsewhere, kept, free = (One(request_id=str(i), priority=0, arrival=i) for i in range(3))
    for stays in ([free], [free, kept]):
        waiting = getattr(request_queue, name)()
        for one in stays:
            waiting.add_request(one)
        before = list(waiting)
        with kept_back(SimpleNamespace(waiting=waiting), [elsewhere, kept]):
            assert list(waiting) == [free]
        assert list(waiting) == before


def test_a_fault_of_ours_starts_requests_as_vllm_would(monkeypatch: pytest.MonkeyPatch) -> None:
    known = facts(bank_rows=3)
    scheduler = Scheduler(known, Queue())
    for i, seeds in enumerate([(1, 2), (3, 4)]):
        add(scheduler, request(str(i), seeds, known))
    monkeypatch.setattr(scheduler.inspect_lens_edits, "held_back", None)
    step(scheduler)
    assert (scheduler.began, scheduler.refused) == (["0", "1"], ["1"])


def test_a_fault_of_ours_behind_a_step_does_not_end_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = facts(bank_rows=3)
    scheduler = Scheduler(known, Queue())
    add(scheduler, request("0", (1, 2), known))
    monkeypatch.setattr(scheduler.inspect_lens_edits, "started", None)
    step(scheduler)
    assert (scheduler.began, scheduler.refused) == (["0"], [])
    assert "it is not known which edits are in the table" in caplog.text
