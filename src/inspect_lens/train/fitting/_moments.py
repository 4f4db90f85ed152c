"""Counts, means and one pooled covariance of rows that come in pieces."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from inspect_lens.errors import SpecError

from ._row_view import Again

__all__ = [
    "ClassMoments",
    "Moments",
    "RowSource",
    "accumulate",
    "prefetch",
    "read_blocks",
    "require_both",
    "require_classes",
    "wide_blocks",
]

RowSource: TypeAlias = Callable[[], Iterable[tuple[Any, Any]]]
"""A function that starts anew each time and yields (rows, labels) in pieces: rows (n, hidden) as a
numpy array or torch tensor of any float type, labels (n,) of 0 and 1. Logistic regression takes
weights (n,) too, as a third."""

Floats = NDArray[np.float64]
_AHEAD: Final = 1
_BLOCK_NUMBERS: Final = 1 << 20
_SAMPLE_OF_PIECE: Final = 2048
_WIDE_NUMBERS: Final = 1 << 21


class Moments:
    """What the closed-form families need to know of the rows."""

    def __init__(self, hidden: int, *, covariance: bool, device: str = "cpu") -> None:
        self.n = np.zeros(2, dtype=np.int64)
        """Rows of each class, (2,)."""
        self.device = device
        self._covariance = covariance
        self._shift: torch.Tensor | None = None
        self._begin(hidden)

    def _begin(self, hidden: int) -> None:
        device = self.device
        self.hidden = hidden
        self._sum = torch.zeros(2, hidden, dtype=torch.float64, device=device)
        self._square = torch.zeros(hidden, dtype=torch.float64, device=device)
        size = hidden if self._covariance else 0
        self._outer = torch.zeros(size, size, dtype=torch.float64, device=device)

    def add(self, x: torch.Tensor, positive: torch.Tensor) -> None:
        """Take rows (n, hidden) float32 and their classes (n,) bool, both on the device."""
        if self._shift is None:
            if self.hidden != x.shape[1]:
                self._begin(x.shape[1])
            # Squares of distances from about the mean: the stream is often far from 0.
            self._shift = x.mean(dim=0)
        z = x - self._shift
        # A product instead of rows picked by class: picking costs more than all the rest.
        sides = torch.stack([~positive, positive]).to(z.dtype)
        self.n += sides.sum(dim=1).long().cpu().numpy()
        # Sums of float32 rows in float64 by blocks: one block's error does not grow.
        self._sum += (sides @ z).double()
        if self._covariance:
            self._outer += (z.T @ z).double()
        self._square += z.square_().sum(dim=0).double()

    @property
    def total(self) -> int:
        """Rows of both classes."""
        return int(self.n.sum())

    def class_means(self) -> tuple[Floats, Floats]:
        """Mean of the negatives and of the positives, (hidden,) each."""
        shift = require_classes(self._shift, self.n).double().cpu().numpy()
        sums = self._sum.cpu().numpy()
        return shift + sums[0] / self.n[0], shift + sums[1] / self.n[1]

    def standard(self) -> tuple[Floats, Floats]:
        """Mean and standard deviation of all rows, (hidden,) each; 1 for a constant column."""
        self.class_means()
        assert self._shift is not None
        shift = self._shift.double().cpu().numpy()
        offset = self._sum.sum(dim=0).cpu().numpy() / self.total
        spread = np.sqrt(self.variance())
        tiny = spread <= 10 * np.finfo(np.float32).eps * np.maximum(1e-30, np.abs(shift + offset))
        return shift + offset, np.where(tiny | (spread == 0), 1.0, spread)

    def variance(self) -> Floats:
        """Variance of each dimension of all rows, (hidden,); divides by rows."""
        offset = self._sum.sum(dim=0).cpu().numpy() / self.total
        made: Floats = np.maximum(self._square.cpu().numpy() / self.total - offset**2, 0.0)
        return made

    def within_variance(self) -> Floats:
        """Variance of each dimension around the class means, (hidden,); divides by rows."""
        low, high = self.class_means()
        share = self.n / self.total
        variance = self.standard()[1] ** 2 - float(share.prod()) * (high - low) ** 2
        return np.maximum(variance, 0.0)

    def within(self) -> Floats:
        """Pooled covariance around the class means, (hidden, hidden); divides by rows."""
        self.class_means()
        if not self._covariance:
            raise SpecError("covariance: was not kept; allowed with covariance=True")
        outer = self._outer / self.total
        for k in range(2):
            mean = self._sum[k] / int(self.n[k])
            outer = outer - torch.outer(mean, mean) * (int(self.n[k]) / self.total)
        made: Floats = outer.cpu().numpy()
        return (made + made.T) / 2.0


def require_classes(shift: torch.Tensor | None, n: NDArray[np.int64]) -> torch.Tensor:
    """What sums of rows are about, where both classes have any."""
    if shift is None or (n == 0).any():
        raise _one_class(n)
    return shift


def require_both(labels: NDArray[np.bool_]) -> None:
    """Refuse labels (rows,) of one class."""
    n = np.array([np.count_nonzero(~labels), np.count_nonzero(labels)])
    if not n.all():
        raise _one_class(n)


def _one_class(n: NDArray[np.int64]) -> SpecError:
    return SpecError(
        f"rows: {int(n[1])} positive and {int(n[0])} negative; allowed are both classes; check the "
        "labels"
    )


def read_blocks(
    rows: Any, labels: Any, *, device: str, hidden: int | None = None, large: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A piece of a stream as float32 rows and bool classes on a device, block by block.

    On a CPU a block fits into the cache, and into memory that the allocator already has: fresh
    memory for a whole piece costs more than the arithmetic on it.
    """
    x = rows if isinstance(rows, torch.Tensor) else torch.from_numpy(np.asarray(rows))
    y = labels if isinstance(labels, torch.Tensor) else torch.from_numpy(np.asarray(labels))
    if x.ndim != 2 or y.shape != x.shape[:1] or (hidden is not None and x.shape[1] != hidden):
        raise SpecError(
            f"rows and labels: shapes {tuple(x.shape)} and {tuple(y.shape)}; allowed is (n, "
            f"{hidden or 'hidden'}) with one label each; every piece has the same width"
        )
    if not bool(((y == 0) | (y == 1)).all()):
        raise SpecError("labels: allowed are 0 and 1; map your classes to them first")
    size = len(x) if device != "cpu" else max(1, (_BLOCK_NUMBERS << (4 * large)) // x.shape[1])
    for first in range(0, len(x), max(size, 1)):
        block = x[first : first + size].to(device, non_blocking=True).float()
        if not bool(torch.isfinite(block.sum())):
            raise _not_finite()
        yield block, y[first : first + size].to(device) == 1


def wide_blocks(read: Again) -> Iterator[tuple[NDArray[np.int64], Floats]]:
    """Rows of a layer as float64, a few at once."""
    for index, rows in prefetch(read()):
        size = max(1, _WIDE_NUMBERS // rows.shape[1])
        for first in range(0, len(rows), size):
            x = rows[first : first + size].astype(np.float64)
            if not np.isfinite(x.sum()):
                raise _not_finite()
            yield index[first : first + size], x


def _not_finite() -> SpecError:
    return SpecError("rows: hold NaN or infinity; allowed are finite numbers; leave them out")


def accumulate(
    source: RowSource,
    *,
    covariance: bool,
    device: str = "cpu",
    sample: Moments | None = None,
    sample_rows: int = 0,
) -> Moments:
    """One pass over a stream."""
    moments: Moments | None = None
    rng = np.random.default_rng(0)
    for rows, labels, *_ in prefetch(source()):
        if not len(labels):
            continue
        if moments is None:
            moments = Moments(int(rows.shape[1]), covariance=covariance, device=device)
        for x, y in read_blocks(
            rows, labels, device=device, hidden=moments.hidden, large=covariance
        ):
            moments.add(x, y)
        if sample is not None and sample.total < sample_rows:
            # At random: an even stride over rows whose classes alternate sees one class only.
            part = np.sort(rng.permutation(len(rows))[:_SAMPLE_OF_PIECE])
            for x, y in read_blocks(rows[part], labels[part], device=device, large=True):
                sample.add(x, y)
    if moments is None:
        raise SpecError("source: yields no rows; allowed is one at least; check the filters")
    return moments


def prefetch(pieces: Iterable[Any]) -> Iterator[Any]:
    """Read one piece ahead in a thread, so that the disk and the processor work at once."""
    waiting: queue.Queue[Any] = queue.Queue(maxsize=_AHEAD)
    stop, end = threading.Event(), object()

    def put(item: Any) -> None:
        while not stop.is_set():
            try:
                waiting.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def read() -> None:
        try:
            for piece in pieces:
                put(piece)
                if stop.is_set():
                    return
            put(end)
        except BaseException as error:  # noqa: BLE001 (handed to the reader)
            put(error)

    thread = threading.Thread(target=read, name="inspect-lens-prefetch", daemon=True)
    thread.start()
    try:
        while (item := waiting.get()) is not end:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()


class ClassMoments:
    """What scikit-learn's `LinearDiscriminantAnalysis(shrinkage="auto")` knows of the rows.

    The first time, counts, means and the second moments of each class are summed: 2 · hidden²
    numbers. How far each class is shrunk depends on the fourth power of its standardised rows'
    length, which a second time sums. All in float64.
    """

    def __init__(self, hidden: int) -> None:
        self.n = np.zeros(2, dtype=np.int64)
        """Rows of each class, (2,)."""
        self.hidden = hidden
        self._shift: torch.Tensor | None = None
        self._sum = torch.zeros(2, hidden, dtype=torch.float64)
        self._outer = torch.zeros(2, hidden, hidden, dtype=torch.float64)
        self._fourth = np.zeros(2)
        self._centre = self._rate = torch.zeros(0)

    def add(self, x: torch.Tensor, positive: torch.Tensor) -> None:
        """Take rows (n, hidden) and their classes (n,) bool, for the first time."""
        if self._shift is None:
            # Squares of distances from about the mean: the stream is often far from 0.
            self._shift = x.double().mean(dim=0)
        z = x.double() - self._shift
        for k, side in enumerate((~positive, positive)):
            part = z[side]
            self.n[k] += len(part)
            self._sum[k] += part.sum(dim=0)
            self._outer[k].addmm_(part.T, part)

    def within_variance(self) -> Floats:
        """Variance of each dimension around the class means, (hidden,), before `turn`."""
        self.class_means()
        about = self._sum**2 / torch.from_numpy(self.n)[:, None]
        squares = torch.stack([part.diagonal() for part in self._outer]) - about
        made: Floats = squares.sum(dim=0).clamp(min=0.0).numpy() / self.n.sum()
        return made

    def class_means(self) -> tuple[Floats, Floats]:
        """Mean of the negatives and of the positives, (hidden,) each."""
        shift = require_classes(self._shift, self.n)
        low, high = ((shift + self._sum[k] / int(self.n[k])).numpy().copy() for k in range(2))
        return low, high

    def turn(self, scale: Floats) -> None:
        """End the first time: what was summed becomes the correlations of each class."""
        means, rate = np.stack(self.class_means()), torch.from_numpy(scale)
        spread = torch.zeros_like(self._sum)
        for k in range(2):
            n = int(self.n[k])
            about = self._sum[k] / n
            self._outer[k].div_(n).addr_(about, about, alpha=-1.0).div_(rate[:, None] * rate)
            variance = self._outer[k].diagonal().clamp(min=0.0).numpy()
            # scikit-learn's bound for a column that is constant but for rounding.
            eps = np.finfo(np.float64).eps
            constant = variance <= n * eps * variance + (n * means[k] / scale * eps) ** 2
            spread[k] = torch.from_numpy(np.where(constant, 1.0, np.sqrt(variance)))
            self._outer[k].div_(spread[k][:, None] * spread[k])
        self._spread = spread.numpy()
        self._centre, self._rate = torch.from_numpy(means), 1.0 / (rate * spread)

    def add_again(self, x: torch.Tensor, positive: torch.Tensor) -> None:
        """Take the same rows for the second time, in any order."""
        for k, side in enumerate((~positive, positive)):
            z = (x[side].double() - self._centre[k]) * self._rate[k]
            self._fourth[k] += float(((z * z).sum(dim=1) ** 2).sum())

    def covariance(self) -> Floats:
        """Pooled covariance (hidden, hidden) of the scaled rows, each class shrunk on its own.

        What the sums held is used up.
        """
        made: Floats | None = None
        for k in range(2):
            part = self._outer[k].numpy()
            level = float(np.trace(part)) / len(part)
            share = _shrinkage(part, self._fourth[k], int(self.n[k]))
            part *= 1.0 - share
            part[np.diag_indices_from(part)] += share * level
            part *= np.outer(self._spread[k], self._spread[k]) * (self.n[k] / self.n.sum())
            made = part if made is None else made + part
        assert made is not None
        return made


def _shrinkage(correlation: Floats, fourth: float, n: int) -> float:
    """Ledoit and Wolf 2004, as `sklearn.covariance.ledoit_wolf_shrinkage` has it."""
    size = len(correlation)
    if size == 1:
        return 0.0
    trace, square = float(np.trace(correlation)), float((correlation**2).sum())
    beta = (fourth / n - square) / (size * n)
    delta = (square - trace**2 / size) / size
    beta = min(beta, delta)
    return 0.0 if beta == 0.0 else beta / delta
