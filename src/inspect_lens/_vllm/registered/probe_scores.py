"""From the numbers that probes left per token to scores, aggregates and alarms."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import repeat
from operator import itemgetter
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from inspect_lens._engine.protocol.readouts import AskedProbes
from inspect_lens.errors import CaptureError
from inspect_lens.probe import StreamingPool, pool_scores
from inspect_lens.spec import (
    EngineProbe,
    Numerics,
    PositionName,
    ProbeReceipt,
    ProbeUse,
    resolve_positions,
)

Floats = NDArray[np.float64]

_PUT: dict[str, Callable[[ProbeReceipt, object], None]] = {
    field.name: getattr(ProbeReceipt, field.name).__set__ for field in fields(ProbeReceipt)
}
"""By field: what sets it, which a frozen class does not do itself."""
_NOT_ASKED_FOR = {
    "tokens": None, "threshold": None, "threshold_tokens": None, "alarm_position": None,
    "stopped": False, "threshold_differs": None,
}  # fmt: skip
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
    """Sums over tokens of (tokens, columns), as the library's pools make them."""
    # In the order of the tokens, in parts or at once. A single column would be summed pairwise.
    is_one = scores.shape[1] == 1
    sums: Floats = np.cumsum(scores, axis=0)[-1] if is_one else np.add.reduce(scores, axis=0)
    return sums


class _Receipts:
    """Receipts of means, made and filled field by field.

    Validated they take twice the time, and nothing hides any of it when a batch of requests with
    many probes ends in one step. So they are made before, with all but the scores.
    """

    def __init__(self, plain: Plain, n: int, first: int | None) -> None:
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
        """Fill the scores in, and what has come differently; called once."""
        self._put("score", scores)
        if (n, first) != (self._n, self._first):
            self._put("n_tokens", repeat(n))
            self._put("first_position", repeat(first))
        return self._made

    def _put(self, name: str, values: Iterable[object]) -> None:
        deque(map(_PUT[name], self._made, values), maxlen=0)


def no_number(name: str) -> CaptureError:
    return CaptureError(
        f"probe {name!r} gave NaN: the model's activations are not finite, or the probe's weights "
        "are too large for them; a score would mean nothing"
    )


_USES = TypeAdapter(tuple[ProbeUse, ...])


def read_uses(wire: str) -> tuple[ProbeUse, ...]:
    """Read `Reads.wire`; a server and a request may both use a probe."""
    return _USES.validate_json(wire)


class Reads:
    """Uses of probes, and what reading them takes that is the same for all requests with them."""

    def __init__(
        self,
        uses: Sequence[ProbeUse],
        registered: Mapping[str, EngineProbe],
        numerics: Numerics | None = None,
    ) -> None:
        self.asked = AskedProbes.of(uses, registered)
        """What sealing takes of them."""
        self.uses = tuple(uses)
        self.may_stop = any(use.alarm == "stop" for use in uses)
        """Whether one of them may end a generation."""
        self.watches = any(use.alarm for use in uses)
        """Whether one of them has an alarm."""
        self.streams_tokens = any(use.tokens for use in uses)
        """Whether token scores were asked for."""
        self.probes = tuple(registered[use.name] for use in uses)
        self.wire = _USES.dump_json(self.uses).decode()
        """The uses as text; the same object always."""
        self.differences = tuple(
            () if numerics is None else probe.alarm_differences(use, numerics)
            for use, probe in zip(self.uses, self.probes, strict=True)
        )
        """By use: what is computed otherwise than its threshold was calibrated with."""
        self.plain: dict[PositionName, Plain] = {}
        """By the tokens that they read."""
        self.others: list[tuple[int, int]] = []
        """Index and first column."""
        self.n_by_token = 0
        """Those whose reading takes Python for each token; the rest is read as an array."""
        column = 0
        for i, (use, probe) in enumerate(zip(self.uses, self.probes, strict=True)):
            is_mean = _is_mean(use, probe)
            self.n_by_token += not is_mean
            if is_mean and isinstance(use.positions, str) and not use.tokens:
                self.plain.setdefault(use.positions, Plain()).add(i, use, probe, column)
            else:
                self.others.append((i, column))
            column += probe.columns


class Reading:
    """The probes of one request, fed with their numbers as these arrive."""

    def __init__(self, reads: Reads, *, lo: int, n_prompt: int, n_max: int) -> None:
        # Nothing else is done here, since the engine does not have the request yet.
        self._reads = reads
        self._lo, self._n_prompt, self._n_max = lo, n_prompt, n_max
        self.n_seen = 0

    @cached_property
    def _plain(self) -> list[Means]:
        return [
            Means(plain, cast("range", self._where(plain.at[0])))
            for plain in self._reads.plain.values()
        ]

    @cached_property
    def _uses(self) -> list[_Use]:
        return [_Use(i, self._reads, column, self._where(i)) for i, column in self._reads.others]

    def _where(self, i: int) -> range | tuple[int, ...]:
        return resolve_positions(
            self._reads.uses[i].positions,
            n_prompt=self._n_prompt,
            n_max=self._n_max,
            field=f"probes[{i}].positions",
        )

    @property
    def has_alarm(self) -> bool:
        return self._reads.may_stop

    @property
    def watches(self) -> bool:
        return self._reads.watches

    @property
    def streams_tokens(self) -> bool:
        return self._reads.streams_tokens

    @property
    def n_by_token(self) -> int:
        """Uses whose reading takes Python for each token."""
        return self._reads.n_by_token

    @property
    def n_others(self) -> int:
        """Uses that want more than a mean: these, and those whose token scores are listed."""
        return len(self._reads.others)

    def prepare(self) -> None:
        """Do what can be done before the last number has come, while the engine is waited for."""
        for means in self._plain:
            means.prepare()

    def feed(self, numbers: NDArray[np.float32]) -> dict[str, list[float]]:
        """Take the next positions, (shares, positions, columns); new token scores by name."""
        first = self._lo + self.n_seen
        self.n_seen += numbers.shape[1]
        if not numbers.shape[1]:
            return {}
        columns: NDArray[Any] = numbers[0]
        if len(numbers) > 1:
            # Shares of the workers, added where they meet.
            columns = np.add.reduce(numbers, axis=0, dtype=np.float64)
        for means in self._plain:
            means.take(columns, first)
        new: dict[str, list[float]] = {}
        if not self._uses:
            return new
        wide = columns.astype(np.float64, copy=False)
        for use in self._uses:
            scores = use.take(wide, first)
            if use.use.tokens and len(scores):
                new[use.use.name] = scores.tolist()
        return new

    def whole(self, numbers: NDArray[np.float32]) -> Whole | None:
        """All numbers for `feed_together`, which may be still to come.

        None where something else is wanted than means over the same tokens.
        """
        if self._reads.others or self.n_seen or len(numbers) != 1 or len(self._plain) != 1:
            return None
        (means,) = self._plain
        a, b = means.read(numbers.shape[1], self._lo)
        if a == b:
            return None
        plain = means.plain
        return Whole(means, numbers[0][a:b, plain.pick], self._lo + a, (id(plain), b - a))

    def alarm(self) -> str | None:
        """Name of a probe whose alarm has to end the generation now."""
        for use in self._uses:
            if use.use.alarm == "stop" and use.alarm_position is not None:
                use.stopped = True
                return use.use.name
        return None

    def raised(self) -> list[tuple[int, ProbeReceipt]]:
        """Probes that have raised an alarm, by index; a score that is none does not hide it."""
        uses = [use for use in self._uses if use.alarm_position is not None]
        return [(use.at, use.receipt(may_lack=True)) for use in uses]

    def receipts(self) -> tuple[ProbeReceipt, ...]:
        if len(self._plain) == 1 and not self._reads.others:
            return self._plain[0].receipts()
        found = [pair for means in self._plain for pair in means.numbered()]
        found += [(use.at, use.receipt()) for use in self._uses]
        found.sort(key=itemgetter(0))
        return tuple(receipt for _, receipt in found)


def feed_together(wholes: Iterable[Whole]) -> None:
    """`Reading.feed` for many requests: a batch ends in one step, and mostly asks for one thing."""
    alike: dict[tuple[int, int], list[Whole]] = {}
    for whole in wholes:
        alike.setdefault(whole.key, []).append(whole)
    for taken in alike.values():
        take_together(taken)


def _is_mean(use: ProbeUse, probe: EngineProbe) -> bool:
    """Whether a use wants the mean of linear scores, and nobody looks at each."""
    pool = use.aggregate or probe.aggregate
    return probe.kind == "linear" and pool == "mean" and use.alarm is None


class _Use:
    def __init__(self, at: int, reads: Reads, column: int, where: range | tuple[int, ...]) -> None:
        use, probe = reads.uses[at], reads.probes[at]
        self.at, self.use, self.probe, self.differs = at, use, probe, reads.differences[at]
        self.stopped = False
        self._columns = slice(column, column + probe.columns)
        self._where = where if isinstance(where, range) else frozenset(where)
        self._attention = _Attention(probe) if probe.kind == "attention" else None
        self._bias = probe.bias("bias") if probe.kind == "linear" else 0.0
        # An attention probe's score is one of the text so far: the last one stands for all.
        self._pool = "last" if self._attention else (use.aggregate or probe.aggregate)
        self._threshold = None if use.alarm is None else probe.alarm_threshold(use)
        self._whole: Floats | None = None
        """All scores so far, where they came at once: the usual case, pooled in one go."""
        self._running: StreamingPool | None = None
        """What was made of them, where they came in pieces or an alarm looks at each."""
        self._tokens: list[float] = []
        self._n = 0
        self._first: int | None = None
        self._is_nan = False
        self.alarm_position: int | None = None
        """Of the first token at which the aggregate exceeded the threshold."""

    def take(self, columns: Floats, first: int) -> Floats:
        """Scores of the tokens among these positions that the use reads."""
        n = len(columns)
        if isinstance(self._where, range):
            a = min(max(self._where.start - first, 0), n)
            b = max(a, min(self._where.stop - first, n))
            positions = np.arange(first + a, first + b)
            mine = columns[a:b, self._columns]
        else:
            index = [i for i in range(n) if first + i in self._where]
            positions = np.asarray(index, dtype=np.int64) + first
            mine = columns[index, self._columns]
        if not len(positions):
            return np.zeros(0)
        scores: Floats = (
            mine[:, 0] + self._bias if self._attention is None else self._attention.feed(mine)
        )
        if self._first is None:
            self._first = int(positions[0])
        self._n += len(scores)
        if self.use.tokens:
            self._tokens += scores.tolist()
        self._pool_further(scores, positions)
        return scores

    def _pool_further(self, scores: Floats, positions: NDArray[np.int64]) -> None:
        if self._is_nan:
            return  # of which the receipt tells; a generation is not ended by it
        bad = np.isnan(scores)
        if bad.any():
            self._is_nan = True
            scores = scores[: int(bad.argmax())]  # in front of it an alarm is one
            if not len(scores):
                return
        watches = self._threshold is not None
        if self._n == len(scores) and not watches:
            self._whole = scores
            return
        if self._running is None:
            self._running = StreamingPool(self._pool)
            if self._whole is not None:
                self._running.update(self._whole)
                self._whole = None
        n_judged = 0
        if watches and self.alarm_position is None:
            for score, position in zip(scores.tolist(), positions.tolist(), strict=False):
                n_judged += 1
                if self._running.update([score]).value > cast("float", self._threshold):
                    self.alarm_position = position
                    break
        self._running.update(scores[n_judged:])

    def _score(self, *, may_lack: bool) -> float | None:
        if self._is_nan:
            if may_lack:
                return None
            raise no_number(self.use.name)
        if self._whole is not None:
            return pool_scores(self._whole, self._pool)
        return None if self._running is None else self._running.value

    def receipt(self, *, may_lack: bool = False) -> ProbeReceipt:
        return ProbeReceipt(
            name=self.use.name,
            sha256=self.probe.sha256,
            aggregate="attention" if self._attention else self._pool,
            score=self._score(may_lack=may_lack),
            n_tokens=self._n,
            first_position=self._first,
            tokens=tuple(self._tokens) if self.use.tokens else None,
            threshold=self._threshold,
            threshold_tokens=(
                self.probe.threshold_tokens
                if self._threshold is not None and self.use.threshold is None
                else None
            ),
            threshold_differs=self.differs or None,
            alarm_position=self.alarm_position,
            stopped=self.stopped,
        )


class _Attention:
    """Softmax-weighted sum over the tokens so far, in a state of fixed size."""

    def __init__(self, probe: EngineProbe) -> None:
        heads = probe.columns // 2
        self._heads = heads
        self._bias = probe.bias("bias")
        self._top: NDArray[Any] = np.full(heads, -np.inf)
        self._weight: NDArray[Any] = np.zeros(heads)
        self._total: NDArray[Any] = np.zeros(heads)

    def feed(self, columns: Floats) -> Floats:
        out = np.empty(len(columns))
        for i, row in enumerate(columns):
            logit, value = row[: self._heads], row[self._heads :]
            top = np.maximum(self._top, logit)
            shrink, weight = np.exp(self._top - top), np.exp(logit - top)
            self._top = top
            self._weight = self._weight * shrink + weight
            self._total = self._total * shrink + weight * value
            out[i] = float((self._total / self._weight).sum()) + self._bias
        return out
