"""The edit table: directions and instructions on the device, shared by content, counted by use.

A vector is a float32 direction that instructions read or write. An entry is one instruction; it
names the next one for the same token (`link`). What happens to one token at one tap is a chain of
entries, and what happens to it at all taps together is a configuration: the first entry of each
chain. A step then needs a single number per token, however many taps edit. Vector, entry and
configuration 0 do nothing.

The step loop waits while a request is placed. So a direction is known by its hash: one that lies
here is looked at no more, and what is new of all requests that are taken up together goes to the
device at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from inspect_lens._engine.plan.step_plan import Named
from inspect_lens._engine.protocol.edits import EVERY
from inspect_lens._engine.protocol.envelope import Envelope
from inspect_lens._engine.protocol.programs import AVERAGE, FIRST, HEAD, ROOM, history_rows
from inspect_lens._engine.protocol.shared_memory import BOARD_SIZE
from inspect_lens.errors import UnsupportedError
from inspect_lens.spec import N_REGISTERS, Kind, TapPoint

from .histories import Fed, Latches
from .table_entries import Held, Placing, Programs, Row, Share, Shared

_NO_HISTORY: tuple[tuple[Any, ...], list[int]] = ((), [])


@dataclass(frozen=True)
class BankTensors:
    """The device side of the table.

    Attributes:
        vectors: (rows, hidden) float32.
        entries: (rows, 4) int32; code, vector that is read, vector that is written, next entry.
        params: (rows, 4) float32; see `Kind`.
        table: (configurations, taps) int32; the first entry of a configuration at a tap, or 0.
        registers: (tokens, `N_REGISTERS`) float32; gates of the running step.
        latches: gates whose decisions last.
        fed: ids of the tokens of the running step.
    """

    vectors: torch.Tensor
    entries: torch.Tensor
    params: torch.Tensor
    table: torch.Tensor
    registers: torch.Tensor
    latches: Latches
    fed: Fed

    @classmethod
    def allocate(
        cls, rows: int, hidden: int, taps: int, device: torch.device, max_tokens: int = 1
    ) -> BankTensors:
        """Allocate a zeroed table of `rows` vectors, and as many entries and configurations."""
        return cls(
            torch.zeros(rows, hidden, dtype=torch.float32, device=device),
            torch.zeros(rows, 4, dtype=torch.int32, device=device),
            torch.zeros(rows, 4, dtype=torch.float32, device=device),
            torch.zeros(rows, taps, dtype=torch.int32, device=device),
            torch.zeros(max_tokens, N_REGISTERS, dtype=torch.float32, device=device),
            Latches.allocate(BOARD_SIZE, device),
            Fed(torch.zeros(max_tokens, dtype=torch.int32, device=device)),
        )

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        tensors = (
            self.vectors, self.entries, self.params, self.table, self.registers, self.fed.ids,
        )  # fmt: skip
        return self.latches.nbytes + sum(t.numel() * t.element_size() for t in tensors)


@dataclass(frozen=True)
class Steering:
    """How the tokens of one request are steered."""

    config: int
    """Configuration of tokens that nothing names."""
    named: Named | None
    """Tokens that are steered by position or phase."""
    held: Held
    """What is to be given back, configurations aside."""
    configs: list[int]
    """Configurations to give back."""
    content: str
    """Names all of it: whoever brings the same while it is held shares it."""


class Bank:
    """Host side of the table: allocation, sharing by content, and reference counts."""

    def __init__(self, tensors: BankTensors, shares: Sequence[Share] | None = None) -> None:
        """Begin with an empty table."""
        self._tensors = tensors
        rows, taps = tensors.table.shape
        self._width = tensors.vectors.shape[1]
        self._shares = shares or [(0, self._width)] * taps
        self._vectors: Shared[tuple[Any, ...]] = Shared(rows, "steering table")
        self._entries: Shared[tuple[Any, ...]] = Shared(rows, "table of instructions")
        self._configs: Shared[tuple[int, ...]] = Shared(rows, "table of configurations")
        self._held: dict[str, tuple[Steering, int]] = {}
        """By content: the steering, and how many requests have it."""
        self._histories: dict[str, tuple[tuple[Any, ...], list[int]]] = {}
        """By request, pre-empted ones too: whose decisions are kept, and their first rows."""
        self.config_taps = np.zeros((rows, taps), dtype=np.bool_)
        """(configurations, taps); whether a configuration steers at a tap."""
        self._new_vectors: dict[int, Row] = {}
        self._new_entries: dict[int, tuple[tuple[int, ...], tuple[float, ...]]] = {}
        self._new_configs: dict[int, tuple[int, ...]] = {}
        """By row: what `flush` has to write. A row that was given back and taken again has the
        content that was taken last."""

    @property
    def rows_in_use(self) -> int:
        """Vectors that some request holds."""
        return self._vectors.in_use

    @property
    def fed(self) -> Fed:
        """Ids of the tokens of the running step."""
        return self._tensors.fed

    def admit(self, envelope: Envelope, tap_index: dict[TapPoint, int]) -> Steering:
        """Place the edits of one request."""
        content = envelope.steer_hash or ""
        held, users = self._held.get(content, (None, 0))
        if held is None:
            # A batch that is steered alike is looked at once: the step loop waits.
            held = self._admit(envelope, tap_index, content)
        self._held[content] = held, users + 1
        return held

    def _admit(self, envelope: Envelope, tap_index: dict[TapPoint, int], content: str) -> Steering:
        parts = [Programs(edit) for edit in envelope.edits]
        _check_gates(envelope, tap_index)
        tables = self._vectors, self._entries, self._configs
        placing = Placing(parts, tables, self._shares, tap_index, self._width)
        try:
            every = placing.config_at(0, False)
            # Phases change at the end of the prompt and nowhere else.
            edge = max((e for p in parts for e in (p.spec.lo, p.spec.hi) if e < EVERY), default=0)
            behind = placing.config_at(edge, False) if edge else every
            positions = sorted({p for part in parts for p in part.index})
            ids = np.asarray([placing.config_at(p, True) for p in positions], dtype=np.int32)
            self._note(placing)
        except BaseException:
            self._release(placing.held, placing.configs)
            raise
        named = None
        if positions or behind != every:
            named = Named(np.asarray(positions, dtype=np.int64), ids, edge, behind)
        return Steering(every, named, placing.held, placing.configs, content)

    def reset(self, record: int) -> None:
        """Shut the gates of a new request that last."""
        latches = self._tensors.latches
        if not latches.can_tell:
            raise UnsupportedError(
                "edits: a gate whose decisions last needs shared memory that the driver can pin, "
                "and it refused; use scope='token' without ema and closes_below, or raise the "
                "limit of locked memory"
            )
        latches.reset(record)

    def keep_history(
        self, key: str, record: int, envelope: Envelope, tap_index: Mapping[TapPoint, int]
    ) -> None:
        """Make room for what the running gates of a request decide, unless it has it already."""
        mine = [e for e in envelope.edits if e.room and e.taps[0] in tap_index]
        wanted = record, *[(e.latch, e.lo, e.room) for e in mine]
        if not mine or (key in self._histories and self._histories[key][0] == wanted):
            return
        self.drop_history(key)
        held: list[int] = []
        self._histories[key] = wanted, held
        for edit in mine:
            assert edit.latch is not None
            n = history_rows(edit.room, self._width)
            row, _ = self._vectors.take(("history", key, edit.latch), n)
            held.append(row)
            values = np.full((n, self._width), np.nan, dtype=np.float32)
            head = values.reshape(-1)[:HEAD]
            head[:] = 0
            head[[FIRST, ROOM, AVERAGE]] = edit.lo, edit.room, np.nan
            self._new_vectors.update(enumerate(values, row))
            self._tensors.latches.history[record, edit.latch].fill_(row)

    def drop_history(self, key: str) -> None:
        """Give back the room of a request that will not come back; most have none."""
        for row in self._histories.pop(key, _NO_HISTORY)[1]:
            self._vectors.give(row)

    def release(self, steering: Steering) -> None:
        """Give back what a request held; a row is free again when its last user has gone."""
        users = self._held[steering.content][1] - 1
        if users:
            self._held[steering.content] = steering, users
            return
        del self._held[steering.content]
        self._release(steering.held, steering.configs)

    def _release(self, held: Held, configs: list[int]) -> None:
        for row in held.vectors:
            self._vectors.give(row)
        for entry in held.entries:
            self._entries.give(entry)
        for config in configs:
            self._configs.give(config)

    def _note(self, placing: Placing) -> None:
        """Keep what is new of a request for `flush`."""
        self._new_vectors.update(placing.new_rows)
        for entry, words, params in placing.new_entries:
            self._new_entries[entry] = words, params
        for config, first in placing.new_configs:
            self._new_configs[config] = first
            self.config_taps[config] = np.asarray(first) != 0

    def flush(self) -> None:
        """Put what is new where taps read it, once for all requests that were admitted together."""
        to = self._tensors
        vectors, self._new_vectors = self._new_vectors, {}
        entries, self._new_entries = self._new_entries, {}
        configs, self._new_configs = self._new_configs, {}
        if vectors:
            _upload(to.vectors, vectors)
        if entries:
            _upload(to.entries, {at: words for at, (words, _) in entries.items()})
            _upload(to.params, {at: params for at, (_, params) in entries.items()})
        if configs:
            _upload(to.table, configs)


def _check_gates(envelope: Envelope, tap_index: dict[TapPoint, int]) -> None:
    """Refuse an edit whose gate is read on another stage of a pipeline: it would never act."""
    read: set[int] = set()
    used: set[int] = set()
    for edit in envelope.edits:
        if any(tap in tap_index for tap in edit.taps):
            for one in (one for at in edit.programs for program in at for one in program):
                (read if one.kind >= Kind.GATE else used).add(one.gate)
    if used - read - {-1}:
        raise UnsupportedError(
            "edits: a gate (when) is read on another stage of the pipeline than its edit; read it "
            "at a layer of the same stage"
        )


def _upload(target: torch.Tensor, rows: Mapping[int, Any]) -> None:
    """Write rows of a table in one copy."""
    at = sorted(rows)
    # From pageable memory the copy would wait for everything that the GPU has been given.
    size = len(at), target.shape[1]
    source = torch.empty(size, dtype=target.dtype, pin_memory=target.is_cuda)
    values = source.numpy()
    for i, row in enumerate(at):
        values[i] = rows[row]
    if at[-1] - at[0] == len(at) - 1:
        target[at[0] : at[0] + len(at)].copy_(source, non_blocking=True)
    elif target.is_cuda:
        index = torch.tensor(at).pin_memory().to(target.device, non_blocking=True)
        target.index_copy_(0, index, source.to(target.device, non_blocking=True))
    else:
        target.numpy()[at] = values
