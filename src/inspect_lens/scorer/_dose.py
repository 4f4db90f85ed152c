"""`dose_response`: what a scorer says of each answer of a sweep, by scale or by variant."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from inspect_ai.log import EvalLog
from inspect_ai.scorer import Metric, SampleScore, Score, Scorer, Target, Value, metric, scorer
from inspect_ai.solver import TaskState

from inspect_lens._base.arguments import judged_arguments
from inspect_lens.reading._shared import shared_parameters
from inspect_lens.vector import DoseResponse, Response
from inspect_lens.vector import dose_response as _dose_response

from ._labels import logged_scores
from ._sweeps import (
    DoseRow,
    Swept,
    best_row,
    cell_values,
    cells_or_limit,
    effects_of,
    rows_by,
    rows_in_log,
    rows_of,
    slope_of,
)

__all__ = ["dose_curves", "dose_metric", "dose_response", "dose_table"]

logger = logging.getLogger(__name__)

By = Literal["best", "variant"]


@metric(scores="unreduced")
@shared_parameters
def dose_metric(by: By | None = None, n_resamples: int = 2000, seed: int = 0) -> Metric:
    """Effect of a sweep: at the best scale that keeps answers coherent, or of each variant.

    With `by="best"`, `scale` is that with the largest `effect`, up or down, among those at which
    the answers' share that did not fall apart is at least 0.9 of the unsteered ones'. `effect` is
    the mean value there less that of the unsteered answers, with its 95% interval over prompts,
    `effect_low` to `effect_high`; the scale is chosen on the same answers, so confirm it on others.
    `control_effect` is the largest effect that a control of equal norm has there, `coherence` the
    share of answers there that did not fall apart, `slope` the effect per unit of scale, and
    `broken` how many answers of the vectors fell apart, at all scales: without a value, blank, or
    a loop. Of several vectors or layers the best is told, which the names say: `effect@4`.

    With `by="variant"`, `unedited` is the mean of the unsteered answers. Each edit, latent or
    vector has its mean under its own name, such as `ablated`, and `ablated_effect` is the mean
    difference from the unsteered answers of the same prompts, with its 95% interval,
    `ablated_effect_low` to `ablated_effect_high`. `ablated_random_effect` with its interval is the
    same of the controls beside it, by their kind, and `ablated_coherence` the share of its answers
    that did not fall apart. Where a name has several doses, the dose stands behind it:
    `ablated x0.5`.

    What cannot be known is left out, such as the interval of fewer than 8 prompts, or an effect
    where all answers have one value, steered and not, of which a warning is logged. `dose_table`
    has every row, and why. Every epoch is an answer of its own, and the epochs of a sample are one
    prompt.

    Args:
        by: `variant` for a sweep of edits and `best` for others by default.
        n_resamples: draws of prompts.
        seed: of the draws.

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
        swept = Swept.of(scores)
        rows = rows_of(swept, n_resamples=n_resamples, seed=seed)
        own = [row for row in rows if row.kind == "vector"]
        are_edits = bool(own) and all(row.layer is None for row in own)
        if by == "variant" or (by is None and are_edits):
            return _of_variants(rows, swept)
        return _of_best(rows, own)

    return compute


def _of_best(rows: Sequence[DoseRow], own: Sequence[DoseRow]) -> dict[str, float]:
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
        **_effect("effect", best), "scale": best.scale, "slope": slope_of(rows, best),
        "coherence": best.coherence,
    }  # fmt: skip
    if known:
        made["control_effect"] = max(known, key=abs)
    several = [len({getattr(row, of) for row in own}) > 1 for of in ("vector", "layer")]
    where = f":{best.vector}" * several[0] + f"@{best.layer}" * several[1]
    return {name + where: value for name, value in made.items()} | {"broken": broken}


def _of_variants(rows: Sequence[DoseRow], swept: Swept) -> dict[str, float]:
    base = list(swept.baseline.values())
    made = {"unedited": sum(base) / len(base)} if base else {}
    for row in rows:
        name = _name(row, rows)
        if row.kind == "vector":
            made |= {name: row.mean, f"{name}_coherence": row.coherence}
        else:
            name = f"{name}_{row.kind}"
        made |= _effect(f"{name}_effect", row)
    return {key: value for key, value in made.items() if math.isfinite(value)}


def _name(row: DoseRow, rows: Sequence[DoseRow]) -> str:
    """What tells a variant from the others, and no more."""
    own = [r for r in rows if r.vector == row.vector]
    at = f"@{row.layer}" * (len({r.layer for r in own}) > 1)
    dose = f" x{row.scale:g}" * (len({r.scale for r in own}) > 1)
    return f"{row.vector}{at}{dose}"


def _effect(name: str, row: DoseRow) -> dict[str, float]:
    made = {name: row.effect}
    if row.interval is not None:
        made |= {f"{name}_low": row.interval.low, f"{name}_high": row.interval.high}
    return made


@scorer(metrics=[dose_metric()])
@shared_parameters
def dose_response(scorer: Scorer | None = None, key: str | None = None) -> Scorer:
    """Score every answer of `steering_sweep`: of vectors, edits and latents, and of their controls.

    Reads what the solver left in the sample's store, so a finished log can be scored again with
    another scorer.

    Args:
        scorer: of one answer, such as `match()`; it is called once per cell, on the sample's
            prompt with that cell's completion. Without one, the numbers of the sweep's own scorer
            are taken.
        key: entry to take, of a scorer whose value is a dict.

    Returns:
        The scorer. Its value is that of the unsteered answer; all numbers are in its metadata,
        where `dose_metric` and `dose_curves` find them. There `effects` is a table of the sample:
        `baseline` is the value of the unsteered answer, and every other one has its difference
        from it, under `<name>@<layer>x<scale>`, where edits are at layer `all` (with `random:` or
        `orthogonal:` in front for controls; several of one kind are averaged).
        `slope:<name>@<layer>` is the least-squares slope over the scale, through the baseline, and
        `beyond:<control>:<name>@<layer>x<scale>` what remains after the control. An entry is None
        where a value is missing. A sample whose unsteered answer has no value, or none of the
        others, or that a limit ended in the middle of its sweep, is unscored.

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

        solver = steering_sweep("organism/truth", [-0.4, 0.4], controls=["random"])
        task = Task(organism_dataset("demo")[:2], solver=solver, scorer=dose_response(includes()))
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=14)
        print(log.results.scores[0].metrics["effect"].value)
        effects = log.samples[0].scores["dose_response"].metadata["effects"]
        assert effects["slope:organism/truth@4"] is not None
        ```
    """

    async def score(state: TaskState, target: Target) -> Score:
        cells = cells_or_limit(state)
        if isinstance(cells, Score):
            return cells
        valued = await cell_values(state, target, cells, scorer, key=key)
        effects = effects_of(valued)
        facts = {"cells": rows_in_log(valued), "effects": effects}
        known = [(c, v) for c, v in valued if v is not None]
        if not any(c.kind == "vector" for c, _ in known):
            logger.warning(
                "dose_response: none of the %d steered answers of sample %s has a value, so it "
                "counts for nothing; one says %r",
                len(cells) - 1, state.sample_id, cells[-1].completion[:80],
            )  # fmt: skip
            why = "No steered answer of this sample has a value."
            return Score.unscored(reason="no_values", explanation=why, metadata=facts)
        if effects["baseline"] is None:
            why = "The unsteered answer of this sample has no value."
            return Score.unscored(reason="no_values", explanation=why, metadata=facts)
        scales = [c.scale for c, _ in known if c.kind == "vector"]
        return Score(
            value=effects["baseline"],
            answer=state.output.completion.strip(),
            explanation=f"{len(known)} of {len(cells)} answers have a value, scales "
            f"{min(scales):g} to {max(scales):g}. The value is that of the unsteered answer.",
            metadata=facts,
        )

    return score


@judged_arguments
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
    swept = Swept.of(_scores(scores, scorer))
    baseline = swept.baseline
    steered: dict[tuple[str, int | None, str | None], dict[str, list[tuple[float, float]]]] = {}
    for cell in swept.cells:
        if cell.value is not None:
            by_prompt = steered.setdefault((cell.kind, cell.layer, cell.vector), {})
            by_prompt.setdefault(cell.prompt, []).append((cell.scale, cell.value))
    has_layers = len({layer for _, layer, _ in steered}) > 1
    has_vectors = len({vector for _, _, vector in steered}) > 1
    curves: dict[str, DoseResponse] = {}
    for (kind, layer, vector), by_prompt in steered.items():
        scales = {p: Counter(scale for scale, _ in rows) for p, rows in by_prompt.items()}
        every: Counter[float] = Counter()
        for own in scales.values():
            every |= own
        whole = [p for p, own in scales.items() if own == every]
        # Where no unsteered answer has a value, the curve does without the point at 0.
        known = [p for p in whole if p in baseline] if baseline else whole
        found = [Response(p, scale, value) for p in known for scale, value in by_prompt[p]]
        if not found:
            continue
        curve = _dose_response(
            found, baseline or None, groups=swept.samples, n_resamples=n_resamples, seed=seed
        )
        values = {r.value for r in found} | {baseline[p] for p in known if p in baseline}
        if kind == "vector" and len(values) == 1:
            # Nothing varies: at a floor or a ceiling, an effect could not be seen.
            none = curve.effect_interval.model_copy(
                update={"low": math.nan, "high": math.nan, "method": "none: all values are one"}
            )
            curve = replace(curve, effect=math.nan, effect_interval=none)
        curves[kind + f":{vector}" * has_vectors + f"@{layer}" * has_layers] = curve
    return curves


@judged_arguments
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
        scores: a log or its path, or the scores of all samples as a metric gets them.
        scorer: name of the score in the log; by default `dose_response`, or else the first that
            has the cells of a sweep.
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
    found = _scores(scores, scorer)
    if by:
        return rows_by(found, by, n_resamples=n_resamples, seed=seed)
    return rows_of(Swept.of(found), n_resamples=n_resamples, seed=seed)


def _scores(
    scores: Sequence[SampleScore] | EvalLog | str | Path, name: str | None
) -> Sequence[SampleScore]:
    if not isinstance(scores, EvalLog | str | Path):
        return scores

    def has_cells(score: Score) -> bool:
        return "effects" in (score.metadata or {})

    found = logged_scores(
        scores, name, default="dose_response", is_one=has_cells, make="dose_response(...)"
    )
    return [one for one in found if _is_steered((one.score.metadata or {}).get("cells", ()))]


def _is_steered(cells: Sequence[Sequence[Any]]) -> bool:
    """Whether a steered answer of a sample has a value, with which it counts."""
    return any(kind == "vector" and value is not None for kind, _, _, value, *_ in cells)
