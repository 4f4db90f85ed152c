"""The table of steering rows: which vector lies where, shared by content, counted by use.

A row is a float32 vector that is added as it is, or scaled to the norm of the stream first.
The vectors of one request that meet at one token are summed here, when the request arrives,
so that a tap never has to apply more than one row of each kind: a row may name a second one
(`link`), and that one never links on. Row 0 means "nothing".

What happens to one token at all taps together is a configuration: one row per tap. A step then
needs a single number per token, however many taps steer. Configuration 0 steers nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from inspect_lens.errors import CapacityError
from inspect_lens.spec import TapPoint

from ._envelope import EVERY, Envelope, SteerEnvelope
from ._plan import Named

__all__ = ["Bank", "BankTensors", "Steering"]

Row = NDArray[np.float32]
Content = TypeVar("Content")


@dataclass(frozen=True)
class BankTensors:
    """The device side of the bank.

    Attributes:
        vectors: (rows, hidden) float32.
        norm: (rows,) int32; 1 where the row is scaled by the norm of the stream.
        link: (rows,) int32; a second row for the same token, or 0.
        table: (configurations, taps) int32; the row that a configuration applies at a tap, or 0.
    """

    vectors: torch.Tensor
    norm: torch.Tensor
    link: torch.Tensor
    table: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, hidden: int, taps: int, device: torch.device) -> BankTensors:
        """Allocate a zeroed bank of `rows` vectors and as many configurations."""
        return cls(
            torch.zeros(rows, hidden, dtype=torch.float32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros(rows, taps, dtype=torch.int32, device=device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        tensors = (self.vectors, self.norm, self.link, self.table)
        return sum(t.numel() * t.element_size() for t in tensors)


@dataclass(frozen=True)
class _Vectors:
    """One spec, widened to float32 once, with its positions indexed."""

    spec: SteerEnvelope
    values: NDArray[np.float32]
    index: dict[int, int]

    @classmethod
    def load(cls, spec: SteerEnvelope) -> _Vectors:
        index = {p: i for i, p in enumerate(spec.positions or ()) if spec.lo <= p < spec.hi}
        return cls(spec, spec.vectors.to_float32(), index)

    def row_at(self, position: int, is_named: bool) -> int | None:
        """Which of the vectors a token gets: an index, -1 for the shared one, None for none.

        Args:
            position: of the token, or of one like it that nothing names.
            is_named: whether some vector of the request names the position.
        """
        if self.spec.positions is None:
            return -1 if self.spec.lo <= position < self.spec.hi else None
        i = self.index.get(position) if is_named else None
        return -1 if i is not None and self.values.ndim == 2 else i

    def at(self, tap: TapPoint, row: int) -> Row:
        """The vector that `row_at` chose."""
        rows = cast("Row", self.values[self.spec.taps.index(tap)])
        return rows if row < 0 else cast("Row", rows[row])


@dataclass(frozen=True)
class Steering:
    """How the tokens of one request are steered."""

    config: int
    """Configuration of tokens that nothing names."""
    named: Named | None
    """Tokens that are steered by position or phase."""
    rows: list[int]
    """Rows to give back."""
    configs: list[int]
    """Configurations to give back."""
    content: str
    """Names all of it: whoever brings the same while it is held shares it."""


class Bank:
    """Host side of the bank: allocation, sharing by content, and reference counts."""

    def __init__(self, tensors: BankTensors) -> None:
        self._tensors = tensors
        rows, taps = tensors.table.shape
        self._rows: _Shared[tuple[bytes, int, int]] = _Shared(rows, "steering table")
        self._configs: _Shared[tuple[int, ...]] = _Shared(rows, "table of configurations")
        self._held: dict[str, tuple[Steering, int]] = {}
        """By content: the steering, and how many requests have it."""
        self.config_taps = np.zeros((rows, taps), dtype=np.bool_)
        """(configurations, taps); whether a configuration steers at a tap."""

    @property
    def rows_in_use(self) -> int:
        """Rows that some request holds."""
        return self._rows.in_use

    def admit(self, envelope: Envelope, tap_index: dict[TapPoint, int]) -> Steering:
        """Place the vectors of one request.

        Args:
            envelope: the request.
            tap_index: index of each tap of this worker; vectors for others are left to the
                workers that have them.

        Returns:
            What the plan needs and `release` takes back.

        Raises:
            CapacityError: the table is full; nothing was taken.
        """
        content = envelope.steer_hash or ""
        held, users = self._held.get(content, (None, 0))
        if held is None:
            # A batch that is steered alike is looked at once: the step loop waits.
            held = self._admit(envelope, tap_index, content)
        self._held[content] = held, users + 1
        return held

    def _admit(self, envelope: Envelope, tap_index: dict[TapPoint, int], content: str) -> Steering:
        rows: list[int] = []
        configs: list[int] = []
        placed: dict[tuple[object, ...], int] = {}
        vectors = [_Vectors.load(s) for s in envelope.steer]
        here = [t for t in {t for v in vectors for t in v.spec.taps} if t in tap_index]

        def config(what: tuple[int | None, ...]) -> int:
            row_of = [0] * self.config_taps.shape[1]
            for tap in here:
                at_tap = [(v, row) for v, row in zip(vectors, what, strict=True) if row is not None]
                at_tap = [(v, row) for v, row in at_tap if tap in v.spec.taps]
                row_of[tap_index[tap]] = self._place(at_tap, tap, rows, placed)
            # Positions that share their vectors share a configuration, found without looking at
            # every tap: the step loop waits.
            return self._take_config(tuple(row_of), configs)

        try:
            seen: dict[tuple[int | None, ...], int] = {}

            def config_at(position: int, is_named: bool) -> int:
                what = tuple(v.row_at(position, is_named) for v in vectors)
                if what not in seen:
                    seen[what] = config(what)
                return seen[what]

            every = config_at(0, False)
            # Phases change at the end of the prompt and nowhere else.
            edge = max((e for v in vectors for e in (v.spec.lo, v.spec.hi) if e < EVERY), default=0)
            behind = config_at(edge, False) if edge else every
            positions = sorted({p for v in vectors for p in v.index})
            ids = np.asarray([config_at(p, True) for p in positions], dtype=np.int32)
        except BaseException:
            self._release(rows, configs)
            raise
        named = None
        if positions or behind != every:
            named = Named(np.asarray(positions, dtype=np.int64), ids, edge, behind)
        return Steering(every, named, rows, configs, content)

    def release(self, steering: Steering) -> None:
        """Give back what a request held; a row is free again when its last user has gone."""
        users = self._held[steering.content][1] - 1
        if users:
            self._held[steering.content] = steering, users
            return
        del self._held[steering.content]
        self._release(steering.rows, steering.configs)

    def _release(self, rows: list[int], configs: list[int]) -> None:
        for row in rows:
            self._rows.give(row)
        for config in configs:
            self._configs.give(config)

    def _place(
        self,
        vectors: list[tuple[_Vectors, int]],
        tap: TapPoint,
        held: list[int],
        placed: dict[tuple[object, ...], int],
    ) -> int:
        """Row for one token at one tap: the sum of what applies there; 0 when nothing does.

        A vector that many positions share is summed and hashed once.
        """
        what = (tap, *((id(v), row) for v, row in vectors))
        if what not in placed:
            placed[what] = self._sum(vectors, tap, held)
        return placed[what]

    def _sum(self, vectors: list[tuple[_Vectors, int]], tap: TapPoint, held: list[int]) -> int:
        plain: Row | None = None
        matched: Row | None = None
        for v, row in vectors:
            vector = v.at(tap, row)
            if v.spec.norm_match:
                term = (v.spec.scale / np.linalg.norm(vector.astype(np.float64)) * vector).astype(
                    np.float32
                )
                matched = term if matched is None else matched + term
            else:
                term = np.float32(v.spec.scale) * vector
                plain = term if plain is None else plain + term
        second = 0 if matched is None else self._take_row(matched, True, 0, held)
        return second if plain is None else self._take_row(plain, False, second, held)

    def _take_row(self, vector: Row, norm: bool, link: int, held: list[int]) -> int:
        vector = np.ascontiguousarray(vector, dtype=np.float32)
        content = (hashlib.sha256(vector.tobytes()).digest(), int(norm), link)
        row, is_new = self._rows.take(content)
        held.append(row)
        if is_new:
            _upload(self._tensors.vectors[row], torch.from_numpy(vector))
            self._tensors.norm[row] = int(norm)
            self._tensors.link[row] = link
        return row

    def _take_config(self, rows: tuple[int, ...], held: list[int]) -> int:
        if not any(rows):
            return 0
        config, is_new = self._configs.take(rows)
        held.append(config)
        if is_new:
            _upload(self._tensors.table[config], torch.tensor(rows, dtype=torch.int32))
            self.config_taps[config] = np.asarray(rows) != 0
        return config


class _Shared(Generic[Content]):
    """Numbers from 1 for contents, counted by use."""

    def __init__(self, size: int, what: str) -> None:
        self._what, self._size = what, size - 1
        self._free = list(range(size - 1, 0, -1))
        self._by_content: dict[Content, int] = {}
        self._content: dict[int, Content] = {}
        self._uses: dict[int, int] = {}

    @property
    def in_use(self) -> int:
        return len(self._uses)

    def take(self, content: Content) -> tuple[int, bool]:
        """The number of a content, and whether it is new."""
        number = self._by_content.get(content)
        is_new = number is None
        if number is None:
            if not self._free:
                raise CapacityError(
                    f"steer: the {self._what} is full ({self._size} rows, all held by running "
                    "requests); try again when some have finished, or raise "
                    "INSPECT_LENS_BANK_BYTES"
                )
            number = self._free.pop()
            self._by_content[content] = number
            self._content[number] = content
        self._uses[number] = self._uses.get(number, 0) + 1
        return number, is_new

    def give(self, number: int) -> None:
        self._uses[number] -= 1
        if not self._uses[number]:
            del self._uses[number]
            del self._by_content[self._content.pop(number)]
            self._free.append(number)


def _upload(target: torch.Tensor, value: torch.Tensor) -> None:
    # From pageable memory the copy would wait for everything that the GPU has been given.
    source = value.pin_memory() if target.is_cuda else value
    target.copy_(source, non_blocking=True)
