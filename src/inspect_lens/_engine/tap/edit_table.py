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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from inspect_lens._engine.plan import Longs, Named
from inspect_lens._engine.protocol.edits import EVERY, EditEnvelope
from inspect_lens._engine.protocol.messages import BOARD_SIZE, Envelope
from inspect_lens._engine.protocol.programs import (
    AVERAGE,
    FIRST,
    HEAD,
    N_PROMPT_ROWS,
    ROOM,
    history_rows,
)
from inspect_lens.errors import CapacityError, UnsupportedError
from inspect_lens.spec import LARGEST_NORM, N_REGISTERS, Instruction, Kind, TapPoint

from .gates import Fed, Latches, PromptGate, PromptReads
from .memory import uploaded, zeros
from .splice import Splices

_NO_HISTORY: tuple[tuple[Any, ...], list[int]] = ((), [])


def largest_norm(dtype: torch.dtype) -> float:
    """Norm of an edited stream of a dtype that is still written; see `spec.LARGEST_NORM`."""
    return LARGEST_NORM[str(dtype).removeprefix("torch.")]


class BankTensors:
    """The device side of the table: vectors, and as many entries and configurations, all zero."""

    def __init__(
        self, rows: int, hidden: int, taps: int, device: torch.device, max_tokens: int = 1
    ) -> None:
        self.vectors = zeros(rows, hidden, dtype=torch.float32, device=device)
        self.instructions = zeros(rows, 8, dtype=torch.int32, device=device)
        """`entries`, and the bits of `params`."""
        self.configs = zeros(rows, 2 * taps, dtype=torch.int32, device=device)
        """(configurations, 2*taps); `table`, and `rest`."""
        self.registers = torch.zeros(max_tokens, N_REGISTERS, dtype=torch.float32, device=device)
        """Gates of the running step."""
        self.latches = Latches(BOARD_SIZE, device)
        self.fed = Fed(torch.zeros(max_tokens, dtype=torch.int32, device=device))

    @cached_property
    def entries(self) -> torch.Tensor:
        """(rows, 4) int32; code, vector that is read, vector that is written, next entry."""
        return self.instructions[:, :4]

    @cached_property
    def params(self) -> torch.Tensor:
        """(rows, 4) float32; see `Kind`."""
        return self.instructions.view(torch.float32)[:, 4:]

    @cached_property
    def table(self) -> torch.Tensor:
        """(configurations, taps) int32; the first entry of a configuration at a tap, or 0."""
        return self.configs[:, : self.configs.shape[1] // 2]

    @cached_property
    def rest(self) -> torch.Tensor:
        """The same; of entries behind an autoencoder."""
        return self.configs[:, self.configs.shape[1] // 2 :]

    @property
    def nbytes(self) -> int:
        tensors = self.vectors, self.instructions, self.configs, self.registers, self.fed.ids
        return self.latches.nbytes + sum(t.numel() * t.element_size() for t in tensors)


@dataclass(frozen=True)
class Steering:
    """How the tokens of one request are steered."""

    config: int
    """Configuration of tokens that nothing names."""
    named: Named | None
    """Tokens that are steered by position or phase."""
    held: Held
    """What is to be given back."""
    content: str
    """Names all of it: whoever brings the same while it is held shares it."""


class Placements:
    """Who holds which numbers of the table: sharing by content, and reference counts.

    The process that schedules has one too, so that it starts no request that does not fit.
    """

    def __init__(self, rows: int, width: int, shares: Sequence[Share]) -> None:
        self._width, self._shares = width, shares
        self._vectors: Runs[tuple[Any, ...]] = Runs(rows, "steering table")
        self._entries: Shared[_Entry] = Shared(rows, "table of instructions")
        self._configs: Shared[tuple[Any, ...]] = Shared(rows, "table of configurations")
        self._held: dict[str, tuple[Steering, int]] = {}
        """By content: the steering, and how many requests have it."""
        self._histories: dict[str, tuple[tuple[Any, ...], list[int]]] = {}
        """By request, pre-empted ones too: whose decisions are kept, and their vectors."""

    @property
    def rows_in_use(self) -> int:
        """Vectors that some request holds."""
        return self._vectors.in_use

    def admit(self, envelope: Envelope, tap_index: dict[TapPoint, int]) -> Steering:
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
            self._place(placing)
        except BaseException:
            self._release(placing.held)
            raise
        named = None
        if positions or behind != every:
            named = Named(np.asarray(positions, dtype=np.int64), ids, edge, behind)
        return Steering(every, named, placing.held, content)

    def keep_history(
        self, key: str, record: int, envelope: Envelope, tap_index: Mapping[TapPoint, int]
    ) -> None:
        """Make room for what gates of a request keep, unless it has it already."""
        mine = [e for e in envelope.edits if e.latch is not None and e.taps[0] in tap_index]
        mine = [e for e in mine if e.room or e.prompt_from is not None]
        wanted = record, *[(e.latch, e.lo, e.room) for e in mine]
        if not mine or (key in self._histories and self._histories[key][0] == wanted):
            return
        self.drop_history(key)
        held: list[int] = []
        self._histories[key] = wanted, held
        for edit in mine:
            n = history_rows(edit.room, self._width) if edit.room else N_PROMPT_ROWS
            number, _ = self._vectors.take(("history", key, edit.latch), n)
            held.append(number)
            self._begin_history(edit, key, record, number, envelope.n_prompt)

    def drop_history(self, key: str) -> None:
        """Give back the room of a request that will not come back; most have none."""
        for number in self._histories.pop(key, _NO_HISTORY)[1]:
            self._vectors.give(number)

    def release(self, steering: Steering) -> None:
        """Give back what a request held; a row is free again when its last user has gone."""
        users = self._held[steering.content][1] - 1
        if users:
            self._held[steering.content] = steering, users
            return
        del self._held[steering.content]
        self._release(steering.held)

    def _release(self, held: Held) -> None:
        for number in held.vectors:
            self._vectors.give(number)
        for entry in held.entries:
            self._entries.give(entry)
        for config in held.configs:
            self._configs.give(config)

    def _place(self, placing: Placing) -> None:
        """What is new of a request was found a place."""

    def _begin_history(
        self, edit: EditEnvelope, key: str, record: int, number: int, n_prompt: int
    ) -> None:
        """What a gate keeps was found a place."""


class Bank(Placements):
    """The table of a worker: placements, and what of them has to be written to the device."""

    def __init__(self, tensors: BankTensors, shares: Sequence[Share] | None = None) -> None:
        rows, taps = tensors.table.shape
        width = tensors.vectors.shape[1]
        super().__init__(rows, width, shares or [(0, width)] * taps)
        self._tensors = tensors
        self.config_taps = np.zeros((rows, taps), dtype=np.bool_)
        """(configurations, taps); whether a configuration steers at a tap."""
        self._vectors.move = self._move
        self._vectors.most_moved = max(_MOVED_BYTES // (width * tensors.vectors.element_size()), 1)
        self._moved: set[int] = set()
        """Vectors that have moved: `flush` tells those who read them."""
        self._new_vectors: dict[int, Row] = {}
        self._new_entries: dict[int, _Entry] = {}
        self._new_configs: dict[int, list[int]] = {}
        """By number: what `flush` has to write. One that was given back and taken again has the
        content that was taken last."""
        self._prompts: dict[str, PromptReads] = {}
        """By request, pre-empted ones too: what its gates have read of its prompt."""
        self.splices = Splices(tensors.configs.device)
        """Configurations with an autoencoder."""

    @property
    def fed(self) -> Fed:
        """Ids of the tokens of the running step."""
        return self._tensors.fed

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

    def _begin_history(
        self, edit: EditEnvelope, key: str, record: int, number: int, n_prompt: int
    ) -> None:
        if edit.room:
            n = history_rows(edit.room, self._width)
            values = np.full((n, self._width), np.nan, dtype=np.float32)
            head = values.reshape(-1)[:HEAD]
            head[:] = 0
            head[[FIRST, ROOM, AVERAGE]] = edit.lo, edit.room, np.nan
            row = int(self._vectors.rows[number])
            self._tensors.latches.history[record, edit.latch].fill_(row)
        else:
            assert edit.first is not None
            assert edit.first.read is not None
            values = np.stack([np.zeros_like(edit.first.read), edit.first.read])
            reads = self._prompts.setdefault(key, PromptReads(record, n_prompt))
            reads.gates.append(PromptGate(edit, number))
        self._new_vectors[number] = values

    def drop_history(self, key: str) -> None:
        super().drop_history(key)
        self._prompts.pop(key, None)

    def prompt_reads(self, key: str) -> PromptReads | None:
        """What gates of a request read of its prompt, also of one that has come back."""
        return self._prompts.get(key)

    def read_prompt(
        self, reads: PromptReads, first: int, rows: Mapping[TapPoint, torch.Tensor]
    ) -> None:
        """Have gates read rows of a prompt, and decide when the last of them has come."""
        to = self._tensors
        reads.read(to.vectors, self._vectors.rows, to.latches, first, rows)

    def _place(self, placing: Placing) -> None:
        """Keep what is new of a request for `flush`."""
        for config, _, chains in placing.new_configs:
            if chains:
                self.splices.add(config, chains)
        self._new_vectors.update(placing.new_rows)
        self._new_entries.update(placing.new_entries)
        for config, first, chains in placing.new_configs:
            rest = [0] * len(first)
            for tap, chain in chains.items():
                rest[tap] = chain.rest
            self._new_configs[config] = [*first, *rest]
            self.config_taps[config] = np.asarray(first) != 0
            self.config_taps[config, list(chains)] = True

    def _release(self, held: Held) -> None:
        super()._release(held)
        for config in held.configs:
            if not self._configs.is_held(config):
                self.splices.drop(config)

    def _move(self, numbers: Longs, rows: NDArray[np.int64]) -> None:
        """Move vectors to other rows, (from and to, rows), behind the steps that read them."""
        vectors = self._tensors.vectors
        self._moved.update(numbers.tolist())
        source, target = uploaded(rows, vectors.device)
        # Nothing that may fail comes behind the copy: its rows are noted at once.
        vectors.index_copy_(0, target, vectors.index_select(0, source))

    def flush(self) -> None:
        """Put what is new where taps read it, once for all requests that were admitted together."""
        to, first = self._tensors, self._vectors.rows
        vectors, self._new_vectors = self._new_vectors, {}
        entries, self._new_entries = self._new_entries, {}
        configs, self._new_configs = self._new_configs, {}
        moved, self._moved = self._moved, set()
        if moved:
            contents = self._entries.contents.items()
            entries |= {n: one for n, one in contents if not moved.isdisjoint(one[0][1:3])}
            self._tell_histories(moved)
        if held := [number for number in vectors if first[number]]:
            at = [first[number] + np.arange(len(vectors[number])) for number in held]
            rows = np.concatenate([vectors[number] for number in held])
            _upload(to.vectors, np.concatenate(at), rows)
        if entries:
            words = np.asarray([words for words, _ in entries.values()], dtype=np.int32)
            words[:, 1:3] = first[words[:, 1:3]]
            params = np.asarray([params for _, params in entries.values()], dtype=np.float32)
            one = np.concatenate([words, params.view(np.int32)], axis=1)
            _upload(to.instructions, np.asarray(list(entries)), one)
        if configs:
            _upload(to.configs, np.asarray(list(configs)), np.asarray(list(configs.values())))

    def _tell_histories(self, moved: set[int]) -> None:
        """Put where histories are now where taps read it."""
        for (record, *gates), held in self._histories.values():
            for (latch, _, room), number in zip(gates, held, strict=False):
                if room and number in moved:
                    row = int(self._vectors.rows[number])
                    self._tensors.latches.history[record, latch].fill_(row)


def _check_gates(envelope: Envelope, tap_index: dict[TapPoint, int]) -> None:
    """Refuse an edit whose gate is read on another stage of a pipeline: it would never act."""
    read: set[int] = set()
    used: set[int] = set()
    for edit in envelope.edits:
        if any(tap in tap_index for tap in edit.taps):
            for one in (one for at in edit.programs for program in at for one in program):
                (read if one.kind >= Kind.GATE else used).add(one.gate)
                if one.kind == Kind.JOIN:
                    read.add(int(one.params[1]))
    if used - read - {-1}:
        raise UnsupportedError(
            "edits: a gate (when) is read on another stage of the pipeline than its edit; read it "
            "at a layer of the same stage"
        )


def _upload(target: torch.Tensor, at: Longs, rows: NDArray[Any]) -> None:
    order = at.argsort()
    at, first = at[order], int(at[order[0]])
    source = torch.empty(len(at), target.shape[1], dtype=target.dtype, pin_memory=target.is_cuda)
    source.numpy()[:] = rows[order]
    if at[-1] - first == len(at) - 1:
        target[first : first + len(at)].copy_(source, non_blocking=True)
    else:
        source = source.to(target.device, non_blocking=True)
        target.index_copy_(0, uploaded(at, target.device), source)


Row = NDArray[np.float32]
"""A direction, or what a rank has of one, as rows of the table."""
Share = tuple[int, int]
"""The numbers of a row that a rank has: where they begin, and how many they are."""
Content = TypeVar("Content")

SEES_EDITS = 1 << 5
"""Bit of an entry's code: it reads the stream as the entries before it left it. The bits below
are its `Kind`, those above the register of its gate, counted from 1."""
GATE_SHIFT = 6


_Entry = tuple[tuple[int, int, int, int], tuple[float, ...]]
"""Code, numbers of the vectors that are read and written, and the next entry; and parameters."""
_Term = tuple[int, int, int]
"""A part of a request, which of its layers, and which of its positions; -1 for all of them."""


class Programs:
    """One edit, with its positions indexed."""

    def __init__(self, spec: EditEnvelope) -> None:
        self.spec = spec
        self.index = {p: i for i, p in enumerate(spec.positions or ()) if spec.lo <= p < spec.hi}

    def row_at(self, position: int, is_named: bool) -> int | None:
        """Which of the programs a token gets: an index, -1 for the shared one, None for none."""
        spec = self.spec
        if spec.positions is None:
            return -1 if spec.lo <= position < spec.hi else None
        i = self.index.get(position) if is_named else None
        return -1 if i is not None and not spec.is_listed else i


class Held(NamedTuple):
    """What a request holds."""

    vectors: list[int]
    entries: list[int]
    configs: list[int]


class Chain(NamedTuple):
    """What happens to one token at one tap."""

    first: int
    """The first entry, or 0."""
    splice: Instruction | None = None
    """The autoencoder behind these entries."""
    rest: int = 0
    """The first entry behind the autoencoder, or 0."""

    @property
    def content(self) -> tuple[Any, ...]:
        """What the autoencoder does."""
        one = self.splice
        assert one is not None
        rows = [b"" if row is None else row.tobytes() for row in (one.read, one.write)]
        return one.content, one.params, one.gate, *rows


class Placing:
    """The vectors, entries and configurations of one request, as they are found or taken."""

    def __init__(
        self,
        parts: list[Programs],
        tables: tuple[Runs[tuple[Any, ...]], Shared[_Entry], Shared[tuple[Any, ...]]],
        shares: Sequence[Share],
        tap_index: dict[TapPoint, int],
        width: int,
    ) -> None:
        self._parts, self._shares, self._width = parts, shares, width
        self._of_vectors, self._of_entries, self._of_configs = tables
        self._at_tap: dict[int, list[tuple[int, int]]] = {}
        """By tap: parts that act there, and which of their layers."""
        for i, part in enumerate(parts):
            for layer, tap in enumerate(part.spec.taps):
                if tap in tap_index and part.spec.prompt_from is None:
                    self._at_tap.setdefault(tap_index[tap], []).append((i, layer))
        self._seen: dict[tuple[int | None, ...], int] = {}
        self._placed: dict[tuple[_Term, ...], Chain] = {}
        self._digests: dict[int, bytes] = {}
        """By identity of a row of this request: its hash."""
        for part in parts:
            self._digests |= part.spec.made.rows
        self.held = Held([], [], [])
        self.new_rows: list[tuple[int, Row]] = []
        """Vector, and its rows of the table."""
        self.new_entries: list[tuple[int, _Entry]] = []
        self.new_configs: list[tuple[int, tuple[int, ...], dict[int, Chain]]] = []
        """Configuration, its first entry at each tap, and by tap the chains with an autoencoder."""

    def config_at(self, position: int, is_named: bool) -> int:
        """Configuration of a token; see `Programs.row_at`."""
        what = tuple([part.row_at(position, is_named) for part in self._parts])
        found = self._seen.get(what)
        if found is None:
            found = self._seen[what] = self._config(what)
        return found

    def _config(self, what: tuple[int | None, ...]) -> int:
        row_of, spliced = [0] * len(self._shares), dict[int, Chain]()
        for tap, here in self._at_tap.items():
            terms = tuple([(i, layer, r) for i, layer in here if (r := what[i]) is not None])
            if terms:
                chain = self._place(terms, self._shares[tap])
                row_of[tap] = chain.first
                if chain.splice is not None:
                    spliced[tap] = chain
        if not (spliced or any(row_of)):
            return 0
        rows = tuple(row_of)
        more = [(tap, chain.rest, chain.content) for tap, chain in spliced.items()]
        config, is_new = self._of_configs.take((rows, tuple(more)))
        self.held.configs.append(config)
        if is_new:
            self.new_configs.append((config, rows, spliced))
        return config

    def _place(self, terms: tuple[_Term, ...], share: Share) -> Chain:
        """What happens to one token at one tap."""
        found = self._placed.get(terms)
        if found is None:
            found = Chain(0)
            for i, layer, row in reversed(terms):
                for one in reversed(self._parts[i].spec.programs[layer][max(row, 0)]):
                    if one.kind == Kind.SPLICE:
                        found = Chain(0, one, found.first)
                    else:
                        entry = self._instruction(one, found.first, share)
                        found = found._replace(first=entry)
            self._placed[terms] = found
        return found

    def _instruction(self, one: Instruction, link: int, share: Share) -> int:
        code = int(one.kind) | (SEES_EDITS if one.sees_edits else 0) | (one.gate + 1) << GATE_SHIFT
        of_read, of_write = share, share
        if one.kind > Kind.TOKEN_GATE and one.read is not None:
            # The stream is whole on each rank, and a schedule is no row of it.
            of_read = 0, len(one.read)
        if one.kind >= Kind.GATE and one.write is not None:
            of_write = 0, len(one.write)
        read, write = self._row(one.read, of_read), self._row(one.write, of_write)
        return self._entry(code, read, write, link, one.params)

    def _entry(self, code: int, read: int, write: int, link: int, params: tuple[float, ...]) -> int:
        one = (int(code), read, write, link), params
        entry, is_new = self._of_entries.take(one)
        self.held.entries.append(entry)
        if is_new:
            self.new_entries.append((entry, one))
        return entry

    def _row(self, row: Row | None, share: Share) -> int:
        """Number of this rank's share of a direction, which may take several rows of the table."""
        if row is None:
            return 0
        start, size = share
        n = -(-size // self._width)
        number, is_new = self._of_vectors.take((self._digests[id(row)], share), n)
        self.held.vectors.append(number)
        if is_new:
            own = row[start : start + size]
            if size != n * self._width:
                own = np.pad(own, (0, n * self._width - size))
            self.new_rows.append((number, own.reshape(n, self._width)))
        return number


class Shared(Generic[Content]):
    """Numbers from 1 for contents, counted by use."""

    def __init__(self, size: int, what: str) -> None:
        self._what, self._size = what, size - 1
        self._is_free = np.arange(size) > 0
        self._numbers: dict[Content, int] = {}
        self._uses: dict[int, int] = {}
        self.contents: dict[int, Content] = {}
        """By number, of those that are held."""
        self.in_use = 0
        """Rows that are held."""

    def take(self, content: Content, n: int = 1) -> tuple[int, bool]:
        """The number of a content, which takes so many rows, and whether it is new."""
        number = self._numbers.get(content)
        is_new = number is None
        if number is None:
            if self.in_use + n > self._size:
                raise CapacityError(
                    f"edits: the {self._what} is full ({self._size} rows, {self.in_use} held by "
                    f"running requests, and {n} needed); try again when some have finished, or "
                    "raise INSPECT_LENS_BANK_BYTES"
                )
            number = int(self._is_free.argmax())
            self._is_free[number] = False
            self.in_use += n
            self._numbers[content] = number
            self.contents[number] = content
        self._uses[number] = self._uses.get(number, 0) + 1
        return number, is_new

    def is_held(self, number: int) -> bool:
        return number in self._uses

    def give(self, number: int) -> None:
        self._uses[number] -= 1
        if not self._uses[number]:
            del self._uses[number]
            del self._numbers[self.contents.pop(number)]
            self._is_free[number] = True
            self.in_use -= self._free_rows(number)

    def _free_rows(self, number: int) -> int:
        """Free what a number took; how many rows that was."""
        return 1


_MOVED_BYTES = 64 << 20
"""That are moved at once, where no run is longer: what is on its way takes memory of the device."""


class Runs(Shared[Content]):
    """Contents that take some rows one behind the other; they move where gaps are too small."""

    def __init__(self, size: int, what: str) -> None:
        super().__init__(size, what)
        self.rows: Longs = np.zeros(size, dtype=np.int64)
        """By number: the first row, or 0."""
        self._sizes: Longs = np.zeros(size, dtype=np.int64)
        self._is_free_row = np.arange(size) > 0
        self.move: Callable[[Longs, NDArray[np.int64]], None] = lambda *_: None
        """Moves some numbers, by their rows, (from and to, rows), before they are noted here. What
        it raises has moved nothing."""
        self.most_moved = size
        """Rows that are moved at once, and the rest of the last number."""

    def take(self, content: Content, n: int = 1) -> tuple[int, bool]:
        number, is_new = super().take(content, n)
        if is_new:
            try:
                first = self._find(n)
            except BaseException:
                self.give(number)
                self.in_use -= n
                raise
            self._is_free_row[first : first + n] = False
            self.rows[number], self._sizes[number] = first, n
        return number, is_new

    def _free_rows(self, number: int) -> int:
        first, n = int(self.rows[number]), int(self._sizes[number])
        self._is_free_row[first : first + n] = n > 0
        self.rows[number] = self._sizes[number] = 0
        return n

    def _find(self, n: int) -> int:
        """The first free row, or the first of the last `n` free ones side by side."""
        if n == 1:
            return int(self._is_free_row.argmax())
        free = np.concatenate(([0], np.cumsum(self._is_free_row)))
        (starts,) = np.nonzero(free[n:] - free[:-n] == n)
        if not len(starts):
            self._close_gaps()
            return len(self.rows) - n
        return int(starts[-1])

    def _close_gaps(self) -> None:
        """Move all to the front, piece by piece; what a fault leaves unmoved stays in its place."""
        (numbers,) = np.nonzero(self._sizes)
        numbers = numbers[self.rows[numbers].argsort()]
        sizes = self._sizes[numbers]
        first = 1 + np.cumsum(sizes) - sizes
        to_move = first != self.rows[numbers]
        numbers, sizes, first = numbers[to_move], sizes[to_move], first[to_move]
        piece = np.cumsum(sizes) // self.most_moved
        try:
            for i in np.unique(piece):
                some = numbers[piece == i]
                both = np.stack([self.rows[some], first[piece == i]])
                self.move(some, _expanded(both, sizes[piece == i]))
                self.rows[some] = both[1]
        finally:
            self._is_free_row[1:] = True
            (held,) = np.nonzero(self._sizes)
            self._is_free_row[_expanded(self.rows[None, held], self._sizes[held])[0]] = False


def _expanded(first: NDArray[np.int64], sizes: Longs) -> NDArray[np.int64]:
    """(lists, rows); all rows of runs of these sizes, of which each list has the first ones."""
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    rows: NDArray[np.int64] = np.repeat(first, sizes, axis=1) + within
    return rows
