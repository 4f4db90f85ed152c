"""Whether layers that were named by hand return the residual stream, shown by what replaces it.

What is written over the whole stream behind a layer has to be all that later layers see of those
before. So the stream behind every second layer is replaced with one vector. A run in which the
layers between add a large vector is compared with one in which they add none: behind a replaced
layer, rows have to be alike but for what was added to themselves. Where the modules are not the
decoder layers, or a pair that they return is not a sum, what was added goes around what was
replaced. And what was put there has to be most of the next row, as a layer adds to the stream:
attention of a dummy pass, which sees an empty cache, depends on nothing at all. Nothing lies behind
the last layer, so it is not shown of that one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from inspect_lens._engine.tap.buffers import TapState
from inspect_lens._engine.tap.edit_table import largest_norm
from inspect_lens.errors import UnsupportedError
from inspect_lens.spec import RESID_POST, Add, Edit, Replace, TapPoint

from .check_requests import signs

_FACTOR = 16.0
"""How much larger vectors are than the largest rows, which they have to outweigh."""
_LIKENESS = 0.5
"""Cosine between a row and what was put in the place of the one before it, at least."""

Rows = Mapping[TapPoint, torch.Tensor]
"""By tap: (requests, positions, hidden) in float32."""


class StreamProbe:
    """The edits of the two runs, and what their rows have to be."""

    def __init__(self, path: str, scale: float, state: TapState) -> None:
        self._path = path
        self._taps = [tap for tap in state.taps if tap.site in ("resid_pre", RESID_POST)]
        self._most = 0.025 if state.ring.dtype == torch.float32 else 0.25
        if sum(tap.site == RESID_POST for tap in self._taps) < 2:
            raise self.refusal(
                "the start-up check compares rows of several layers, so name two or more in "
                "INSPECT_LENS_LAYERS, and resid_post in INSPECT_LENS_SITES"
            )
        width = state.ring.shape[1]
        # Of both together, and what layers add to them.
        most = largest_norm(state.ring.dtype) / (4 * math.sqrt(width))
        self._put, self._added = signs(2, width) * np.float32(min(_FACTOR * scale, most))

    def refusal(self, reason: str) -> UnsupportedError:
        return UnsupportedError(
            f"INSPECT_LENS_LAYER_PATH={self._path!r}: whether these are the decoder layers cannot "
            f"be told: {reason}"
        )

    def edits(self, n: int, replaced: int) -> tuple[tuple[Edit, ...], tuple[Edit, ...]]:
        """Of a run that replaces rows behind every second layer, and of one that also adds."""
        positions = tuple(range(n))
        put: list[Edit] = []
        added: list[Edit] = []
        for index, (site, layer) in enumerate(self._taps):
            if index % 2 == replaced:
                put.append(Replace(rows=self._put, layers=(layer,), site=site, positions=positions))
            else:
                added.append(
                    Add(vector=self._added, layers=(layer,), site=site, positions=positions)
                )
        return tuple(put), (*put, *added)

    def judge(self, plain: Rows, added: Rows, replaced: int, *, is_overflown: bool) -> None:
        """Raise where rows behind a replaced layer depend on what was added in front of it."""
        if is_overflown or not all(rows.isfinite().all() for rows in plain.values()):
            raise self.refusal(
                "rows of the start-up check are too large, or not finite; try another dtype"
            )
        put, vector = torch.from_numpy(self._put), torch.from_numpy(self._added)
        around = []
        for index in range(1, len(self._taps)):
            tap = self._taps[index]
            if index % 2 != replaced and tap in plain:
                error = row_error(plain[tap], added[tap] - vector)
                likeness = torch.cosine_similarity(plain[tap], put, dim=-1)
                if bool((error > self._most).any() or (likeness < _LIKENESS).any()):
                    around.append(str(self._taps[index - 1].layer))
        if around:
            raise UnsupportedError(
                f"INSPECT_LENS_LAYER_PATH={self._path!r}: these modules do not return the residual "
                "stream: later layers do not see what was put in its place, and that alone, at "
                f"layer {', '.join(around)}; name the decoder layers"
            )


def row_error(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Distance of rows in parts of their length; infinite where either is not finite."""
    size = torch.maximum(one.norm(dim=-1), other.norm(dim=-1)).clamp(min=1e-12)
    error: torch.Tensor = (one - other).norm(dim=-1) / size
    return error.nan_to_num(nan=math.inf)
