"""What may be made of a request's rows: each reduction is one class here, and nothing elsewhere.

A worker makes numbers of each row (`on_device`) and combines those of many tokens, a part of them
at a time. The front-end combines the parts, and makes the result of that (`finish`).
"""

from __future__ import annotations

from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

__all__ = ["REDUCTIONS", "Reduce", "Reduction"]

Reduce = Literal["none", "mean", "last", "max", "norm"]
"""How the engine reduces the rows of the selected tokens before it returns them."""


class Reduction:
    """One value of `reduce=`: a subclass in this file adds one everywhere.

    Example:
        ```python
        from inspect_lens.spec import REDUCTIONS

        mean = REDUCTIONS["mean"]
        print(mean.combine, mean.columns(256))
        ```
    """

    name: ClassVar[Reduce]
    summary: ClassVar[str]
    """What it is, as a clause."""
    combine: ClassVar[Literal["sum", "max"] | None] = None
    """How the numbers of several tokens become one row: summed in float32 at least, or the largest
    of each; None where each token keeps its own."""
    picks_last: ClassVar[bool] = False
    """Whether the result is that of the last token alone."""
    width: ClassVar[int | None] = None
    """Numbers of a row of the result; None for as many as the site has."""

    @cached_property
    def makes_numbers(self) -> bool:
        """Whether other numbers are made of a row; else the result of a single row is this row."""
        return type(self).on_device is not Reduction.on_device

    @property
    def has_rows(self) -> bool:
        """Whether the result has rows of the stream as they are."""
        return self.combine is None and not self.makes_numbers

    def columns(self, hidden: int) -> int:
        """Numbers that `on_device` makes of a row.

        Args:
            hidden: numbers of the row.

        Returns:
            Their number.
        """
        return self.width or hidden

    def on_device(self, torch: Any, rows: torch.Tensor) -> torch.Tensor:
        """Make the numbers of each row, on the worker's device.

        Args:
            torch: the module, which this package does not import.
            rows: (…, tokens, hidden).

        Returns:
            (…, tokens, `columns(hidden)`).
        """
        return rows

    def finish(self, combined: NDArray[Any], n: int) -> NDArray[Any]:
        """Make the result of what was combined.

        Args:
            combined: (width,), in float64 for a sum.
            n: tokens that it was combined of.

        Returns:
            (width,).
        """
        return combined

    def join(self, parts: NDArray[np.float32]) -> NDArray[np.float32]:
        """Join what was made of parts of one wide row, for a reduction that has a `width`.

        Args:
            parts: (layers, parts, tokens, `width`).

        Returns:
            (layers, tokens, `width`).

        Raises:
            NotImplementedError: the reduction has no `width`.
        """
        raise NotImplementedError


class _None(Reduction):
    name = "none"
    summary = "the rows as they are, (layers, tokens, hidden)"


class _Mean(Reduction):
    name = "mean"
    summary = "their mean, summed in float32, (layers, 1, hidden)"
    combine = "sum"

    def finish(self, combined: NDArray[Any], n: int) -> NDArray[Any]:
        return combined / n


class _Last(Reduction):
    name = "last"
    summary = "the row of the last token, (layers, 1, hidden)"
    picks_last = True


class _Max(Reduction):
    name = "max"
    summary = "the largest value of each coordinate, (layers, 1, hidden)"
    combine = "max"


class _Norm(Reduction):
    name = "norm"
    summary = "the L2 norm of each row, computed in float32, (layers, tokens, 1)"
    width = 1

    def on_device(self, torch: Any, rows: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float32)  # type: ignore[no-any-return]

    def join(self, parts: NDArray[np.float32]) -> NDArray[np.float32]:
        norms: NDArray[np.float32] = np.linalg.norm(parts, axis=1)
        return norms


REDUCTIONS: Final = MappingProxyType(
    {one.name: one for one in (_None(), _Mean(), _Last(), _Max(), _Norm())}
)
"""By name."""
