"""The worker's side of the lens: which requests use it, and what each step does for them.

Runs in the worker process. No method that the step loop calls raises: a fault fails the
requests it concerns, clears their rows, and the engine goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inspect_lens._engine.export.transport import Exporter, Faults, Numbers, overflow
from inspect_lens._engine.plan import (
    Batch,
    Drafts,
    Longs,
    Repeat,
    RequestTable,
    StepPlan,
    plan_step,
)
from inspect_lens._engine.protocol.messages import (
    BOARD_SIZE,
    ArenaWriter,
    Envelope,
    Failure,
    Opening,
    unpacked,
)
from inspect_lens._engine.protocol.readouts import LAG
from inspect_lens._engine.readout.readers import ProbeStore
from inspect_lens._engine.readout.reduce import SumTable
from inspect_lens._engine.tap import buffers
from inspect_lens._engine.tap.buffers import TapState, maps_for
from inspect_lens._engine.tap.edit_table import Bank, Steering
from inspect_lens._engine.tap.gates import PromptReads
from inspect_lens.errors import CapacityError, CaptureError
from inspect_lens.spec import EnginePath, TapPoint

from .capture_groups import GATES, Groups
from .exporter import Ring, Rounds, Sender

logger = logging.getLogger("vllm.inspect_lens")


@dataclass(slots=True)
class Request:
    """A live request."""

    key: str
    reply: str
    number: int
    slot: int
    salt: str | None
    group: int | None
    steering: Steering | None = None
    is_over: bool = False
    """Whether it will not come back; else it may have been pre-empted."""


@dataclass(eq=False)
class LiveRequests:
    """Takes requests up and forgets them."""

    _tap_index: dict[TapPoint, int]
    _bank: Bank
    _groups: Groups
    _numbers: Numbers
    table: RequestTable
    _sender: Sender
    _is_first: bool

    def __post_init__(self) -> None:
        self.drafts = Drafts()
        self.by_key: dict[str, Request] = {}
        self.by_slot: dict[int, Request] = {}
        self.new: set[int] = set()
        """Slots of requests that no step has run yet."""
        self.prompts: dict[int, PromptReads] = {}
        """By slot: what gates read of prompts."""

    def take_up(self, coming: Mapping[str, Mapping[str, Any]]) -> dict[str, Exception]:
        """Enter requests that no step has run yet."""
        failed: dict[str, Exception] = {}
        alike: dict[tuple[Any, ...], list[tuple[str, Envelope]]] = {}
        for key, packed in coming.items():
            try:
                envelope = Envelope.unpack(packed)
                self._sender.check(envelope.reply)
                kind = envelope.reply, envelope.alike
            except Exception as error:  # noqa: BLE001 - a fault fails its own request
                failed[key] = error
            else:
                alike.setdefault(kind, []).append((key, envelope))
        for same in alike.values():
            try:
                failed |= self._enter(same)
            except Exception as error:  # noqa: BLE001 - what they have in common is at fault
                failed |= dict.fromkeys([key for key, _ in same], error)
        try:
            self._bank.flush()
        except Exception as error:  # noqa: BLE001 - nobody knows what the device has
            # Also of those before: rows of theirs may have moved to make room.
            failed |= {key: error for key in self.by_key if self._is_steered(key)}
        return failed

    def _is_steered(self, key: str) -> bool:
        request = self.by_key.get(key)
        return request is not None and request.steering is not None

    def finish(self, keys: Collection[str]) -> None:
        """Take note that requests, also such as are not here, will not come back."""
        for key in keys:
            if (request := self.by_key.get(key)) is not None:
                request.is_over = True
            else:
                self._bank.drop_history(key)
        self._numbers.finish(keys)

    def forget(self, request: Request) -> None:
        slot = request.slot
        self._sender.forget(slot)
        del self.by_key[request.key], self.by_slot[slot]
        self.new.discard(slot)
        self.prompts.pop(slot, None)
        self.table.give(slot)
        self.drafts.remove(slot)
        self._numbers.give(request.key, request.number, is_over=request.is_over)
        if request.steering is not None:
            self._bank.release(request.steering)
        if request.is_over:
            self._bank.drop_history(request.key)
        if request.group is not None:
            self._groups.give(request.group)

    def note_fed(self) -> None:
        """Have taps know the ids of the tokens of a step that is about to run, if any asks."""
        if self.table.by_id:
            self._bank.fed.note()

    def apart(self, batch: Batch, poisoned: Collection[str]) -> tuple[Batch, list[str]]:
        """Tell requests that begin behind blocks of the cache under a bad salt from all others."""
        new, self.new = self.new, set()
        if not poisoned or not new:
            return batch, []
        kept, found = [], []
        for i, slot in enumerate(batch.slots.tolist()):
            request = self.by_slot[slot]
            if slot in new and batch.position[i] > 0 and request.salt in poisoned:
                found.append(request.key)
            else:
                kept.append(i)
        return batch.take(np.asarray(kept, dtype=np.int64)), found

    def behind_their_last(self, begun: Batch) -> Batch:
        """New requests all of whose steered positions came, steered, out of the prefix cache."""
        if not len(begun.slots):
            return begun
        until = self.table.until[begun.slots]
        return begun.take(np.flatnonzero((until > 0) & (begun.position >= until)))

    def _enter(self, same: list[tuple[str, Envelope]]) -> dict[str, Exception]:
        """Enter requests of one front-end that want the same rows."""
        keys, envelopes = [key for key, _ in same], [envelope for _, envelope in same]
        first, n = envelopes[0], len(same)
        group = self._groups.take(first, n)
        slots = [self.table.take() for _ in range(n)]
        at = np.asarray(slots)
        numbers = self._numbers.take(keys, at)
        requests = [
            Request(key, first.reply, number, slot, envelope.steer_hash, group)
            for key, envelope, number, slot in zip(keys, envelopes, numbers, slots, strict=True)
        ]
        # What is taken from here on is given back by `forget`, should the rest fail.
        self.by_key |= zip(keys, requests, strict=True)
        self.by_slot |= zip(slots, requests, strict=True)
        self.new.update(slots)
        self.table.set_owner(at, first.reply)
        self.table.n_prompt[at] = [envelope.n_prompt for envelope in envelopes]
        if group is not None:
            self.table.group[at] = group
            self._groups.watch(self.table, at, envelopes)
        failed: dict[str, Exception] = {}
        openings, shares = [], self._groups.shares(first)
        for request, envelope in zip(requests, envelopes, strict=True):
            n_steered = 0
            if not envelope.is_plain:
                try:
                    n_steered = self._equip(request, envelope)
                except Exception as error:  # noqa: BLE001 - a fault fails its own request
                    failed[request.key] = error
                    continue
            n_told = n_steered if self._is_first else 0
            openings.append(Opening(request.number, request.key, shares, n_told))
        if openings and (self._is_first or group is not None):
            self._sender.opened(first.reply, first.pid, openings)
        return failed

    def _equip(self, request: Request, envelope: Envelope) -> int:
        """Enter what only some requests have."""
        slot, group, table = request.slot, request.group, self.table
        steered = [t for t in envelope.edited.taps if t in self._tap_index]
        if steered:
            request.steering = steering = self._bank.admit(envelope, self._tap_index)
            table.config[slot] = steering.config
            table.record[slot] = request.number % BOARD_SIZE
            table.until[slot] = envelope.edited.until
            if envelope.edited.autoencoders:
                table.spliced.add(slot)
            if envelope.edited.reads_ids:
                self._bank.fed.check()
                table.by_id.add(slot)
            if envelope.edited.reads_positions:
                table.latched.add(slot)
            if envelope.edited.has_latches:
                # One that was pre-empted keeps what its gates have decided.
                if request.number in self._numbers.fresh:
                    self._bank.drop_history(request.key)
                    self._bank.reset(int(table.record[slot]))
                record = int(table.record[slot])
                self._bank.keep_history(request.key, record, envelope, self._tap_index)
                reads = self._bank.prompt_reads(request.key)
                if reads is not None and not reads.is_decided:
                    self.prompts[slot] = reads
            if steering.named is not None:
                table.named[slot] = steering.named
        if group is not None:
            self._groups.watch_listed(table, slot, envelope)
            self._sender.watch(slot, envelope, group)
        if envelope.is_speculative and (self._is_first or group is not None):
            until = envelope.edited.until if steered and self._is_first else 0
            if group is not None:
                until = max(until, int(table.hi[slot]))
            self.drafts.add(slot, envelope.n_prompt, until)
        return len(steered)


_POISONED_MOST = 1 << 17
"""Salts that are remembered: each failure makes one, and front-ends take another one behind it."""
_NONE: Longs = np.zeros(0, dtype=np.int64)
_EMPTY = Batch(_NONE, _NONE, _NONE, _NONE)


class Stepper:
    """Tracks requests and drives the taps of one worker."""

    drafted: Container[str] | None = None
    """Requests that the scheduler has drafts fed in the step that is about to run; None where that
    is not known."""

    def __init__(
        self,
        state: TapState,
        exporter: Exporter,
        *,
        lag: int = LAG,
        rank: int = 0,
        is_last: bool = True,
    ) -> None:
        self.state, self._exporter = state, exporter
        self._bank = Bank(state.bank, state.shares)
        tap_index = {tap: i for i, tap in enumerate(state.taps)}
        self.probes = ProbeStore(state.ring.device, state.scratch)
        self._tap_rows = state.kept_rows
        self._groups = Groups(
            tap_index, self.probes, self._tap_rows, rank, remote=state.remote, is_last=is_last
        )
        self._numbers = Numbers(exporter.arena.view.board)
        self._faults = Faults(exporter.arena.view.board, exporter.copier)
        state.faults = self._faults.move_to(state.ring.device)
        state.bank.latches.tell(self._faults.fired)
        table = RequestTable()
        self._sender = Sender(
            state.ring,
            exporter,
            self._groups,
            self._numbers,
            SumTable(state.sums, state.latest, lag),
            table,
            self._drop,
            self._fail_numbers,
        )
        self._coming: dict[str, Mapping[str, Any]] = {}
        """Requests that are taken up before the next step, as they came."""
        self._live = LiveRequests(
            tap_index, self._bank, self._groups, self._numbers, table, self._sender, not rank
        )
        self._maps = maps_for(state)
        self._outbox = self._sender.outbox
        ring = Ring(state.parts, state.part_rows, exporter.copier, self._outbox.send_all)
        self._rounds = Rounds(ring, self._sender)
        self._plan: StepPlan | None = None
        self._steered = _EMPTY
        """Of the running step: requests that are not past their last steered position."""
        self._repeat: Repeat | None = None
        self._begun = _EMPTY
        """Of the running step: requests that it is the first one of."""
        self._poisoned: dict[str, None] = {}
        """Salts under which a request ran unsteered after it had failed here, the latest last."""

    @property
    def is_watching(self) -> bool:
        """Whether any request uses the lens, those that may come back among them."""
        return bool(self._live.by_key or self._coming or self._numbers.n_away)

    @property
    def is_armed(self) -> bool:
        """Whether a forward pass that nobody announces would still carry out the last plan."""
        return self.state.is_active

    @property
    def rows_in_use(self) -> int:
        """Steering rows that live requests hold."""
        self.take_up()
        return self._bank.rows_in_use

    @property
    def sum_rows_in_use(self) -> int:
        """Sums of live requests that grow, one for each tap."""
        return self._sender.sum_table.rows_in_use

    @property
    def n_requests(self) -> int:
        """Live requests that use the lens."""
        self.take_up()
        return len(self._live.by_key)

    @property
    def arena(self) -> ArenaWriter:
        return self._exporter.arena

    def batch(self, keys: Sequence[str], offset: Longs, n_tokens: Longs, position: Longs) -> Batch:
        """Pick the requests that use the lens out of a step's layout."""
        self.take_up()
        known = self._live.by_key
        found = [(i, r.slot) for i, key in enumerate(keys) if (r := known.get(key)) is not None]
        if not found:
            return _EMPTY
        both = np.asarray(found, dtype=np.int64)
        index = both[:, 0]
        return Batch(
            both[:, 1],
            offset[index].astype(np.int64),
            n_tokens[index].astype(np.int64),
            position[index].astype(np.int64),
        )

    def add(self, key: str, envelope: Mapping[str, Any]) -> None:
        """Have the next step take up a request; one that is known under the key is replaced."""
        self.remove(key)
        self._end_repetition()
        self._coming[key] = envelope

    def take_up(self) -> None:
        if not self._coming:
            return
        coming, self._coming = self._coming, {}
        for key, error in self._live.take_up(coming).items():
            packed = coming.get(key, {})
            self._fail(key, error, str(packed.get("reply", "")), packed.get("hash"))

    def remove(self, key: str) -> None:
        """Forget a request; one that is not known is fine, and most are not: see `RunnerV2`."""
        if key in self._live.by_key:
            self.leave((key,))
            self._forget(key)
        self._coming.pop(key, None)

    def leave(self, keys: Collection[str]) -> None:
        """Send what is kept of requests that are about to be removed: of all of them together."""
        known = self._live.by_key
        try:
            if slots := [r.slot for key in keys if (r := known.get(key)) is not None]:
                self._end_repetition()
                self._sender.flush(np.asarray(slots, dtype=np.int64))
                self._outbox.send_all()
        except Exception as error:  # noqa: BLE001 - the boundary: see `begin_step`
            for key in keys:
                if key in known:
                    self._fail(key, error)

    def finish(self, keys: Collection[str]) -> None:
        """Take note that requests are over and about to be removed; see `leave`.

        Those that are removed without that were pre-empted: when they come back, their gates stand
        as they stood.
        """
        self.leave(keys)
        self._live.finish(keys)

    def flush(self, keys: Sequence[str]) -> None:
        """Send what is kept, for a front-end that takes no further step meanwhile."""
        self.leave(keys)

    def _forget(self, key: str) -> None:
        self._end_repetition()
        if (request := self._live.by_key.get(key)) is not None:
            self._live.forget(request)

    def begin(self, keys: Sequence[str], offset: Longs, n_tokens: Longs, position: Longs) -> None:
        """Make the step that is about to run do what its requests ask for."""
        self._outbox.begin_step()
        self.take_up()
        self._live.note_fed()
        n_tokens, position = n_tokens[: len(keys)], position[: len(keys)]
        repeat = self._repeat
        if repeat is not None and repeat.continues(keys, n_tokens, position):
            self._steered, self._plan, self._begun = repeat.advance(), repeat.plan, _EMPTY
            done = repeat.done if self._live.table.latched else 0
            self._maps.repeat(self._rounds.again(repeat.done, repeat.left), done)
            return
        batch = self.batch(keys, offset, n_tokens, position)
        self.begin_step(batch)
        # Drafts are told of one step at a time.
        if (plan := self._plan) is not None and not self._live.drafts.running:
            self._repeat = Repeat.of(
                plan, batch, self._live.table, keys=keys, n_tokens=n_tokens, position=position
            )

    def begin_step(self, batch: Batch) -> None:
        """Fill the maps for a step of whatever kind, by the layout of its lens requests."""
        self._end_repetition()
        try:
            new = self._live.new
            self._begun = batch.take(
                np.flatnonzero(np.isin(batch.slots, list(new))) if new else _NONE
            )
            batch = self._without_poisoned(batch)
            plan = plan_step(
                batch,
                self._live.table,
                self._groups.taps,
                self._bank.config_taps,
                ring_rows=self.state.step_rows,
                tap_rows=self._tap_rows,
            )
            first_row = self._rounds.begin(plan)
            self._live.drafts.begin(batch, self._is_drafted)
            # Set first: should writing fail half-way, `_clear` undoes what was written.
            self._plan, self._steered = plan, plan.steered
            if plan.is_active:
                self._maps.write(plan, first_row)
                self.state.splice(self._bank.splices.work(plan.tokens[:, 0]))
            else:
                self.disarm()
        except Exception as error:  # noqa: BLE001 - the boundary: a fault fails its own requests
            self._clear()
            self._fail_slots(batch.slots.tolist(), error)

    def _is_drafted(self, slot: int) -> bool:
        return self.drafted is None or self._live.by_slot[slot].key in self.drafted

    def end_step(self, path: EnginePath) -> None:
        """Send what the step captured, or let it wait for the next ones, if these repeat it."""
        plan = self._plan
        if plan is None:
            return
        try:
            if self._live.prompts:
                self._read_prompts()
            if self.state.splices:
                self._check_spliced()
            self._sender.announce()
            self._numbers.note_fed(self._steered, path)
            self._numbers.note_fed(self._live.behind_their_last(self._begun), path)
            repeat, drafts = self._repeat, self._live.drafts.running
            self._rounds.end(path, is_last=repeat is None or not repeat.left)
            # Somebody is about to end; or rows are written again, which must come later.
            if drafts or (repeat is not None and not repeat.left):
                self._outbox.send_all()
            self._sender.settle(drafts)
        except Exception as error:  # noqa: BLE001 - the boundary: a fault fails its own requests
            steered = plan.steered.slots.tolist()
            self._fail_slots({*plan.captured, *steered, *self._live.drafts.running}, error)
        else:
            self._fail_overflown()
        finally:
            self._plan = None
            if self._repeat is None:
                self.disarm()

    def _check_spliced(self) -> None:
        """Fail requests whose autoencoder was not put into the stream at all of its taps."""
        state, error = self.state, self.state.splice_error
        missing = state.splices.keys() - state.spliced
        state.splice(state.splices)
        if missing:
            error = error or CaptureError("a step replayed a graph, in which it has no part")
            slots = [s for s in self._steered.slots.tolist() if s in self._live.table.spliced]
            self._fail_slots(slots, CaptureError(f"splice: the autoencoder did not run: {error}"))

    def _read_prompts(self) -> None:
        """Have gates read what the step has computed of prompts."""
        blocks, first_row = self._rounds.current()
        for block in blocks:
            if (result := self._groups[block.group].results.get(GATES)) is None:
                continue
            cut = self._groups.cut(block, GATES)
            index, counts, first = cut[:3] if cut else (None, block.counts, block.first)
            ends = np.cumsum(counts)
            at = first_row + block.base + block.n_tokens * np.asarray(result.ranks)
            for i, slot in enumerate(block.slots.tolist()):
                reads, n = self._live.prompts.get(slot), int(counts[i])
                if reads is None or not n:
                    continue
                # Rows of one request lie side by side.
                begin = int(ends[i]) - n
                starts = at + (begin if index is None else int(index[begin]))
                rows = {
                    tap: self.state.ring[row : row + n]
                    for tap, row in zip(result.gates, starts.tolist(), strict=True)
                }
                try:
                    self._bank.read_prompt(reads, int(first[i]), rows)
                except Exception as error:  # noqa: BLE001 - a fault fails its own request
                    self._fail_slots([slot], error)
                else:
                    if reads.is_decided:
                        self._live.prompts.pop(slot, None)

    def _fail_overflown(self) -> None:
        """Fail requests with a row that a tap left as it was; a GPU tells some steps later."""
        if len(slots := self._steered.slots):
            found = self._faults.of(self._numbers.of_slot[slots] % BOARD_SIZE)
            if found.any():
                self._fail_slots(slots[found].tolist(), overflow())

    def disarm(self) -> None:
        self._end_repetition()
        if self.state.is_active:
            self._maps.clear()

    def fail_all(self, error: Exception) -> None:
        """Fail every live request and leave the taps idle: the last resort of a fault."""
        try:
            self._clear()
        finally:
            self.take_up()
            for key in list(self._live.by_key):
                self._fail(key, error)

    def close(self) -> None:
        """Free sockets, shared memory and the process-global state."""
        self._exporter.close()
        buffers.uninstall(self.state)

    def _without_poisoned(self, batch: Batch) -> Batch:
        """Fail steered requests that begin behind blocks which a failed twin wrote unsteered."""
        kept, poisoned = self._live.apart(batch, self._poisoned)
        for key in poisoned:
            self._fail(
                key,
                CaptureError(
                    "the prefix cache holds blocks of a failed request with the same steering; "
                    "try again"
                ),
            )
        return kept

    def _drop(self, reply: str) -> None:
        self._end_repetition()
        gone = [k for k, r in self._live.by_key.items() if r.reply == reply]
        if not gone:
            return
        logger.error("inspect_lens: front-end %s takes no rows; dropping %s", reply, gone)
        for key in gone:
            self._fail(
                key,
                CapacityError(
                    "the front-end took no rows: its process stood still while others needed the "
                    "room; try again"
                ),
            )

    def _end_repetition(self) -> None:
        """Have the next step planned anew, and send what waits."""
        self._repeat = None
        try:
            self._rounds.close()
        except Exception as error:  # noqa: BLE001 - the boundary: see `end_step`
            self._fail_slots(self._rounds.slots, error)

    def _fail_numbers(self, numbers: bytes, error: Exception) -> None:
        failed = set(unpacked(numbers).tolist())
        for request in list(self._live.by_key.values()):
            if request.number in failed:
                self._fail(request.key, error)

    def _fail_slots(self, slots: Iterable[int], error: Exception) -> None:
        for slot in slots:
            if (request := self._live.by_slot.get(slot)) is not None:
                self._fail(request.key, error)

    def _clear(self) -> None:
        self._plan = None
        self.disarm()

    def _fail(self, key: str, error: Exception, reply: str = "", salt: str | None = None) -> None:
        """Fail a request; `reply` and `salt` are those of one that was never taken up."""
        request = self._live.by_key.get(key)
        if request is not None:
            reply, salt = request.reply, request.salt
            request.is_over = True
        self._forget(key)
        if salt is not None:
            # vLLM runs it to its end, unsteered, and its blocks are cached under this salt.
            self._poisoned[salt] = None
            if len(self._poisoned) > _POISONED_MOST:
                del self._poisoned[next(iter(self._poisoned))]
        logger.error("inspect_lens: request %s failed: %s", key, error)
        try:
            if reply:
                self._exporter.send_failure(reply, Failure(key, type(error).__name__, str(error)))
        except Exception:
            # Nobody can be told; the front-end's time-out fails the request.
            logger.exception("inspect_lens: the failure of %s could not be reported", key)
