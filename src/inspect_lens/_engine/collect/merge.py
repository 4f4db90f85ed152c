"""From rows that came to the one result that was asked for, in the front-end.

A worker sums the prompt's rows of a step where they are and sends one; rows of sampled tokens come
as they are, because only the end of a request says which of them it has: a stop string, a rejected
draft and the scheduler's extra step all leave rows behind that belong to nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inspect_lens._engine.protocol.capture import CaptureEnvelope, Operation
from inspect_lens.spec import DType, TensorData

__all__ = ["Merge", "merge_of", "narrowed"]

Floats = NDArray[np.float32]

_SHARE = 1 << 20
"""Numbers above which taps are merged by several threads."""


@dataclass(frozen=True)
class Merge:
    """How the rows of a request become its result."""

    operation: Operation
    is_last: bool
    wire: DType
    dtype: DType

    @property
    def is_partial(self) -> bool:
        """Whether a row may stand for several tokens."""
        return self.operation in ("mean", "max")

    def __call__(
        self,
        rows: NDArray[Any] | None,
        covered: NDArray[np.bool_] | None,
        shape: tuple[int, int],
        threads: ThreadPoolExecutor,
    ) -> TensorData:
        """Merge.

        Args:
            rows: (taps, tokens, width) in the storage of `wire`, or None where no token was fed.
            covered: (taps, tokens); tokens that a later row stands for, whose own is not there.
            shape: taps and width.
            threads: for large results.

        Returns:
            (taps, 1, width), or (taps, 0, width) of no token.
        """
        taps, width = shape
        if rows is None:
            none = np.zeros((taps, 0, width), dtype=np.float32)
            return narrowed(none, self.dtype)
        n_tokens = rows.shape[1]
        if self.is_last:
            return TensorData(np.ascontiguousarray(rows[:, -1:]), self.dtype)
        out = np.empty((taps, 1, width), dtype=np.float32)

        def merge(tap: int) -> None:
            own = rows[tap] if covered is None else rows[tap][~covered[tap]]
            wide = TensorData(own, self.wire).to_float32()
            if self.operation == "mean":
                out[tap, 0] = wide.sum(axis=0, dtype=np.float64) / n_tokens
            else:
                out[tap, 0] = wide.max(axis=0)

        run: Callable[..., Any] = threads.map if rows.size > _SHARE else map
        list(run(merge, range(taps)))
        return narrowed(out, self.dtype)


def merge_of(asked: CaptureEnvelope) -> Merge | None:
    """How the rows of a capture become its result; None where they are it."""
    operation = asked.operation
    if not asked.is_last and operation not in ("mean", "max"):
        return None
    return Merge(operation, asked.is_last, asked.wire, asked.dtype)


def narrowed(values: Floats, dtype: DType) -> TensorData:
    """Numbers in another dtype, rounded to nearest, ties to even.

    Args:
        values: float32.
        dtype: of the result.

    Returns:
        The tensor; NaN stays NaN, and what is out of range becomes infinite.
    """
    if dtype == "float32":
        return TensorData(values, dtype)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return TensorData(values.astype(np.float16), dtype)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    kept = np.where(np.isnan(values), np.uint32(0x7FC0), rounded)
    return TensorData(kept.astype(np.uint16), dtype)
