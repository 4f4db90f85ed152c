"""From the numbers that probes left per token to scores, aggregates and alarms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inspect_lens.probe import StreamingPool, pool_scores
from inspect_lens.spec import EngineProbe, LensRequest, ProbeReceipt, ProbeUse, resolve_positions

__all__ = ["Reading"]

Floats = NDArray[np.float64]


class Reading:
    """The probes of one request, fed with their numbers as these arrive."""

    def __init__(
        self,
        request: LensRequest,
        probes: Sequence[EngineProbe],
        *,
        lo: int,
        n_prompt: int,
        n_max: int,
    ) -> None:
        """Resolve what each use reads.

        Args:
            request: with its `probes`.
            probes: the registered probe of each use.
            lo: position of the first number.
            n_prompt: tokens of the prompt.
            n_max: tokens that are fed at most.
        """
        self._lo = lo
        self.n_seen = 0
        self._uses: list[_Use] = []
        self._plain: dict[range, _Means] = {}
        self._order: list[tuple[_Use | _Means, int]] = []
        column = 0
        for i, (use, probe) in enumerate(zip(request.probes, probes, strict=True)):
            where = resolve_positions(
                use.positions, n_prompt=n_prompt, n_max=n_max, field=f"probes[{i}].positions"
            )
            if isinstance(where, range) and _is_plain(use, probe):
                means = self._plain.setdefault(where, _Means(where))
                self._order.append((means, means.add(use, probe, column)))
            else:
                self._uses.append(_Use(use, probe, column, where))
                self._order.append((self._uses[-1], 0))
            column += probe.columns

    @property
    def has_alarm(self) -> bool:
        """Whether a probe may end the generation."""
        return any(use.use.alarm == "stop" for use in self._uses)

    @property
    def streams_tokens(self) -> bool:
        """Whether token scores were asked for."""
        return any(use.use.tokens for use in self._uses)

    def feed(self, numbers: NDArray[np.float32]) -> dict[str, list[float]]:
        """Take the next positions.

        Args:
            numbers: (taps, positions, columns), without a gap behind what was fed before.

        Returns:
            Token scores by name, of the uses that asked for them and read some of these.
        """
        first = self._lo + self.n_seen
        self.n_seen += numbers.shape[1]
        if not numbers.shape[1]:
            return {}
        # Shares of the taps, added where they meet.
        columns = numbers.sum(axis=0, dtype=np.float64)
        for means in self._plain.values():
            means.take(columns, first)
        new: dict[str, list[float]] = {}
        for use in self._uses:
            scores = use.take(columns, first)
            if use.use.tokens and len(scores):
                new[use.use.name] = scores.tolist()
        return new

    def alarm(self) -> str | None:
        """Name of a probe whose alarm has to end the generation now."""
        for use in self._uses:
            if use.use.alarm == "stop" and use.find_alarm() is not None:
                use.stopped = True
                return use.use.name
        return None

    def receipts(self) -> tuple[ProbeReceipt, ...]:
        """What each probe found in all that was fed."""
        return tuple(use.receipt(i) for use, i in self._order)


def _is_plain(use: ProbeUse, probe: EngineProbe) -> bool:
    """Whether a use wants the mean of linear scores and nothing else."""
    pool = use.aggregate or probe.aggregate
    return probe.kind == "linear" and pool == "mean" and use.alarm is None and not use.tokens


class _Means:
    """Uses that want a mean over the same tokens, all at once: the usual case by far."""

    def __init__(self, where: range) -> None:
        self._where = where
        self._uses: list[tuple[ProbeUse, EngineProbe]] = []
        self._columns: list[int] = []
        self._bias: list[float] = []
        self._total: Floats | None = None
        self._n = 0
        self._first: int | None = None

    def add(self, use: ProbeUse, probe: EngineProbe, column: int) -> int:
        """Take a use; returns its index."""
        self._uses.append((use, probe))
        self._columns.append(column)
        self._bias.append(probe.bias("bias"))
        return len(self._uses) - 1

    def take(self, columns: Floats, first: int) -> None:
        """Add the tokens among these positions that are read."""
        n = len(columns)
        a = min(max(self._where.start - first, 0), n)
        b = max(a, min(self._where.stop - first, n))
        if a == b:
            return
        scores = columns[a:b, self._columns] + np.asarray(self._bias)
        if self._total is not None:
            scores[0] += self._total
        else:
            self._first = first + a
        # Summed in the order of the tokens, as the library's pools do it.
        self._total = np.cumsum(scores, axis=0)[-1]
        self._n += b - a

    def receipt(self, i: int) -> ProbeReceipt:
        """What a use found."""
        use, probe = self._uses[i]
        # Not validated: the numbers are ours, and a batch ends with thousands of these.
        return ProbeReceipt.model_construct(
            name=use.name,
            sha256=probe.sha256,
            aggregate="mean",
            score=None if self._total is None else float(self._total[i]) / self._n,
            n_tokens=self._n,
            first_position=self._first,
        )


class _Use:
    def __init__(
        self, use: ProbeUse, probe: EngineProbe, column: int, where: range | tuple[int, ...]
    ) -> None:
        self.use, self.probe = use, probe
        self.stopped = False
        self._columns = slice(column, column + probe.columns)
        self._where = where if isinstance(where, range) else frozenset(where)
        self._parts: list[Floats] = []
        self._positions: list[NDArray[np.int64]] = []
        self._attention = _Attention(probe) if probe.kind == "attention" else None
        self._bias = probe.bias("bias") if probe.kind == "linear" else 0.0
        # An attention probe's score is one of the text so far: the last one stands for all.
        self._pool = "last" if self._attention else (use.aggregate or probe.aggregate)
        self._threshold = use.threshold if use.threshold is not None else probe.threshold
        self._running: StreamingPool | None = None
        self._judged = 0
        self._alarm: int | None = None

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
        self._parts.append(scores)
        self._positions.append(positions)
        return scores

    def find_alarm(self) -> int | None:
        """Position of the first token at which the aggregate exceeded the threshold."""
        if self._alarm is not None or self._threshold is None:
            return self._alarm
        if self._running is None:
            self._running = StreamingPool(self._pool)
        for scores, positions in zip(
            self._parts[self._judged :], self._positions[self._judged :], strict=True
        ):
            for score, position in zip(scores.tolist(), positions.tolist(), strict=True):
                if self._running.update([score]).value > self._threshold:
                    self._alarm = int(position)
                    return self._alarm
        self._judged = len(self._parts)
        return None

    def receipt(self, _: int) -> ProbeReceipt:
        """What the use found."""
        scores = np.concatenate(self._parts) if self._parts else np.zeros(0)
        alarm = self.find_alarm() if self.use.alarm is not None else None
        return ProbeReceipt.model_construct(
            name=self.use.name,
            sha256=self.probe.sha256,
            aggregate="attention" if self._attention else self._pool,
            score=_pooled(scores, self._pool) if len(scores) else None,
            n_tokens=len(scores),
            first_position=int(self._positions[0][0]) if self._positions else None,
            tokens=tuple(scores.tolist()) if self.use.tokens else None,
            threshold=self._threshold if self.use.alarm is not None else None,
            alarm_position=alarm,
            stopped=self.stopped,
        )


def _pooled(scores: Floats, pool: str) -> float:
    if pool == "mean":
        # As `pool_scores` does it, in the order of the tokens; the usual case, without its checks.
        return float(np.cumsum(scores)[-1]) / len(scores)
    return pool_scores(scores, pool)


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
