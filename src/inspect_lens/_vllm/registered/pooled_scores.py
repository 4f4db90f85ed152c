"""Means of linear scores, of many probes at once: what is asked for most by far."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import CaptureError
from inspect_lens.spec import EngineProbe, ProbeReceipt, ProbeUse

__all__ = ["Floats", "Means", "Plain", "Whole", "no_number", "take_together"]

Floats = NDArray[np.float64]

_PUT: dict[str, Callable[[ProbeReceipt, object], None]] = {
    field.name: getattr(ProbeReceipt, field.name).__set__ for field in fields(ProbeReceipt)
}
"""By field: what sets it, which a frozen class does not do itself."""
_NOT_ASKED_FOR = {"tokens": None, "threshold": None, "alarm_position": None, "stopped": False}
"""Fields of receipts that are of other uses."""
_TOGETHER = 32
"""Requests whose numbers are added at once: half a megabyte of 16 probes over 128 tokens."""


class Plain:
    """Uses that want a mean over the same tokens and nothing else."""

    def __init__(self) -> None:
        self.at: list[int] = []
        """Index of each in the request."""
        self.columns: list[int] = []
        self.pick: slice | NDArray[np.int64] = slice(0)
        """The columns as an index; a slice where they lie side by side."""
        self.bias: Floats = np.zeros(0)
        self.names: list[str] = []
        self.hashes: list[str] = []
        """sha256 of each probe."""

    def add(self, i: int, use: ProbeUse, probe: EngineProbe, column: int) -> None:
        """Add the i-th use of the request, whose probe has this column."""
        self.at.append(i)
        self.columns.append(column)
        self.bias = np.append(self.bias, probe.bias("bias"))
        self.names.append(use.name)
        self.hashes.append(probe.sha256)
        first, n = self.columns[0], len(self.columns)
        is_run = self.columns == list(range(first, first + n))
        self.pick = slice(first, first + n) if is_run else np.asarray(self.columns)


class Means:
    """What such uses have read of one request."""

    def __init__(self, plain: Plain, where: range) -> None:
        self.plain = plain
        self._where = where
        self._total: Floats | None = None
        self._scores: list[float] | None = None
        """Means of what was taken together with others'."""
        self._n = 0
        self._first: int | None = None
        self._receipts: _Receipts | None = None

    def prepare(self) -> None:
        """Make receipts as if the request ran to its end."""
        if self._receipts is None:
            where = self._where
            first = where.start if where else None
            self._receipts = _Receipts(self.plain, len(where), first)

    def read(self, n: int, first: int) -> tuple[int, int]:
        """First and one past the last of `n` positions from `first` on that are read."""
        a = min(max(self._where.start - first, 0), n)
        return a, max(a, min(self._where.stop - first, n))

    def take(self, columns: NDArray[Any], first: int) -> None:
        """Add the tokens among these positions that are read."""
        a, b = self.read(len(columns), first)
        if a == b:
            return
        # In float64, which the bias has.
        scores: Floats = columns[a:b, self.plain.pick] + self.plain.bias
        if self._total is not None:
            scores[0] += self._total
        else:
            self._first = first + a
        self._total, self._n, self._scores = _in_order(scores), self._n + b - a, None

    def put(self, total: Floats, scores: list[float] | None, n: int, first: int) -> None:
        """Note what `take_together` found in the tokens that were taken, the first ones."""
        self._total, self._scores, self._n, self._first = total, scores, n, first

    def receipts(self) -> tuple[ProbeReceipt, ...]:
        """What each use found.

        Raises:
            CaptureError: a score is NaN.
        """
        plain, total = self.plain, self._total
        scores: Sequence[float | None] = [None] * len(plain.at)
        if self._scores is not None:
            scores = self._scores
        elif total is not None:
            found = (total / self._n).tolist()
            # One sum tells that none is NaN; infinities of both signs are looked at again.
            if math.isnan(sum(found)) and np.isnan(total).any():
                raise no_number(plain.names[int(np.isnan(total).argmax())])
            scores = found
        made, self._receipts = self._receipts, None
        if made is None:
            made = _Receipts(plain, self._n, self._first)
        return made.filled(scores, self._n, self._first)

    def numbered(self) -> Iterator[tuple[int, ProbeReceipt]]:
        """The same, by each use's index in the request."""
        return zip(self.plain.at, self.receipts(), strict=True)


@dataclass(frozen=True, slots=True)
class Whole:
    """All that is read of a request, at once."""

    means: Means
    columns: NDArray[Any]
    """(tokens, columns) float32; of the tokens that are read, one at least."""
    first: int
    """Position of the first one."""
    key: tuple[int, int]
    """Of requests with the same plain uses, of which as many tokens are read."""


def take_together(taken: Sequence[Whole]) -> None:
    """`Means.take` for some requests with the same key, of which nothing was taken before."""
    plain, n = taken[0].means.plain, len(taken[0].columns)
    for k in range(0, len(taken), _TOGETHER):
        some = taken[k : k + _TOGETHER]
        # Side by side, so that a sum runs over long rows.
        rows = np.concatenate([whole.columns for whole in some], axis=1)
        totals = _in_order(rows + np.tile(plain.bias, len(some))).reshape(len(some), -1)
        # One that is none is looked for where receipts are made.
        are_numbers = not np.isnan(totals).any()
        scores = (totals / n).tolist() if are_numbers else [None] * len(some)
        for whole, total, mine in zip(some, totals, scores, strict=True):
            whole.means.put(total, mine, n, whole.first)


def _in_order(scores: Floats) -> Floats:
    """Sums over tokens of (tokens, columns), as the library's pools make them.

    In the order of the tokens, in parts or at once. A single column would be summed pairwise.
    """
    is_one = scores.shape[1] == 1
    sums: Floats = np.cumsum(scores, axis=0)[-1] if is_one else np.add.reduce(scores, axis=0)
    return sums


class _Receipts:
    """Receipts of means, made and filled field by field.

    Validated they take twice the time, and nothing hides any of it when a batch of requests with
    many probes ends in one step. So they are made before, with all but the scores.
    """

    def __init__(self, plain: Plain, n: int, first: int | None) -> None:
        """Make them.

        Args:
            plain: uses that want means.
            n: tokens that each will have read, as far as is known.
            first: position of the first one.
        """
        self._made = tuple(map(object.__new__, repeat(ProbeReceipt, len(plain.names))))
        self._n, self._first = n, first
        columns: dict[str, Iterable[object]] = {"name": plain.names, "sha256": plain.hashes}
        fixed = {"aggregate": "mean", "n_tokens": n, "first_position": first, **_NOT_ASKED_FOR}
        columns |= {name: repeat(value) for name, value in fixed.items()}
        for name in _PUT.keys() - {"score"}:
            self._put(name, columns[name])

    def filled(
        self, scores: Sequence[float | None], n: int, first: int | None
    ) -> tuple[ProbeReceipt, ...]:
        """Fill the scores in, and what has come differently; called once.

        Args:
            scores: of each use.
            n: tokens that were read.
            first: position of the first one.
        """
        self._put("score", scores)
        if (n, first) != (self._n, self._first):
            self._put("n_tokens", repeat(n))
            self._put("first_position", repeat(first))
        return self._made

    def _put(self, name: str, values: Iterable[object]) -> None:
        deque(map(_PUT[name], self._made, values), maxlen=0)


def no_number(name: str) -> CaptureError:
    """The error for a score that is NaN."""
    return CaptureError(
        f"probe {name!r} gave NaN: the model's activations are not finite, or the probe's weights "
        "are too large for them; a score would mean nothing"
    )
