"""`dose_response`: what a scorer says of a steering sweep, by scale, with controls."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.scorer import (
    Metric,
    SampleScore,
    Score,
    Scorer,
    Target,
    Value,
    metric,
    scorer,
    value_to_float,
)
from inspect_ai.solver import TaskState

from inspect_lens.errors import ArtifactError
from inspect_lens.reading import CellScores, SteeringCell
from inspect_lens.vector import DoseResponse, Response
from inspect_lens.vector import dose_response as _dose_response

from ._cell_state import cell_state, cells_or_limit
from ._effect import effects_of

__all__ = ["dose_curves", "dose_metric", "dose_response"]

logger = logging.getLogger(__name__)


@metric(scores="unreduced")
def dose_metric(n_resamples: int = 2000, seed: int = 0) -> Metric:
    """Rank correlation, effect and flip rate of each kind of vector, with bootstrap intervals.

    `vector_spearman` is Spearman's correlation of scale and mean value over prompts;
    `vector_effect` the mean value at the largest scale less that at the smallest;
    `vector_flip_rate` the share of steered answers whose value is not that of the unsteered one.
    `answered` is the share of cells with a value and `prompts` how many prompts the vector's
    numbers are of: those with a value at every scale. Every epoch is an answer of its own, and
    the epochs of a sample are one prompt.
    Each has `_low` and `_high`, the 95% interval over prompts; controls have their own. Where a
    sweep has several vectors or layers, these stand behind the kind, as in `vector@4_spearman` and
    `random:organism/truth@4_effect`.

    Args:
        n_resamples: draws of prompts.
        seed: of the draws.

    Returns:
        The metric, for scores of `dose_response`.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.scorer import includes

        from evals.organism_deception import organism_dataset
        from inspect_lens.scorer import dose_metric, dose_response
        from inspect_lens.solver import steering_sweep

        task = Task(
            dataset=organism_dataset("demo")[:2],
            solver=steering_sweep("organism/truth", [-0.4, 0.4], controls=[]),
            scorer=dose_response(includes()),
            metrics=[dose_metric(n_resamples=200)],
        )
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=14)
        assert "vector_spearman" in log.results.scores[0].metrics
        ```
    """

    def compute(scores: list[SampleScore]) -> Value:
        made: dict[str, str | int | float | bool | None] = {}
        curves = dose_curves(scores, n_resamples=n_resamples, seed=seed)
        answers = _answers(scores)
        for name in answers.kinds.values():
            curve = curves.get(name)
            for what in ("spearman", "effect", "flip_rate"):
                interval = getattr(curve, f"{what}_interval", None)
                made[f"{name}_{what}"] = getattr(curve, what, math.nan)
                made[f"{name}_{what}_low"] = getattr(interval, "low", math.nan)
                made[f"{name}_{what}_high"] = getattr(interval, "high", math.nan)
        made["answered"] = answers.share
        own = [name for (kind, *_), name in answers.kinds.items() if kind == "vector"]
        made["prompts"] = min((curves[n].n_prompts if n in curves else 0 for n in own), default=0)
        return made

    return compute


@scorer(metrics=[dose_metric()])
def dose_response(scorer: Scorer | None = None, key: str | None = None) -> Scorer:
    """Score every cell of a steering sweep.

    Reads what the solver `steering_sweep` left in the sample's store, so a finished log can be
    scored again with another scorer.

    Args:
        scorer: of one answer, such as `match()`; it is called once per cell, on the sample's
            prompt with that cell's completion. Without one, the numbers of the sweep's own scorer
            are taken.
        key: entry to take, of a scorer whose value is a dict.

    Returns:
        The scorer. Its value is the mean over the vectors' own cells at the largest scale less
        that at the smallest; all numbers are in its metadata, where `dose_metric` and
        `dose_curves` find them. There `effects` is a table of the sample: `baseline` is the value
        of the unsteered answer, and every cell has its difference from it, under
        `<vector>@<layer>x<scale>` (with `random:` or `orthogonal:` in front for controls; several
        of one kind are averaged). `slope:<vector>@<layer>` is the least-squares slope over the
        scale, through the baseline, and `beyond:<control>:<vector>@<layer>x<scale>` what remains
        after the control of equal norm. An entry is None where a value is missing. A sample that
        a limit ended in the middle of its sweep is unscored.

    Raises:
        ArtifactError: the sample has no cells, or no baseline among them.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.scorer import includes

        from evals.organism_deception import organism_dataset
        from inspect_lens.scorer import dose_response
        from inspect_lens.solver import steering_sweep

        task = Task(
            dataset=organism_dataset("demo")[:2],
            solver=steering_sweep("organism/truth", [-0.4, 0.4], controls=["random"]),
            scorer=dose_response(includes()),
        )
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=14)
        print(log.results.scores[0].metrics["vector_effect"].value)
        effects = log.samples[0].scores["dose_response"].metadata["effects"]
        assert effects["slope:organism/truth@4"] is not None
        ```
    """

    async def score(state: TaskState, target: Target) -> Score:
        cells = cells_or_limit(state, "dose_response")
        if isinstance(cells, Score):
            return cells
        if scorer is None:
            values = list(CellScores(store=state.store).values)
            if len(values) != len(cells):
                raise ArtifactError(
                    f"store: {len(values)} values for {len(cells)} cells; allowed is one each; "
                    "pass a scorer to dose_response, or to steering_sweep"
                )
        else:
            values = [await _number(scorer, state, cell, target, key) for cell in cells]
        valued = list(zip(cells, values, strict=True))
        known = [(c, v) for c, v in valued if v is not None]
        rows = [[c.kind, c.layer, c.scale, v, c.vector] for c, v in known]
        own = [(c.scale, v) for c, v in known if c.kind == "vector"]
        if not own:
            logger.warning(
                "dose_response: none of the %d steered answers of sample %s has a value, so it "
                "counts for nothing; one says %r",
                len(cells) - 1, state.sample_id, cells[-1].completion[:80],
            )  # fmt: skip
            return Score.unscored(
                reason="no_values", explanation="No steered answer of this sample has a value."
            )
        low, high = min(s for s, _ in own), max(s for s, _ in own)
        top = [v for s, v in own if s == high]
        bottom = [v for s, v in own if s == low]
        return Score(
            value=sum(top) / len(top) - sum(bottom) / len(bottom),
            explanation=f"{len(known)} of {len(cells)} answers have a value, scales {low:g} to "
            f"{high:g}.",
            metadata={
                "cells": rows,
                "n_cells": len(cells),
                "kinds": _kinds(cells),
                "effects": effects_of(valued),
            },
        )

    return score


def dose_curves(
    scores: Sequence[SampleScore] | EvalLog | str | Path,
    *,
    scorer: str | None = None,
    n_resamples: int = 2000,
    seed: int = 0,
) -> dict[str, DoseResponse]:
    """The curve of each kind of vector, of scores of `dose_response`.

    A prompt that lacks a value at a scale that others have, or unsteered, is left out of the curve
    of that kind of vector; a kind that no prompt has complete has no curve.

    Args:
        scores: a log or its path, or the scores of all samples as a metric gets them.
        scorer: name of the score in the log; by default `dose_response`, or else the first that
            has the cells of a sweep, as one that a task file wraps around it.
        n_resamples: draws of prompts.
        seed: of the draws.

    Returns:
        By kind, `vector`, `random`, `orthogonal`; with `:name` behind it where a sweep has several
        vectors, and `@layer` where it has several layers.

    Raises:
        ArtifactError: the log has no such scores.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.scorer import includes

        from evals.organism_deception import organism_dataset
        from inspect_lens.scorer import dose_curves, dose_response
        from inspect_lens.solver import steering_sweep

        sweep = steering_sweep("organism/truth", [-0.4, 0.4], controls=["orthogonal"])
        task = Task(organism_dataset("demo")[:2], solver=sweep, scorer=dose_response(includes()))
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=14)
        curves = dose_curves(log)
        assert [point.scale for point in curves["vector"].points] == [-0.4, 0.0, 0.4]
        ```
    """
    if isinstance(scores, EvalLog | str | Path):
        scores = _logged(scores, scorer)
    answers = _answers(scores)
    baseline = answers.baseline
    curves: dict[str, DoseResponse] = {}
    for kind, name in answers.kinds.items():
        by_prompt = answers.steered[kind]
        scales = {p: Counter(scale for scale, _ in rows) for p, rows in by_prompt.items()}
        every: Counter[float] = Counter()
        for own in scales.values():
            every |= own
        whole = [p for p, own in scales.items() if own == every]
        # Where no unsteered answer has a value, the curve does without the point at 0.
        known = [p for p in whole if p in baseline] if baseline else whole
        found = [Response(p, scale, value) for p in known for scale, value in by_prompt[p]]
        if found:
            curves[name] = _dose_response(
                found, baseline or None, groups=answers.samples, n_resamples=n_resamples, seed=seed
            )
    return curves


class _Kind(NamedTuple):
    """What was added; logs of earlier releases do not say which vector, as there was only one."""

    kind: str
    layer: int | None
    vector: str | None = None


class _Answers(NamedTuple):
    """The values of a sweep."""

    baseline: dict[str, float]
    """Of the unsteered answer, by prompt."""
    steered: dict[_Kind, dict[str, list[tuple[float, float]]]]
    """By kind, by prompt: scale and value."""
    kinds: dict[_Kind, str]
    """Their names."""
    share: float
    """Of the cells that have a value."""
    samples: dict[str, str]
    """Of which sample a prompt is an epoch."""


def _answers(scores: Sequence[SampleScore]) -> _Answers:
    baseline: dict[str, float] = {}
    steered: dict[_Kind, dict[str, list[tuple[float, float]]]] = {}
    samples: dict[str, str] = {}
    known = total = 0
    for i, sample in enumerate(scores):
        facts = sample.score.metadata or {}
        prompt, rows = f"{sample.sample_id}#{i}", facts.get("cells") or []
        if sample.sample_id is not None:
            samples[prompt] = repr(sample.sample_id)
        known, total = known + len(rows), total + int(facts.get("n_cells") or len(rows))
        # Also those of which no answer has a value.
        for kind in facts.get("kinds") or ():
            steered.setdefault(_Kind(*kind), {})
        for kind, layer, scale, value, *vector in rows:
            if kind == "baseline":
                baseline[prompt] = float(value)
            else:
                by_prompt = steered.setdefault(_Kind(kind, layer, *vector), {})
                by_prompt.setdefault(prompt, []).append((float(scale), float(value)))
    has_layers = len({kind.layer for kind in steered}) > 1
    has_vectors = len({kind.vector for kind in steered}) > 1
    kinds = {k: k.kind + f":{k.vector}" * has_vectors + f"@{k.layer}" * has_layers for k in steered}
    return _Answers(baseline, steered, kinds, known / total if total else math.nan, samples)


def _kinds(cells: Sequence[SteeringCell]) -> list[list[Any]]:
    """Kind, layer and name of every vector of a sweep."""
    found = dict.fromkeys((c.kind, c.layer, c.vector) for c in cells if c.kind != "baseline")
    return [list(kind) for kind in found]


def _logged(log: EvalLog | str | Path, scorer: str | None) -> list[SampleScore]:
    """Scores of a log, as a metric would get them."""
    found = log if isinstance(log, EvalLog) else read_eval_log(str(log))
    name = scorer or _name_of_doses(found)
    made = [
        SampleScore(score=sample.scores[name], sample_id=sample.id)
        for sample in found.samples or ()
        if sample.scores and name in sample.scores
    ]
    if not made:
        there = sorted({key for sample in found.samples or () for key in sample.scores or ()})
        raise ArtifactError(
            f"{found.location or 'log'}: has no score {name!r}, only {', '.join(there) or 'none'}; "
            "score it with dose_response(...), or name another in scorer="
        )
    return made


def _name_of_doses(log: EvalLog) -> str:
    """What the scores of a sweep's cells are called in a log."""
    names = [
        name
        for sample in log.samples or ()
        for name, score in (sample.scores or {}).items()
        if "n_cells" in (score.metadata or {})
    ]
    plain = "dose_response"
    return plain if plain in names or not names else names[0]


async def _number(
    scorer: Scorer, state: TaskState, cell: SteeringCell, target: Target, key: str | None
) -> float | None:
    """Value of one cell; None where the scorer gave none."""
    score = await scorer(cell_state(state, cell), target)
    value: Any = None if score is None else score.value
    if isinstance(value, Mapping):
        if key is None or key not in value:
            raise ArtifactError(
                f"key={key!r}: the scorer gives a dict with {sorted(value)}; pass one of these"
            )
        value = value[key]
    number = math.nan if value is None else float(value_to_float()(value))
    return number if math.isfinite(number) else None
