"""Dose and response: how what a model does depends on the scale of a vector."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inspect_lens._base.arguments import judged_arguments
from inspect_lens.errors import SpecError
from inspect_lens.probe import Interval, draws_of, percentile_interval

__all__ = ["DosePoint", "DoseResponse", "Response", "dose_response"]

_METHOD = "bootstrap of prompts, percentile"


class Response(NamedTuple):
    """Value of one prompt's answer at one scale of a steering vector."""

    prompt: str
    """Which prompt; the bootstrap draws prompts, not answers."""
    scale: float
    value: float
    """Of the answer, such as 1 for true and 0 for false."""


@dataclass(frozen=True)
class DosePoint:
    """Mean value over prompts at one scale of a steering vector, with interval."""

    scale: float
    mean: float
    interval: Interval
    n: int


@dataclass(frozen=True)
class DoseResponse:
    """Dose-response curve of one vector or control, with its effect and rank correlation."""

    points: tuple[DosePoint, ...]
    """By scale, ascending; the unsteered answers are the point at 0."""
    spearman: float
    """Rank correlation of scale and mean value over the points; NaN where nothing changes."""
    spearman_interval: Interval
    effect: float
    """Mean value at the largest scale minus that at the smallest."""
    effect_interval: Interval
    flip_rate: float
    """Share of steered answers whose value is not that of the unsteered answer."""
    flip_rate_interval: Interval
    n_prompts: int


@judged_arguments
def dose_response(
    steered: Sequence[Response],
    baseline: Mapping[str, float] | None = None,
    *,
    groups: Mapping[str, str] | None = None,
    n_resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> DoseResponse:
    """Compute the dose-response curve of a vector, with intervals over prompts.

    Prompts are drawn with replacement, each with all of its answers, and every number is computed
    anew from each draw. Several answers of a prompt at one scale (controls of several seeds)
    count as their mean.

    Args:
        steered: answers under steering, of one kind of vector.
        baseline: value of the unsteered answer by prompt; they are the point at scale 0, and
            what a flip is counted from.
        groups: what several prompts are answers to, such as the question of several epochs; they
            are drawn together, and count as one prompt. Each is one of its own by default.
        n_resamples: draws.
        confidence: two-sided level.
        seed: of the draws.

    Returns:
        The curve. Where the baseline is missing, the flip rate is NaN. Intervals of fewer than 8
        prompts are NaN, and their `method` says so. That of what came out the same in all prompts
        is Clopper and Pearson's: in the others it may be as far off as values here are apart. If
        all answers have one value, it is NaN.

    Raises:
        SpecError: there are no answers, or prompts differ in their scales.

    Example:
        ```python
        from inspect_lens.vector import Response, dose_response

        steered = [
            Response(prompt, scale, float(scale > 0))
            for prompt in "abc"
            for scale in (-1.0, 0.5, 1.0)
        ]
        curve = dose_response(steered, baseline={"a": 0.0, "b": 0.0, "c": 0.0}, n_resamples=100)
        assert curve.effect == 1.0  # the mean at scale 1 less that at -1
        assert curve.n_prompts == 3
        ```
    """
    if not 0.0 < confidence < 1.0:
        raise SpecError(f"confidence={confidence}; allowed is a number between 0 and 1")
    prompts, scales, values, flips = _table(steered, baseline)
    if not np.isfinite(values).all():
        at = np.argwhere(~np.isfinite(values))[0]
        raise SpecError(
            f"steered: the value of prompt {prompts[at[0]]!r} at scale {scales[at[1]]:g} is "
            f"{values[tuple(at)]}; allowed are finite numbers; leave that prompt out"
        )
    known_groups = groups or {}
    of = [known_groups.get(p, p) for p in prompts]
    n, rng = len(set(of)), np.random.default_rng(seed)
    # (draws, prompts): how much of the mean of each draw a prompt is.
    counts = np.concatenate(list(draws_of(len(of), of, n_resamples, rng)))
    counts /= counts.sum(axis=1, keepdims=True)
    curves = counts @ values

    def interval(drawn: NDArray[np.float64], *ends: float) -> Interval:
        # A draw in which nothing changes has no rank correlation; it counts as none.
        drawn = drawn[np.isfinite(drawn)]
        return percentile_interval(drawn, n=n, ends=ends, confidence=confidence, method=_METHOD)

    mean, least, most = values.mean(axis=0), float(values.min()), float(values.max())
    points = tuple(
        DosePoint(
            scale=float(scale),
            mean=float(mean[i]),
            interval=interval(curves[:, i], least, most),
            n=n,
        )
        for i, scale in enumerate(scales)
    )
    return DoseResponse(
        points=points,
        spearman=float(_spearman_rows(scales, mean[None])[0]),
        spearman_interval=interval(_spearman_rows(scales, curves)),
        effect=float(mean[-1] - mean[0]),
        effect_interval=interval(curves[:, -1] - curves[:, 0], least - most, most - least),
        flip_rate=float(flips.mean()),
        flip_rate_interval=interval(counts @ flips, 0.0, 1.0),
        n_prompts=n,
    )


def _table(
    steered: Sequence[Response], baseline: Mapping[str, float] | None
) -> tuple[list[str], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Prompts, scales (scales,), values (prompts, scales), and share of flips (prompts,)."""
    answers: dict[str, dict[float, list[float]]] = {}
    for prompt, scale, value in steered:
        answers.setdefault(prompt, {}).setdefault(float(scale), []).append(float(value))
    if not answers:
        raise SpecError("dose_response: there are no steered answers; run steering_sweep first")
    flips: list[float] = []
    if baseline is not None:
        missing = sorted(set(answers) - set(baseline))
        if missing:
            raise SpecError(f"baseline: has no value for prompt {missing[0]!r}; give one each")
        for prompt, by_scale in answers.items():
            every = [v for s, vs in by_scale.items() if s != 0.0 for v in vs]
            flips.append(float(np.mean([v != baseline[prompt] for v in every])) if every else 0.0)
            by_scale.setdefault(0.0, [float(baseline[prompt])])
    scales = sorted(next(iter(answers.values())))
    odd = next((p for p, by_scale in answers.items() if sorted(by_scale) != scales), None)
    if odd is not None:
        raise SpecError(
            f"dose_response: prompt {odd!r} has scales {sorted(answers[odd])} and others have "
            f"{scales}; allowed is the same for all; pass the answers of one sweep"
        )
    values = np.array([[np.mean(by_scale[s]) for s in scales] for by_scale in answers.values()])
    share = np.array(flips) if flips else np.full(len(answers), math.nan)
    return list(answers), np.array(scales), values, share


def _spearman_rows(x: NDArray[np.float64], rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Spearman's correlation of x (n,) with each row of rows (m, n), (m,)."""
    # On use: whatever reads a log imports this folder, and scipy takes a second.
    from scipy.stats import rankdata

    a = rankdata(x)
    # Means of the same values in another order differ in the last bits, and are ties.
    b = rankdata(rows.round(12), axis=1)
    a = a - a.mean()
    b = b - b.mean(axis=1, keepdims=True)
    norm = np.sqrt((a @ a) * (b * b).sum(axis=1))
    with np.errstate(invalid="ignore", divide="ignore"):
        made: NDArray[np.float64] = np.where(norm > 0, (b @ a) / norm, math.nan)
    return made
