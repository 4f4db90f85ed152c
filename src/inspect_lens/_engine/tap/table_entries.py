"""Placing one request's edits in the table: what it shares with others, and what is new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from inspect_lens._engine.protocol.edits import EditEnvelope
from inspect_lens.errors import CapacityError
from inspect_lens.spec import Instruction, TapPoint

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
    """What a request holds, configurations aside."""

    vectors: list[int]
    entries: list[int]


class Placing:
    """The vectors, entries and configurations of one request, as they are found or taken."""

    def __init__(
        self,
        parts: list[Programs],
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
            self._digests |= part.spec.made.rows
        self.held = Held([], [])
        self.configs: list[int] = []
        """What the request holds."""
        self.new_rows: list[tuple[int, Row]] = []
        self.new_entries: list[tuple[int, tuple[int, ...], tuple[float, ...]]] = []
        """Entry, its words and its parameters."""
        self.new_configs: list[tuple[int, tuple[int, ...]]] = []

    def config_at(self, position: int, is_named: bool) -> int:
        """Configuration of a token; see `Programs.row_at`.

        Positions that share their programs share a configuration, found without looking at every
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
                for one in reversed(self._parts[i].spec.programs[layer][max(row, 0)]):
                    found = self._instruction(one, found, share)
            self._placed[terms] = found
        return found

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
                    f"edits: the {self._what} is full ({self._size} rows, {why}); try again when "
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
