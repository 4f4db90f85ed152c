"""The table of a sweep: what each vector, layer and scale did to answers, and the best of it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from inspect_ai.scorer import SampleScore

from inspect_lens.probe import Interval
from inspect_lens.vector import Response
from inspect_lens.vector import dose_response as _dose_response

__all__ = ["DoseRow", "best_row", "rows_of", "slope_of"]


_USABLE = 0.9
"""Least share of the unsteered answers' coherence at which a scale is one to use."""


class DoseRow(NamedTuple):
    """One kind of vector at one layer and scale, over all prompts of a sweep."""

    kind: str
    """`vector`, or `random` or `orthogonal` for a control of equal norm."""
    vector: str | None
    """Name of the vector; a control has that of the vector it stands beside."""
    layer: int | None
    scale: float
    prompts: int
    """With a value here and unsteered."""
    effect: float
    """Mean value less that of the unsteered answers; NaN without a prompt that has both."""
    interval: Interval | None
    """95%, by a bootstrap of prompts."""
    coherence: float
    """Share of the answers that have a value and did not fall apart."""
    broken: int
    """Answers without a value, blank, or a loop."""
    usable: bool
    """Whether coherence is at least 0.9 of that of the unsteered answers."""
    mean: float = math.nan
    """Mean value, over the prompts that have one here and unsteered; NaN without one."""

    @property
    def place(self) -> tuple[str | None, int | None]:
        """Vector and layer."""
        return self.vector, self.layer


def rows_of(
    scores: Sequence[SampleScore], *, n_resamples: int = 2000, seed: int = 0
) -> list[DoseRow]:
    """Every row of the table, in the order of kind, layer and scale in which the sweep ran.

    Args:
        scores: of `dose_response`.
        n_resamples: draws of prompts.
        seed: of the draws.

    Returns:
        The rows, without the unsteered answers.
    """
    baseline: dict[str, float] = {}
    held: list[bool] = []
    cells: dict[Any, list[tuple[str, float | None, bool]]] = defaultdict(list)
    samples: dict[str, str] = {}
    for i, sample in enumerate(scores):
        prompt = f"{sample.sample_id}#{i}"
        if sample.sample_id is not None:
            samples[prompt] = repr(sample.sample_id)
        # A sample that a limit ended has none.
        rows = (sample.score.metadata or {}).get("cells") or ()
        for kind, layer, scale, value, vector, broken in rows:
            if kind != "baseline":
                cells[kind, vector, layer, float(scale)].append((prompt, value, broken))
                continue
            held.append(not broken)
            if value is not None:
                baseline[prompt] = float(value)
    least = _USABLE * (sum(held) / len(held)) if held else 0.0
    return [
        _row(key, answers, baseline, samples, least, n_resamples, seed)
        for key, answers in cells.items()
    ]


def _row(
    key: tuple[str, str | None, int | None, float],
    answers: Sequence[tuple[str, float | None, bool]],
    baseline: Mapping[str, float],
    samples: Mapping[str, str],
    least: float,
    n_resamples: int,
    seed: int,
) -> DoseRow:
    kind, vector, layer, scale = key
    # Its effect is that of two points, 0 and 1, whatever the scale is: a latent clamped to 0 has
    # an effect, too.
    found = [Response(p, 1.0, float(v)) for p, v, _ in answers if v is not None and p in baseline]
    effect, mean, interval, prompts = math.nan, math.nan, None, 0
    if found:
        curve = _dose_response(found, baseline, groups=samples, n_resamples=n_resamples, seed=seed)
        effect, interval, prompts = curve.effect, curve.effect_interval, curve.n_prompts
        mean = curve.points[-1].mean
    broken = sum(gone for _, _, gone in answers)
    share = 1.0 - broken / len(answers)
    return DoseRow(
        kind, vector, layer, scale, prompts, effect, interval, share, broken,
        share >= least and share > 0.0, mean,
    )  # fmt: skip


def best_row(rows: Sequence[DoseRow]) -> DoseRow | None:
    """The vector, layer and scale with the largest effect, up or down, among those to use.

    Args:
        rows: of a table.

    Returns:
        The row, of the smaller scale where several have the same effect; None where no scale of a
        vector is usable, or no unsteered answer has a value.
    """
    own = [r for r in rows if r.kind == "vector" and r.usable and math.isfinite(r.effect)]
    return max(own, key=lambda row: (abs(row.effect), -abs(row.scale)), default=None)


def slope_of(rows: Sequence[DoseRow], best: DoseRow) -> float:
    """Least-squares slope of the effect over the scale, through 0, of a vector at a layer.

    Args:
        rows: of a table.
        best: row whose vector and layer are meant.

    Returns:
        The effect per unit of scale, over the scales to use.
    """
    points = [
        (r.scale, r.effect)
        for r in rows
        if r.kind == "vector" and r.place == best.place and r.usable and math.isfinite(r.effect)
    ]
    squares = sum(s * s for s, _ in points)
    return sum(s * e for s, e in points) / squares if squares else math.nan
