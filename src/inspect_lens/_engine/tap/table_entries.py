"""Placing one request's edits in the table: what it shares with others, and what is new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from inspect_lens._engine.protocol.edits import EditEnvelope
from inspect_lens._engine.protocol.envelope import SteerEnvelope
from inspect_lens.errors import CapacityError
from inspect_lens.spec import Instruction, Kind, TapPoint

__all__ = [
    "GATE_SHIFT",
    "SEES_EDITS",
    "Held",
    "Part",
    "Placing",
    "Programs",
    "Row",
    "Share",
    "Shared",
    "Vectors",
]

Row = NDArray[np.float32]
Share = tuple[int, int]
"""The numbers of a row that a rank has: where they begin, and how many they are."""
Content = TypeVar("Content")

SEES_EDITS = 1 << 4
"""Bit of an entry's code: it reads the stream as the entries before it left it. The bits below
are its `Kind`, those above the register of its gate, counted from 1."""
GATE_SHIFT = 5


_Term = tuple[int, int, int]
"""A part of a request, which of its layers, and which of its positions; -1 for all of them."""

_AS_IT_IS, _BY_NORM = (0.0, 1.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0)
"""Parameters of entries that add a sum of steering vectors."""

_CHUNK = 256
"""Rows that are widened to float64 at once."""


class Vectors:
    """One spec, with its positions indexed, and widened to float32 once if it has to be."""

    def __init__(self, spec: SteerEnvelope) -> None:
        self.spec = spec
        self.index = _index(spec)
        self.has_positions = len(spec.vectors.shape) == 3
        self.content = spec.sha256, spec.scale

    @cached_property
    def _values(self) -> Row:
        return self.spec.vectors.to_float32()

    def row_at(self, position: int, is_named: bool) -> int | None:
        """Which of the vectors a token gets: an index, -1 for the shared one, None for none."""
        return _row_at(self.spec, self.index, position, is_named, has_own=self.has_positions)

    def scaled(self, layers: list[int], rows: list[int]) -> Row:
        """Rows that are to be added, or to be multiplied by a norm; memory of their own."""
        at = (layers, rows) if self.has_positions else (layers,)
        picked: Row = self._values[at]
        if not self.spec.norm_match:
            np.multiply(picked, np.float32(self.spec.scale), out=picked)
            return picked
        for a in range(0, len(picked), _CHUNK):
            wide = picked[a : a + _CHUNK].astype(np.float64)
            norm = np.linalg.norm(wide, axis=-1, keepdims=True)
            picked[a : a + _CHUNK] = self.spec.scale / norm * wide
        return picked


class Programs:
    """One edit of another kind, with its positions indexed."""

    def __init__(self, spec: EditEnvelope) -> None:
        self.spec = spec
        self.index = _index(spec)

    def row_at(self, position: int, is_named: bool) -> int | None:
        """See `Vectors.row_at`."""
        spec = self.spec
        return _row_at(spec, self.index, position, is_named, has_own=spec.is_listed)


Part = Vectors | Programs
"""Anything that edits."""


def _index(spec: SteerEnvelope | EditEnvelope) -> dict[int, int]:
    return {p: i for i, p in enumerate(spec.positions or ()) if spec.lo <= p < spec.hi}


def _row_at(
    spec: SteerEnvelope | EditEnvelope,
    index: Mapping[int, int],
    position: int,
    is_named: bool,
    *,
    has_own: bool,
) -> int | None:
    if spec.positions is None:
        return -1 if spec.lo <= position < spec.hi else None
    i = index.get(position) if is_named else None
    return -1 if i is not None and not has_own else i


class Held(NamedTuple):
    """What a request holds, configurations aside."""

    vectors: list[int]
    entries: list[int]


class Placing:
    """The vectors, entries and configurations of one request, as they are found or taken."""

    def __init__(
        self,
        parts: list[Part],
        tables: tuple[Shared[tuple[Any, ...]], Shared[tuple[Any, ...]], Shared[tuple[int, ...]]],
        shares: Sequence[Share],
        tap_index: dict[TapPoint, int],
        width: int,
    ) -> None:
        """Store what is to be placed."""
        self._parts, self._shares, self._width = parts, shares, width
        self._of_vectors, self._of_entries, self._of_configs = tables
        self._at_tap: dict[int, list[tuple[int, int]]] = {}
        """By tap: parts that act there, and which of their layers."""
        for i, part in enumerate(parts):
            for layer, tap in enumerate(part.spec.taps):
                if tap in tap_index:
                    self._at_tap.setdefault(tap_index[tap], []).append((i, layer))
        self._seen: dict[tuple[int | None, ...], int] = {}
        self._placed: dict[tuple[_Term, ...], int] = {}
        self._digests: dict[int, bytes] = {}
        """By identity of a row of this request: its hash."""
        for part in parts:
            if isinstance(part, Programs):
                self._digests |= part.spec.made.rows
        self.held = Held([], [])
        self.configs: list[int] = []
        """What the request holds."""
        self.new_sums: list[tuple[int, tuple[_Term, ...]]] = []
        """Vector, and what is added up in it."""
        self.new_rows: list[tuple[int, Row]] = []
        self.new_entries: list[tuple[int, tuple[int, ...], tuple[float, ...]]] = []
        """Entry, its words and its parameters."""
        self.new_configs: list[tuple[int, tuple[int, ...]]] = []

    def config_at(self, position: int, is_named: bool) -> int:
        """Configuration of a token; see `Vectors.row_at`.

        Positions that share their vectors share a configuration, found without looking at every
        tap.
        """
        what = tuple([part.row_at(position, is_named) for part in self._parts])
        found = self._seen.get(what)
        if found is None:
            found = self._seen[what] = self._config(what)
        return found

    def _config(self, what: tuple[int | None, ...]) -> int:
        row_of = [0] * len(self._shares)
        for tap, here in self._at_tap.items():
            terms = tuple([(i, layer, r) for i, layer in here if (r := what[i]) is not None])
            if terms:
                row_of[tap] = self._place(terms, self._shares[tap])
        if not any(row_of):
            return 0
        rows = tuple(row_of)
        config, is_new = self._of_configs.take(rows)
        self.configs.append(config)
        if is_new:
            self.new_configs.append((config, rows))
        return config

    def _place(self, terms: tuple[_Term, ...], share: Share) -> int:
        """First entry for one token at one tap."""
        found = self._placed.get(terms)
        if found is None:
            found = 0
            for i, layer, row in reversed(terms):
                part = self._parts[i]
                if isinstance(part, Programs):
                    for one in reversed(part.spec.programs[layer][max(row, 0)]):
                        found = self._instruction(one, found, share)
            vectors = [(t, v) for t in terms if isinstance(v := self._parts[t[0]], Vectors)]
            matched = tuple([t for t, v in vectors if v.spec.norm_match])
            plain = tuple([t for t, v in vectors if not v.spec.norm_match])
            if matched:
                found = self._entry(Kind.NORM, 0, self._sum(matched), found, _BY_NORM)
            if plain:
                found = self._entry(Kind.LINEAR, 0, self._sum(plain), found, _AS_IT_IS)
            self._placed[terms] = found
        return found

    def _sum(self, terms: tuple[_Term, ...]) -> int:
        """Vector that is the sum of some steering vectors of one kind."""
        vectors = [(self._vectors_at(i), layer, row) for i, layer, row in terms]
        made_of = tuple([(v.content, v.spec.norm_match, layer, row) for v, layer, row in vectors])
        number, is_new = self._of_vectors.take(made_of)
        self.held.vectors.append(number)
        if is_new:
            self.new_sums.append((number, terms))
        return number

    def _vectors_at(self, i: int) -> Vectors:
        part = self._parts[i]
        assert isinstance(part, Vectors)
        return part

    def _instruction(self, one: Instruction, link: int, share: Share) -> int:
        code = int(one.kind) | (SEES_EDITS if one.sees_edits else 0) | (one.gate + 1) << GATE_SHIFT
        read, write = self._row(one.read, share), self._row(one.write, share)
        return self._entry(code, read, write, link, one.params)

    def _entry(self, code: int, read: int, write: int, link: int, params: tuple[float, ...]) -> int:
        words = int(code), read, write, link
        entry, is_new = self._of_entries.take((words, params))
        self.held.entries.append(entry)
        if is_new:
            self.new_entries.append((entry, words, params))
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
            self.new_rows += enumerate(own.reshape(n, self._width), number)
        return number

    def sums(self) -> Row:
        """(new sums, hidden)."""
        parts: dict[tuple[int, int], tuple[list[int], list[int], list[int]]] = {}
        for at, (_, terms) in enumerate(self.new_sums):
            for turn, (i, layer, row) in enumerate(terms):
                into = parts.setdefault((turn, i), ([], [], []))
                for values, value in zip(into, (at, layer, row), strict=True):
                    values.append(value)
        n = len(self.new_sums)
        out: Row | None = None
        # The first terms of all rows, and then the second ones: sums are taken in their order.
        for (turn, i), (places, layers, rows) in sorted(parts.items()):
            part = self._vectors_at(i).scaled(layers, rows)
            if out is None and len(places) == n:
                out = part
                continue
            if out is None:
                out = np.empty((n, part.shape[1]), dtype=np.float32)
            if turn:
                out[places] += part
            else:
                out[places] = part
        assert out is not None
        return out


class Shared(Generic[Content]):
    """Numbers from 1 for contents, counted by use. A content may have several in a row."""

    def __init__(self, size: int, what: str) -> None:
        self._what, self._size = what, size - 1
        self._is_free = np.arange(size) > 0
        self._n_free = size - 1
        self._by_content: dict[Content, int] = {}
        self._content: dict[int, Content] = {}
        self._uses: dict[int, int] = {}
        self._runs: dict[int, int] = {}
        """How many numbers a content has, where it is not one."""

    @property
    def in_use(self) -> int:
        """How many numbers are held."""
        return self._size - self._n_free

    def take(self, content: Content, n: int = 1) -> tuple[int, bool]:
        """The number of a content, or the first of its `n`, and whether it is new."""
        number = self._by_content.get(content)
        is_new = number is None
        if number is None:
            number = self._find(n)
            if number is None:
                why = "all held by running requests" if n == 1 else f"no {n} in a row left"
                raise CapacityError(
                    f"steer: the {self._what} is full ({self._size} rows, {why}); try again when "
                    "some have finished, or raise INSPECT_LENS_BANK_BYTES"
                )
            self._is_free[number : number + n] = False
            self._n_free -= n
            self._by_content[content] = number
            self._content[number] = content
            if n > 1:
                self._runs[number] = n
        self._uses[number] = self._uses.get(number, 0) + 1
        return number, is_new

    def give(self, number: int) -> None:
        """Give back one use of a number."""
        self._uses[number] -= 1
        if not self._uses[number]:
            del self._uses[number]
            del self._by_content[self._content.pop(number)]
            n = self._runs.pop(number, 1)
            self._is_free[number : number + n] = True
            self._n_free += n

    def _find(self, n: int) -> int | None:
        """The first free number, or the first of the last `n` free ones in a row."""
        if self._n_free < n:
            return None
        if n == 1:
            return int(self._is_free.argmax())
        free = np.concatenate(([0], np.cumsum(self._is_free)))
        (starts,) = np.nonzero(free[n:] - free[:-n] == n)
        return int(starts[-1]) if len(starts) else None
