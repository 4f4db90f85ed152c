"""In the process that schedules: how much a step may have, and how much comes out of caches.

**Rows of a step.** A tap copies rows inside a compiled graph to addresses that stay, so the rows of
a step have to fit the buffer before the step runs. Layers times tokens of a step may be far more
than it has: 33 taps and 16384 tokens need half a million rows. The scheduler cuts prompts into
chunks anyhow. So while prompts whose rows are kept are fed, and only where their rows could be too
many, it gets a lower limit for the tokens of a step. The buffer has room for one token of every
sequence at all taps (`facts_of`), so requests that sample never wait. An engine whose buffer holds
its largest step is left alone.

**Edits.** A worker has one table for the edits of all requests that run, and the scheduler decides
which do. So it is asked to start a request only when the table has room for its edits. Until then
the request stays in vLLM's own queue, where it can be cancelled like any other. Edited requests
start in the order in which they came, because small ones would otherwise pass a large one for good.
Requests without edits pass. How many numbers a request takes is known exactly where it is placed in
a table of the same size, since requests share what they have in common. That costs time, so it is
done only while a number that every request brings along, of what it takes at most, says that the
table might be too small.

**Cache hits.** A request that captures prompt tokens reads the prefix cache as far as its front-end
has rows of the same tokens from before, see `RowCache`. Behind that they have to be computed.

**KV connectors.** The scheduler asks a connector how many tokens of a prompt it has. vLLM allows
that what it offers is not taken, as `MultiConnector` does, but not that a part of it is. So a load
is taken whole or not at all:

- A request that wants rows of its prompt loads nothing beyond those that are known (`RowCache`).
- Where blocks are found by token ids, the connector is told nothing of a steered request.
- Where blocks come from a certain request of another engine, they are taken if that one was
  steered alike. The engine that computes a prompt says so in the transfer parameters, which a
  proxy hands on.
"""

from __future__ import annotations

import copy
import dataclasses
import heapq
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from inspect_lens._engine.hooks.runner import EAGER_KEY
from inspect_lens._engine.protocol.messages import (
    CACHED_KEY,
    HASH_KEY,
    KEPT_KEY,
    NUMBERS_KEY,
    Envelope,
)
from inspect_lens._engine.protocol.processes import contained, end_engine_with_parent
from inspect_lens._engine.protocol.readouts import share_of
from inspect_lens._engine.tap.edit_table import Placements, Steering
from inspect_lens._settings import Settings
from inspect_lens.errors import CapacityError, LensError
from inspect_lens.spec import ENVELOPE_KEY, EngineFacts

from .compat.connectors import Behaviour, behaviours_of, loads_again
from .compat.engine_facts import facts_of, refusal
from .compat.features import queued, reason_of, turn_off_engine
from .registered.rows import is_harmless

logger = logging.getLogger("vllm.inspect_lens")


def sealed_of(request: Any) -> Any:
    """The envelope of a request; None for one that asks nothing of the lens."""
    extra = getattr(getattr(request, "sampling_params", None), "extra_args", None)
    return extra.get(ENVELOPE_KEY) if extra else None


class EditQueue:
    """Which edited requests of one scheduler may start."""

    def __init__(
        self,
        facts: EngineFacts,
        *,
        most_s: float,
        most_waiting: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._facts, self._now = facts, now
        self._most_s, self._most_waiting = most_s, most_waiting
        self._tap_index = {tap: i for i, tap in enumerate(facts.taps)}
        self._waiting: dict[str, Any] = {}
        """Edited requests that have not run yet, in the order in which they came."""
        self._started: dict[str, Any] = {}
        """Those that have, pre-empted ones too."""
        self._contents: dict[str, list[int]] = {}
        """By content: numbers of the table that its requests share, at most, and how many they
        are."""
        self._most = 0
        """Numbers that all of them take at most."""
        self._table: Placements | None = None
        """What is placed; None while there is room for all."""
        self._placed: dict[str, Steering | None] = {}
        """By request; None for one that a worker has to judge."""
        self._first: tuple[str, float] | None = None
        """The first of those that wait, and since when."""
        self._is_full = False
        """Whether that one has had no room, and what is placed has not changed since."""
        self._is_told = False

    @property
    def is_idle(self) -> bool:
        """Whether no request has edits."""
        return not (self._waiting or self._started)

    @property
    def is_settled(self) -> bool:
        """Whether all requests with edits have started."""
        return not self._waiting

    def add(self, request: Any) -> None:
        """Take note of a request that has come, or was pre-empted."""
        key, sealed = request.request_id, sealed_of(request)
        content = None if sealed is None else sealed.get(HASH_KEY)
        if content is None or key in self._started or key in self._waiting:
            return
        self._waiting[key] = request
        shared, own = sealed[NUMBERS_KEY]
        known = self._contents.setdefault(content, [shared, 0])
        self._most += own + (0 if known[1] else shared)
        known[1] += 1

    def forget(self, keys: Iterable[str]) -> None:
        """Give back what requests held that are over."""
        for key in keys:
            request = self._started.pop(key, None) or self._waiting.pop(key, None)
            if request is not None:
                sealed = sealed_of(request)
                content = sealed[HASH_KEY]
                known = self._contents[content]
                self._most -= sealed[NUMBERS_KEY][1]
                known[1] -= 1
                if not known[1]:
                    self._most -= known[0]
                    del self._contents[content]
                self._take_back(key)

    def started(self, keys: Iterable[str]) -> None:
        """Take note of requests that a step runs for the first time."""
        for key in keys:
            if (request := self._waiting.pop(key, None)) is not None:
                self._started[key] = request
                if self._table is not None and self._placed.get(key) is None:
                    # The worker may have room for what was not asked for here.
                    self._placed[key] = self._place(key, request, may_fail=True)
                    self._is_full = False

    def held_back(self, n_free: int, *, is_in_order: bool = True) -> list[Any]:
        """Requests that the next step must not start."""
        if self._most <= self._facts.bank_rows:
            self._table = None
            self._placed.clear()
            self._first, self._is_full = None, False
            return []
        if not self._waiting or n_free <= 0:
            return []
        if self._table is None:
            self._table = self._new_table()
            for key, request in self._started.items():
                self._placed[key] = self._place(key, request, may_fail=True)
        waiting = [one for key, one in self._waiting.items() if key not in self._placed]
        n_free -= len(self._waiting) - len(waiting)
        if not is_in_order:
            # This is done in each step, and most steps look at the first one alone.
            heapq.heapify(waiting)
        while waiting and n_free > 0 and self._may_start(waiting[0].request_id, waiting[0]):
            if is_in_order:
                del waiting[0]
            else:
                heapq.heappop(waiting)
            n_free -= 1
        if not is_in_order and len(waiting) > self._most_waiting:
            waiting.sort()
        return waiting[: self._most_waiting]

    def _may_start(self, key: str, request: Any) -> bool:
        """Whether the first of those that wait has room now, or need not wait any longer."""
        if self._first is None or self._first[0] != key:
            self._first, self._is_full = (key, self._now()), False
        if not self._is_full:
            try:
                # With the table to itself it waits for nobody.
                self._placed[key] = self._place(key, request, may_fail=not self._placed)
            except CapacityError:
                self._is_full = True
                if not self._is_told:
                    self._is_told = True
                    logger.warning(
                        "inspect_lens: requests wait, since the edits of those that run fill the "
                        "edit table; INSPECT_LENS_BANK_BYTES makes it larger"
                    )
            else:
                self._first = None
                return True
        if self._now() - self._first[1] < self._most_s:
            return False
        self._placed[key] = self._first = None
        return True

    def _new_table(self) -> Placements:
        facts = self._facts
        shares = [share_of(facts.width_of(tap.site), facts.ranks, 0) for tap in facts.taps]
        return Placements(facts.bank_rows + 1, facts.hidden, shares)

    def _place(self, key: str, request: Any, *, may_fail: bool) -> Steering | None:
        """Place edits as a worker does; None where that one has to judge them."""
        assert self._table is not None
        steering = None
        try:
            envelope = Envelope.unpack(sealed_of(request))
            steering = self._table.admit(envelope, self._tap_index)
            if envelope.edited.has_latches:
                self._table.keep_history(key, 0, envelope, self._tap_index)
        except LensError as error:
            if steering is not None:
                self._table.release(steering)
            self._table.drop_history(key)
            if isinstance(error, CapacityError) and not may_fail:
                raise
            return None
        return steering

    def _take_back(self, key: str) -> None:
        if self._first is not None and self._first[0] == key:
            self._first = None
        if key in self._placed:
            self._is_full = False
        steering = self._placed.pop(key, None)
        if self._table is not None:
            self._table.drop_history(key)
            if steering is not None:
                self._table.release(steering)


@contextmanager
def kept_back(scheduler: Any, requests: list[Any]) -> Iterator[None]:
    """Take requests out of the queue of a scheduler for one step."""
    waiting = scheduler.waiting
    # vLLM has other queues, too. What stands there must not come into this one.
    here = set(map(id, queued(waiting))) if requests else set()
    requests = [request for request in requests if id(request) in here]
    if not requests:
        yield
        return
    before = list(waiting) if isinstance(waiting, deque) else []
    is_all = len(before) == len(requests)
    if is_all:
        waiting.clear()
    else:
        waiting.remove_requests(requests)
    try:
        yield
    finally:
        if is_all:
            # Behind what was pre-empted in this step.
            waiting.extend(before)
        elif isinstance(waiting, deque):
            apart, known = set(map(id, requests)), set(map(id, before))
            left = set(map(id, waiting))
            # What was pre-empted in this step stands in front.
            order = [request for request in waiting if id(request) not in known]
            order += [r for r in before if id(r) in apart or id(r) in left]
            waiting.clear()
            waiting.extend(order)
        else:
            waiting.prepend_requests(requests)


_ROWS, _EDITS = "inspect_lens_rows", "inspect_lens_edits"
"""Attributes of a scheduler."""


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
        kept = (sealed_of(request) or {}).get(KEPT_KEY)
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


def _prepare(scheduler: Any) -> None:
    """Work out what a scheduler has to know of the lens, when the first request asks for it."""
    config, most = scheduler.vllm_config, int(scheduler.max_num_scheduled_tokens)
    if refusal(config) is not None:
        setattr(scheduler, _ROWS, StepRows(rows=1, taps=0, most=most, least=most))
        return
    settings = Settings.load()
    facts = facts_of(config, settings)
    rows = StepRows(
        rows=facts.ring_rows,
        taps=facts.rows_of(facts.taps),
        most=most,
        least=facts.least_step_tokens or most,
    )
    edits = EditQueue(facts, most_s=settings.edit_wait_s, most_waiting=settings.edit_queue)
    setattr(scheduler, _ROWS, rows)
    setattr(scheduler, _EDITS, edits)


def _faults_logged(message: str) -> AbstractContextManager[None]:
    """A fault of ours is logged, and does not end the loop that all requests share."""
    return contained(lambda _: logger.exception("inspect_lens: %s", message))


def _schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows: StepRows | None = getattr(self, _ROWS, None)
        edits: EditQueue | None = getattr(self, _EDITS, None)
        if edits is not None and not edits.is_idle:
            return _with_room(self, edits, rows, partial(original, self, *args, **kwargs))
        return _within(self, rows, partial(original, self, *args, **kwargs))

    return schedule


def _within(scheduler: Any, rows: StepRows | None, schedule: Callable[[], Any]) -> Any:
    """Schedule a step whose rows fit the buffer."""
    if rows is None or rows.is_idle:
        return schedule()
    most = scheduler.max_num_scheduled_tokens
    try:
        # Otherwise the worker fails those whose rows do not fit.
        with _faults_logged("a step's rows could not be counted"):
            scheduler.max_num_scheduled_tokens = min(most, rows.limit())
        return schedule()
    finally:
        scheduler.max_num_scheduled_tokens = most


def _with_room(
    scheduler: Any, edits: EditQueue, rows: StepRows | None, schedule: Callable[[], Any]
) -> Any:
    """Schedule a step that starts no request whose edits have no room in the table."""
    back: list[Any] = []
    is_settled = False
    # Otherwise the worker fails those whose edits do not fit.
    with _faults_logged("it is not known whether edits fit the table"):
        # Workers hear of these with the step, before they hear of what it starts.
        edits.forget(scheduler.finished_req_ids)
        is_settled = edits.is_settled
        if not is_settled:
            n_free = scheduler.max_num_running_reqs - len(scheduler.running)
            back = edits.held_back(n_free, is_in_order=isinstance(scheduler.waiting, deque))
    if is_settled:
        return _within(scheduler, rows, schedule)
    with kept_back(scheduler, back) if back else nullcontext():
        output = _within(scheduler, rows, schedule)
    with _faults_logged("it is not known which edits are in the table"):
        edits.started(request.req_id for request in output.scheduled_new_reqs)
    return output


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    def note(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, request, *args, **kwargs)
        with _faults_logged("a request's rows could not be counted"):
            if sealed_of(request) is not None:
                if getattr(self, _ROWS, None) is None:
                    _prepare(self)
                getattr(self, _ROWS).add(request)
                if (edits := getattr(self, _EDITS, None)) is not None:
                    edits.add(request)
        return result

    return note


class _Bounded:
    """A coordinator of key-value caches that finds hits only up to a limit."""

    def __init__(self, coordinator: Any, limit: int) -> None:
        self._coordinator, self._limit = coordinator, limit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coordinator, name)

    def find_longest_cache_hit(self, block_hashes: Any, max_cache_hit_length: int) -> Any:
        most = min(max_cache_hit_length, self._limit)
        return self._coordinator.find_longest_cache_hit(block_hashes, most)


def _get_computed_blocks(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_computed_blocks(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        # What is computed for nothing has rows; what is not has none.
        limit: int | None = 0
        with _faults_logged("it is not known how much of a prompt may be cached"):
            limit = (sealed_of(request) or {}).get(CACHED_KEY)
        if limit is None:
            return original(self, request, *args, **kwargs)
        coordinator = self.coordinator
        self.coordinator = _Bounded(coordinator, limit)
        try:
            return original(self, request, *args, **kwargs)
        finally:
            self.coordinator = coordinator

    return get_computed_blocks


MARK_KEY = "inspect_lens"
"""Of the transfer parameters: hash of what has steered the request whose blocks they are."""


class ConnectorGuard:
    """Which requests of a scheduler may use its connector, and for how much."""

    def __init__(self, behaviours: Collection[Behaviour | None], *, loads_again: bool) -> None:
        self._keeps_apart = any(one not in ("blocks", "request") for one in behaviours)
        self._is_by_request = any(one in ("request", None) for one in behaviours)
        self._loads_again = loads_again
        self.apart: set[str] = set()
        """Requests of which the connector is told nothing."""

    def add(self, request: Any) -> None:
        """Decide on a new request."""
        if self._keeps_apart and self.mark(request) is not None:
            self.apart.add(request.request_id)

    def mark(self, request: Any) -> str | None:
        """Hash of what steers a request; None of one that nothing does."""
        sealed = sealed_of(request) or {}
        steer, eager = sealed.get(HASH_KEY), sealed.get(EAGER_KEY)
        if eager is not None:
            return f"hooks:{eager['hash']}"
        # In front of it stands what makes it different in each front-end.
        return None if steer is None else str(steer).rpartition(":")[2]

    def most(self, request: Any) -> int | None:
        """Tokens of a prompt that need not be computed, at most; None for all of them."""
        transfer = getattr(request, "kv_transfer_params", None)
        if self._is_by_request and transfer and transfer.get(MARK_KEY) != self.mark(request):
            return 0
        if (sealed := sealed_of(request)) is None:
            return None
        # Rows of a token that is computed twice would count twice in a sum.
        if self._loads_again:
            return 0
        known: int | None = sealed.get(CACHED_KEY)
        if known is None and request.sampling_params.skip_reading_prefix_cache:
            return 0
        return known

    def take_finished(self, finished: Set[str]) -> frozenset[str]:
        """Requests of which the connector is told nothing in this step."""
        if not self.apart:
            return frozenset()
        apart = frozenset(self.apart)
        self.apart -= finished
        return apart


def without_requests(output: Any, apart: Collection[str]) -> Any:
    """What a connector is told of a step, without some requests."""
    told = copy.copy(output)
    told.scheduled_new_reqs = [r for r in output.scheduled_new_reqs if r.req_id not in apart]
    cached = output.scheduled_cached_reqs
    if not set(apart).isdisjoint(cached.req_ids):
        kept = [i for i, key in enumerate(cached.req_ids) if key not in apart]
        told.scheduled_cached_reqs = cached = copy.copy(cached)
        for field in dataclasses.fields(cached):
            values = getattr(cached, field.name)
            if isinstance(values, list) and len(values) == len(
                output.scheduled_cached_reqs.req_ids
            ):
                setattr(cached, field.name, [values[i] for i in kept])
            else:
                setattr(cached, field.name, _without(values, apart))
    for field in dataclasses.fields(output):
        if field.name not in ("scheduled_new_reqs", "scheduled_cached_reqs"):
            setattr(told, field.name, _without(getattr(output, field.name), apart))
    told.total_num_scheduled_tokens = sum(told.num_scheduled_tokens.values())
    return told


def _without(values: Any, apart: Collection[str]) -> Any:
    """A table by request, or a set of them, without some; anything else as it is."""
    if isinstance(values, dict):
        return {key: value for key, value in values.items() if key not in apart}
    return values.difference(apart) if isinstance(values, set) else values


class GuardedConnector:
    """Stands between a scheduler and its connector."""

    def __init__(self, connector: Any, guard: ConnectorGuard) -> None:
        self._guard = guard
        self._add, self._match = connector.on_new_request, connector.get_num_new_matched_tokens
        self._update, self._build = (
            connector.update_state_after_alloc,
            connector.build_connector_meta,
        )
        self._finish = connector.request_finished
        self._finish_all = getattr(connector, "request_finished_all_groups", None)
        self._finish_tail = connector.register_finished_partial_tail
        connector.on_new_request = self.on_new_request
        connector.get_num_new_matched_tokens = self.get_num_new_matched_tokens
        connector.update_state_after_alloc = self.update_state_after_alloc
        connector.build_connector_meta = self.build_connector_meta
        connector.request_finished = self.request_finished
        if self._finish_all is not None:
            connector.request_finished_all_groups = self.request_finished_all_groups
        connector.register_finished_partial_tail = self.register_finished_partial_tail

    def on_new_request(self, request: Any) -> None:
        """Decide whether the connector is told of a request."""
        is_known = False
        with _faults_logged("a request is kept from the KV connector"):
            self._guard.add(request)
            is_known = True
        if not is_known:
            self._guard.apart.add(request.request_id)
        if request.request_id not in self._guard.apart:
            self._add(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens are loaded: all that the connector has, or none."""
        if request.request_id in self._guard.apart:
            return 0, False
        # What is computed for nothing has rows; what is loaded has none.
        most: int | None = 0
        with _faults_logged("it is not known how much of a prompt may be loaded"):
            most = self._guard.most(request)
        # Asked in any case: some begin to look a request up here.
        found, is_later = self._match(request, num_computed_tokens)
        if most is not None and found and num_computed_tokens + found > most:
            return 0, False
        return found, is_later

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Tell the connector which blocks a request has."""
        if request.request_id not in self._guard.apart:
            self._update(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Tell the connector of a step."""
        told = scheduler_output
        if apart := self._guard.take_finished(scheduler_output.finished_req_ids):
            # A fault here ends the engine: else steered blocks were stored as those of others.
            told = without_requests(scheduler_output, apart)
        return self._build(told)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
        """What the connector does at the end of a request, and says to the next engine."""
        return self._marked(self._finish, request, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
        """The same, of a model with several kinds of blocks."""
        return self._marked(self._finish_all, request, block_ids)

    def _marked(self, finish: Any, request: Any, block_ids: Any) -> tuple[bool, Any]:
        if request.request_id in self._guard.apart:
            return False, None
        is_sending, transfer = finish(request, block_ids)
        if not transfer:
            return is_sending, transfer
        mark: str | None = "unknown"
        with _faults_logged("it is not known what has steered a request"):
            mark = self._guard.mark(request)
        return is_sending, transfer if mark is None else {**transfer, MARK_KEY: mark}

    def register_finished_partial_tail(self, request: Any, *args: Any, **kwargs: Any) -> bool:
        """Whether the connector keeps a request's last block for itself."""
        if request.request_id in self._guard.apart:
            return False
        return bool(self._finish_tail(request, *args, **kwargs))


def _scheduler_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        try:
            end_engine_with_parent()
            if refusal(vllm_config) is None and self.connector is not None:
                _guard(self.connector, vllm_config)
        except Exception as error:  # noqa: BLE001 - front-ends come to the same, and steer nothing
            turn_off_engine(vllm_config, reason_of(error))

    return init


def _collective_rpc(original: Callable[..., Any]) -> Callable[..., Any]:
    def collective_rpc(
        self: Any, method: Any, timeout: float | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        # What workers have prefetched are copies, which may be of other weights behind it.
        with _faults_logged("parameters prefetched for hooks may be of other weights now"):
            if not is_harmless("collective_rpc", (method,)) and Settings.load().allow_code:
                original(self, "inspect_lens_hooks", timeout, ("clear_prefetched", None))
        return original(self, method, timeout, *args, **kwargs)

    return collective_rpc


def _guard(connector: Any, vllm_config: Any) -> None:
    found = behaviours_of(vllm_config, Settings.load())
    names = ", ".join(f"{name} ({known or 'not known'})" for name, known in found.items())
    logger.info("inspect_lens: KV connectors, and what they find blocks by: %s", names)
    GuardedConnector(
        connector, ConnectorGuard(found.values(), loads_again=loads_again(vllm_config))
    )


SCHEDULER_WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "schedule": _schedule,
    "scheduler_add": _noting,
    "scheduler_preempt": _noting,
    "cached_blocks": _get_computed_blocks,
    "scheduler_init": _scheduler_init,
    "collective_rpc": _collective_rpc,
}
"""Wrapper by name of the monkeypatch."""
