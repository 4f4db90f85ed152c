"""The live requests of a worker, and what each of them holds.

Those that a step brings are taken up together, just before it: the device waits meanwhile, and what
is written for all of them at once takes a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from inspect_lens._engine.export.transport import Numbers
from inspect_lens._engine.plan.step_plan import Batch, Drafts, RequestTable
from inspect_lens._engine.protocol.envelope import Envelope
from inspect_lens._engine.protocol.messages import Opening
from inspect_lens._engine.protocol.shared_memory import BOARD_SIZE
from inspect_lens._engine.tap.edit_table import Bank, Steering
from inspect_lens.spec import TapPoint

from .capture_groups import Groups
from .exporter import Sender


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


class LiveRequests:
    """Takes requests up and forgets them."""

    def __init__(
        self,
        tap_index: dict[TapPoint, int],
        bank: Bank,
        groups: Groups,
        numbers: Numbers,
        table: RequestTable,
        sender: Sender,
        *,
        is_exporting: bool,
        is_first: bool = True,
    ) -> None:
        """Store what requests are entered into."""
        self._tap_index = tap_index
        self._bank = bank
        self._groups = groups
        self._numbers = numbers
        self._sender = sender
        self._is_exporting, self._is_first = is_exporting, is_first
        self.table = table
        self.drafts = Drafts()
        self.by_key: dict[str, Request] = {}
        self.by_slot: dict[int, Request] = {}
        self.new: set[int] = set()
        """Slots of requests that no step has run yet."""

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
        except Exception as error:  # noqa: BLE001 - of what is new, nobody knows what is there
            failed |= {key: error for key in coming if self._is_steered(key)}
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
        """Take back what a request holds."""
        slot = request.slot
        self._sender.forget(slot)
        del self.by_key[request.key], self.by_slot[slot]
        self.new.discard(slot)
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
        group = self._groups.take(first, n) if self._is_exporting else None
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
        is_told = self._is_exporting and (self._is_first or group is not None)
        if is_told and openings:
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
            if envelope.edited.reads_ids:
                self._bank.fed.check()
                table.by_id.add(slot)
            if envelope.edited.has_latches:
                table.latched.add(slot)
                # One that was pre-empted keeps what its gates have decided.
                if request.number in self._numbers.fresh:
                    self._bank.drop_history(request.key)
                    self._bank.reset(int(table.record[slot]))
                record = int(table.record[slot])
                self._bank.keep_history(request.key, record, envelope, self._tap_index)
            if steering.named is not None:
                table.named[slot] = steering.named
        if group is not None:
            self._groups.watch_listed(table, slot, envelope)
            self._sender.watch(slot, envelope, group)
        if envelope.is_speculative and self._is_exporting and (self._is_first or group is not None):
            until = envelope.edited.until if steered and self._is_first else 0
            if group is not None:
                until = max(until, int(table.hi[slot]))
            self.drafts.add(slot, envelope.n_prompt, until)
        return len(steered)
