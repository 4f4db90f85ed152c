"""The table of a sweep: what each vector, layer and scale did to answers, and the best of it."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from inspect_ai.scorer import SampleScore

from inspect_lens.errors import SpecError
from inspect_lens.probe import Interval
from inspect_lens.vector import Response
from inspect_lens.vector import dose_response as _dose_response

__all__ = ["DoseRow", "best_row", "rows_by", "rows_of", "slope_of"]

logger = logging.getLogger(__name__)

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
    """Mean value less that of the unsteered answers; NaN without a prompt that has both, and where
    none can be seen."""
    interval: Interval | None
    """95%, by a bootstrap of prompts; None for a single prompt."""
    coherence: float
    """Share of the answers that have a value and did not fall apart."""
    broken: int
    """Answers without a value, blank, or a loop."""
    usable: bool
    """Whether an effect can be seen, and coherence is at least 0.9 of that of the unsteered
    answers."""
    mean: float = math.nan
    """Mean value, over the prompts that have one here and unsteered; NaN without one."""
    unseen: str = ""
    """Why no effect can be seen; empty where one can. A model that refuses nothing refuses nothing
    without its refusal direction either."""
    of: str = ""
    """Which samples, where a table is made `by` a key of their metadata."""

    @property
    def place(self) -> tuple[str | None, int | None]:
        """Vector and layer."""
        return self.vector, self.layer


def rows_of(
    scores: Sequence[SampleScore], *, n_resamples: int = 2000, seed: int = 0
) -> list[DoseRow]:
    """Every row, as `dose_table` gives them; a warning names those that can show no effect."""
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
    # A scale or a control that changes nothing says something where the vector changes answers.
    own: dict[Any, list[tuple[str, float | None, bool]]] = defaultdict(list)
    for (kind, vector, layer, _), answers in cells.items():
        if kind == "vector":
            own[vector, layer] += answers
    blind = {place: _unseen(answers, baseline) for place, answers in own.items()}
    for (vector, layer), why in blind.items():
        if why:
            at = "" if layer is None else f" at layer {layer}"
            logger.warning("%s%s: %s", vector or "vector", at, why)
    return [
        _row(key, answers, baseline, samples, least, blind.get(key[1:3], ""), n_resamples, seed)
        for key, answers in cells.items()
    ]


def rows_by(
    scores: Sequence[SampleScore], by: str, *, n_resamples: int, seed: int
) -> list[DoseRow]:
    """`rows_of` the samples of each value of a key of their metadata."""
    parts: dict[str, list[SampleScore]] = {}
    for i, sample in enumerate(scores):
        facts = sample.sample_metadata or {}
        if by not in facts:
            raise SpecError(
                f"by={by!r}: the metadata of sample {sample.sample_id or i} has {sorted(facts)}; "
                "allowed is a key of every sample"
            )
        parts.setdefault(str(facts[by]), []).append(sample)
    return [
        row._replace(of=value)
        for value, part in parts.items()
        for row in rows_of(part, n_resamples=n_resamples, seed=seed)
    ]


def _row(
    key: tuple[str, str | None, int | None, float],
    answers: Sequence[tuple[str, float | None, bool]],
    baseline: Mapping[str, float],
    samples: Mapping[str, str],
    least: float,
    unseen: str,
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
        mean, prompts = curve.points[-1].mean, curve.n_prompts
        if not unseen:
            effect = curve.effect
            interval = curve.effect_interval if prompts > 1 else None
    broken = sum(gone for _, _, gone in answers)
    share = 1.0 - broken / len(answers)
    return DoseRow(
        kind, vector, layer, scale, prompts, effect, interval, share, broken,
        share >= least and share > 0.0 and not unseen, mean, unseen,
    )  # fmt: skip


def _unseen(
    answers: Sequence[tuple[str, float | None, bool]], baseline: Mapping[str, float]
) -> str:
    """Why these show no effect: they and the unedited ones have one value, which may be a bound."""
    values = [(v, baseline[p]) for p, v, _ in answers if v is not None and p in baseline]
    if len({value for pair in values for value in pair}) != 1:
        return ""
    n = len({prompt for prompt, *_ in answers})
    return (
        f"all unedited answers to {n} prompts have the value {values[0][0]:g}, and so have all "
        "edited ones, so an effect would not be seen at this floor or ceiling; ask for what the "
        "model does sometimes"
    )


def best_row(rows: Sequence[DoseRow]) -> DoseRow | None:
    """The vector, layer and scale with the largest effect, up or down, among those to use."""
    own = [r for r in rows if r.kind == "vector" and r.usable and math.isfinite(r.effect)]
    return max(own, key=lambda row: (abs(row.effect), -abs(row.scale)), default=None)


def slope_of(rows: Sequence[DoseRow], best: DoseRow) -> float:
    """Least-squares slope of the effect over the scale, through 0, of a vector at a layer."""
    points = [
        (r.scale, r.effect)
        for r in rows
        if r.kind == "vector" and r.place == best.place and r.usable and math.isfinite(r.effect)
    ]
    squares = sum(s * s for s, _ in points)
    return sum(s * e for s, e in points) / squares if squares else math.nan
