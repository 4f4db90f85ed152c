"""Whether layers that were named by hand return the residual stream, shown by what replaces it.

What is written over the whole stream behind a layer has to be all that later layers see of those
before. So the stream behind every second layer is replaced with one vector. A run in which the
layers between add a large vector is compared with one in which they add none: behind a replaced
layer, rows have to be alike but for what was added to themselves. Where the modules are not the
decoder layers, or a pair that they return is not a sum, what was added goes around what was
replaced. It is done with vectors of two sizes. Large ones have to be most of the next row, because
a layer adds to the stream: attention of a dummy pass, which sees an empty cache, depends on nothing
at all. Beside vectors of a row's size, a small half that nobody adds shows as well.

What this does not show: nothing lies behind the last layer, and a half that is zero in a dummy
pass, such as attention's results alone, changes no sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from inspect_lens._engine.tap.buffers import TapState
from inspect_lens._engine.tap.edit_table import largest_norm
from inspect_lens.errors import UnsupportedError
from inspect_lens.spec import RESID_POST, Add, Edit, Replace, TapPoint

from .check_requests import signs

SIZES = (16.0, 1.0)
"""How much larger vectors are than the largest rows."""
_LIKENESS = 0.5
"""Cosine between a row and what was put in the place of the one before it, at least."""

Rows = Mapping[TapPoint, torch.Tensor]
"""By tap: (requests, positions, hidden) in float32."""


class StreamProbe:
    """The edits of the two runs, and what their rows have to be."""

    def __init__(self, path: str, scale: float, state: TapState) -> None:
        self._path = path
        self._taps = [tap for tap in state.taps if tap.site in ("resid_pre", RESID_POST)]
        is_exact = state.ring.dtype == torch.float32
        self._most = {SIZES[0]: 0.025 if is_exact else 0.25, SIZES[1]: 1e-3 if is_exact else 0.03}
        if sum(tap.site == RESID_POST for tap in self._taps) < 2:
            raise self.refusal(
                "the start-up check compares rows of several layers, so name two or more in "
                "INSPECT_LENS_LAYERS, and resid_post in INSPECT_LENS_SITES"
            )
        width = state.ring.shape[1]
        # Of both together, and what layers add to them.
        self._largest = largest_norm(state.ring.dtype) / (4 * math.sqrt(width))
        self._scale, self._signs = scale, signs(2, width)

    def refusal(self, reason: str) -> UnsupportedError:
        return UnsupportedError(
            f"INSPECT_LENS_LAYER_PATH={self._path!r}: whether these are the decoder layers cannot "
            f"be told: {reason}"
        )

    def _vectors(self, size: float) -> NDArray[np.float32]:
        return self._signs * np.float32(min(size * self._scale, self._largest))

    def edits(
        self, n: int, size: float, replaced: int
    ) -> tuple[tuple[Edit, ...], tuple[Edit, ...]]:
        """Of a run that replaces rows behind every second layer, and of one that also adds."""
        other, vector = self._vectors(size)
        positions = tuple(range(n))
        put: list[Edit] = []
        added: list[Edit] = []
        for index, (site, layer) in enumerate(self._taps):
            if index % 2 == replaced:
                put.append(Replace(rows=other, layers=(layer,), site=site, positions=positions))
            else:
                added.append(Add(vector=vector, layers=(layer,), site=site, positions=positions))
        return tuple(put), (*put, *added)

    def judge(
        self, plain: Rows, added: Rows, size: float, replaced: int, *, is_overflown: bool
    ) -> UnsupportedError | None:
        """A refusal where rows behind a replaced layer depend on what was added before it."""
        if is_overflown or not all(rows.isfinite().all() for rows in plain.values()):
            return self.refusal(
                "rows of the start-up check are too large, or not finite; try another dtype"
            )
        put, vector = torch.from_numpy(self._vectors(size))
        around = []
        for index in range(1, len(self._taps)):
            tap = self._taps[index]
            if index % 2 != replaced and tap in plain:
                error = row_error(plain[tap], added[tap] - vector)
                likeness = torch.cosine_similarity(plain[tap], put, dim=-1)
                is_gone = size == SIZES[0] and bool((likeness < _LIKENESS).any())
                if is_gone or bool((error > self._most[size]).any()):
                    around.append(str(self._taps[index - 1].layer))
        if around:
            return UnsupportedError(
                f"INSPECT_LENS_LAYER_PATH={self._path!r}: these modules do not return the residual "
                "stream: later layers do not see what was put in its place, and that alone, at "
                f"layer {', '.join(around)}; name the decoder layers"
            )
        return None


def row_error(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Distance of rows in parts of their length; infinite where either is not finite."""
    size = torch.maximum(one.norm(dim=-1), other.norm(dim=-1)).clamp(min=1e-12)
    error: torch.Tensor = (one - other).norm(dim=-1) / size
    return error.nan_to_num(nan=math.inf)
