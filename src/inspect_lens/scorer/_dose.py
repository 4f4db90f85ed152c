"""`dose_response` and `edit_effects`: what a scorer says of a sweep, by scale or by variant."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

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
)
from inspect_ai.solver import TaskState

from inspect_lens.errors import ArtifactError
from inspect_lens.vector import DoseResponse, Response
from inspect_lens.vector import dose_response as _dose_response

from ._labels import sample_score
from ._sweeps import (
    DoseRow,
    best_row,
    cell_values,
    cells_or_limit,
    effects_of,
    rows_by,
    rows_in_log,
    rows_of,
    slope_of,
)

__all__ = [
    "dose_curves",
    "dose_metric",
    "dose_response",
    "dose_table",
    "edit_effects",
    "edit_rates",
]

logger = logging.getLogger(__name__)


@metric(scores="unreduced")
def dose_metric(n_resamples: int = 2000, seed: int = 0) -> Metric:
    """Effect of a steering sweep, at the best scale that keeps answers coherent.

    `scale` is that with the largest `effect`, up or down, among those at which the answers' share
    that did not fall apart is at least 0.9 of the unsteered ones'. `effect` is the mean value there
    less that of the unsteered answers, with its 95% interval over prompts, `effect_low` to
    `effect_high`; the scale is chosen on the same answers, so confirm it on others.
    `control_effect` is the largest effect that a control of equal norm has there, `coherence` the
    share of answers there that did not fall apart, `slope` the effect per unit of scale, and
    `broken` how many answers of the vectors fell apart, at all scales: without a value, blank, or
    a loop. Of several vectors or layers the best is told, which the names say: `effect@4`.

    What cannot be known is left out, such as the interval of one prompt, or an effect where all
    answers have one value, steered and not. `dose_table` has every row, and why. Every epoch is an
    answer of its own, and the epochs of a sample are one prompt.

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
        assert {"effect", "scale", "broken"} <= set(log.results.scores[0].metrics)
        ```
    """

    def compute(scores: list[SampleScore]) -> Value:
        rows = rows_of(scores, n_resamples=n_resamples, seed=seed)
        own = [row for row in rows if row.kind == "vector"]
        broken = float(sum(row.broken for row in own))
        best = best_row(rows)
        if best is None:
            return {"broken": broken}
        controls = [
            row.effect for row in rows
            if row.kind != "vector" and (row.place, row.scale) == (best.place, best.scale)
        ]  # fmt: skip
        known = [effect for effect in controls if math.isfinite(effect)]
        made = {
            "effect": best.effect, "scale": best.scale, "slope": slope_of(rows, best),
            "coherence": best.coherence,
        }  # fmt: skip
        if best.interval is not None:
            made |= {"effect_low": best.interval.low, "effect_high": best.interval.high}
        if known:
            made["control_effect"] = max(known, key=abs)
        several = [len({getattr(row, of) for row in own}) > 1 for of in ("vector", "layer")]
        where = f":{best.vector}" * several[0] + f"@{best.layer}" * several[1]
        return {name + where: value for name, value in made.items()} | {"broken": broken}

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
        print(log.results.scores[0].metrics["effect"].value)
        effects = log.samples[0].scores["dose_response"].metadata["effects"]
        assert effects["slope:organism/truth@4"] is not None
        ```
    """

    async def score(state: TaskState, target: Target) -> Score:
        cells = cells_or_limit(state, "dose_response")
        if isinstance(cells, Score):
            return cells
        valued = await cell_values(state, target, cells, scorer, key=key, asker="dose_response")
        known = [(c, v) for c, v in valued if v is not None]
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
            metadata={"cells": rows_in_log(valued), "effects": effects_of(valued)},
        )

    return score


def dose_curves(
    scores: Sequence[SampleScore] | EvalLog | str | Path,
    *,
    scorer: str | None = None,
    n_resamples: int = 2000,
    seed: int = 0,
) -> dict[str, DoseResponse]:
    """Read the dose-response curve of each vector and control from a scored log.

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
            values = {r.value for r in found} | {baseline[p] for p in known if p in baseline}
            if kind.kind == "vector" and len(values) == 1:
                # Nothing varies: at a floor or a ceiling, an effect could not be seen.
                none = curves[name].effect_interval.model_copy(
                    update={"low": math.nan, "high": math.nan, "method": "none: all values are one"}
                )
                curves[name] = replace(curves[name], effect=math.nan, effect_interval=none)
    return curves


def dose_table(
    scores: Sequence[SampleScore] | EvalLog | str | Path,
    *,
    scorer: str | None = None,
    by: str = "",
    n_resamples: int = 2000,
    seed: int = 0,
) -> list[DoseRow]:
    """List the effect of each vector, layer and scale of a sweep, with controls.

    Args:
        scores: as for `dose_curves`.
        scorer: as for `dose_curves`.
        by: key of the samples' metadata whose values have rows of their own, such as `kind` for
            the harmful and the harmless instructions of `refusal_steering`; all samples are one
            by default.
        n_resamples: draws of prompts.
        seed: of the draws.

    Returns:
        One row per kind of vector, layer and scale; the unsteered answers are what the effects
        are counted from. A sample of which no steered answer has a value is not in it. Where all
        answers have one value, edited and not, the effect is NaN and `DoseRow.unseen` says why.

    Raises:
        ArtifactError: the log has no such scores.
        SpecError: a sample has no metadata of the name `by`.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.scorer import includes

        from evals.organism_deception import organism_dataset
        from inspect_lens.scorer import dose_response, dose_table
        from inspect_lens.solver import steering_sweep

        sweep = steering_sweep("organism/truth", [-0.4, 0.4], controls=[])
        task = Task(organism_dataset("demo")[:2], solver=sweep, scorer=dose_response(includes()))
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=14)
        assert [row.scale for row in dose_table(log)] == [-0.4, 0.4]
        ```
    """
    if isinstance(scores, EvalLog | str | Path):
        scores = _logged(scores, scorer)
    if by:
        return rows_by(scores, by, n_resamples=n_resamples, seed=seed)
    return rows_of(scores, n_resamples=n_resamples, seed=seed)


class _Kind(NamedTuple):
    """What was added."""

    kind: str
    layer: int | None
    vector: str | None


class _Answers(NamedTuple):
    """The values of a sweep."""

    baseline: dict[str, float]
    """Of the unsteered answer, by prompt."""
    steered: dict[_Kind, dict[str, list[tuple[float, float]]]]
    """By kind, by prompt: scale and value."""
    kinds: dict[_Kind, str]
    """Their names."""
    samples: dict[str, str]
    """Of which sample a prompt is an epoch."""


def _answers(scores: Sequence[SampleScore]) -> _Answers:
    baseline: dict[str, float] = {}
    steered: dict[_Kind, dict[str, list[tuple[float, float]]]] = {}
    samples: dict[str, str] = {}
    for i, sample in enumerate(scores):
        facts = sample.score.metadata or {}
        prompt = f"{sample.sample_id}#{i}"
        if sample.sample_id is not None:
            samples[prompt] = repr(sample.sample_id)
        for kind, layer, scale, value, vector, _ in facts.get("cells") or ():
            if value is None:
                continue
            if kind == "baseline":
                baseline[prompt] = float(value)
            else:
                by_prompt = steered.setdefault(_Kind(kind, layer, vector), {})
                by_prompt.setdefault(prompt, []).append((float(scale), float(value)))
    has_layers = len({kind.layer for kind in steered}) > 1
    has_vectors = len({kind.vector for kind in steered}) > 1
    kinds = {k: k.kind + f":{k.vector}" * has_vectors + f"@{k.layer}" * has_layers for k in steered}
    return _Answers(baseline, steered, kinds, samples)


def _logged(log: EvalLog | str | Path, scorer: str | None) -> list[SampleScore]:
    """Scores of a log, as a metric would get them."""
    found = log if isinstance(log, EvalLog) else read_eval_log(str(log))
    name = scorer or _name_of_doses(found)
    made = [
        sample_score(sample, sample.scores[name])
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
        if "effects" in (score.metadata or {})
    ]
    plain = "dose_response"
    return plain if plain in names or not names else names[0]


@metric(scores="unreduced")
def edit_rates(n_resamples: int = 2000, seed: int = 0) -> Metric:
    """Mean value of each variant, and how far it is from that of the same prompts unedited.

    `unedited` is the mean of the unedited answers. A variant has its mean under its own name, such
    as `ablated`; `ablated_effect` is the mean difference from the unedited answers of the same
    prompts, with its 95% interval by a bootstrap of prompts, `ablated_effect_low` to
    `ablated_effect_high`. `ablated_random_effect` with its interval is the same of the controls
    beside it, by their kind, and `ablated_coherence` the share of its answers that did not fall
    apart. Where a name has several doses, the dose stands behind it: `ablated x0.5`.

    What cannot be known is left out, such as the effect on a rate that is 0 or 1 before and after
    the edit, of which a warning is logged. `dose_table` has the same numbers as rows. Every epoch
    is an answer of its own, and the epochs of a sample are one prompt.

    Args:
        n_resamples: draws of prompts.
        seed: of the draws.

    Returns:
        The metric, for scores of `edit_effects`.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.scorer import includes

        from evals.organism_deception import organism_dataset
        from inspect_lens.scorer import edit_effects, edit_rates
        from inspect_lens.solver import steering_sweep
        from inspect_lens.spec import Zero

        task = Task(
            dataset=organism_dataset("demo")[:2],
            solver=steering_sweep({"no attention": Zero(layers=[4], site="attn_out")}),
            scorer=edit_effects(includes()),
            metrics=[edit_rates(n_resamples=200)],
        )
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=14)
        assert "no attention_effect" in log.results.scores[0].metrics
        ```
    """

    def compute(scores: list[SampleScore]) -> Value:
        rows = rows_of(scores, n_resamples=n_resamples, seed=seed)
        base = [
            float(row[3])
            for sample in scores
            for row in (sample.score.metadata or {}).get("cells") or ()
            if row[0] == "baseline" and row[3] is not None
        ]
        made = {"unedited": sum(base) / len(base)} if base else {}
        for row in rows:
            name = _name(row, rows)
            if row.kind == "vector":
                made |= {name: row.mean, **_effect(name, row), f"{name}_coherence": row.coherence}
            else:
                made |= _effect(f"{name}_{row.kind}", row)
        return {key: value for key, value in made.items() if math.isfinite(value)}

    return compute


@scorer(metrics=[edit_rates()])
def edit_effects(scorer: Scorer | None = None, key: str | None = None) -> Scorer:
    """Score every edit, latent or vector of `steering_sweep`, beside its controls.

    Reads what the solver left in the sample's store, so a finished log can be scored again with
    another scorer. `dose_response` asks instead how an effect follows the dose.

    Args:
        scorer: of one answer, such as `match()`; it is called once per cell, on the sample's
            prompt with that cell's completion. Without one, the numbers of the sweep's own scorer
            are taken.
        key: entry to take, of a scorer whose value is a dict.

    Returns:
        The scorer. Its value is that of the unedited answer. `effects` in its metadata has what
        each variant changed in the sample, under the names that `dose_response` describes; one of
        edits are at layer `all`. A sample whose unedited answer has no value, or that a
        limit ended in the middle, is unscored.

    Raises:
        ArtifactError: the sample has no cells, or no baseline among them.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.scorer import includes

        from evals.organism_deception import organism_dataset
        from inspect_lens.scorer import edit_effects
        from inspect_lens.solver import steering_sweep
        from inspect_lens.spec import Zero

        task = Task(
            dataset=organism_dataset("demo")[:2],
            solver=steering_sweep({"no attention": Zero(layers=[4], site="attn_out")}),
            scorer=edit_effects(includes()),
        )
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=14)
        effects = log.samples[0].scores["edit_effects"].metadata["effects"]
        assert effects["no attention@allx1"] is not None
        ```
    """

    async def score(state: TaskState, target: Target) -> Score:
        cells = cells_or_limit(state, "edit_effects")
        if isinstance(cells, Score):
            return cells
        valued = await cell_values(state, target, cells, scorer, key=key, asker="edit_effects")
        effects = effects_of(valued)
        if effects["baseline"] is None:
            return Score.unscored(
                reason="no_values", explanation="The unedited answer of this sample has no value."
            )
        known = sum(value is not None for _, value in valued)
        return Score(
            value=effects["baseline"],
            answer=state.output.completion.strip(),
            explanation=f"{known} of {len(valued)} answers have a value.",
            metadata={"cells": rows_in_log(valued), "effects": effects},
        )

    return score


def _name(row: DoseRow, rows: Sequence[DoseRow]) -> str:
    """What tells a variant from the others, and no more."""
    own = [r for r in rows if r.vector == row.vector]
    at = f"@{row.layer}" * (len({r.layer for r in own}) > 1)
    dose = f" x{row.scale:g}" * (len({r.scale for r in own}) > 1)
    return f"{row.vector}{at}{dose}"


def _effect(name: str, row: DoseRow) -> dict[str, float]:
    made = {f"{name}_effect": row.effect}
    if row.interval is not None:
        made |= {
            f"{name}_effect_low": row.interval.low,
            f"{name}_effect_high": row.interval.high,
        }
    return made
