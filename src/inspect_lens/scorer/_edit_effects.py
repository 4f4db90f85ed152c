"""`edit_effects`: what a scorer says of the variants of a sweep, and what each variant changed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from inspect_ai.scorer import Metric, SampleScore, Score, Scorer, Target, Value, metric, scorer
from inspect_ai.solver import TaskState

from ._cell_state import cells_or_limit
from ._cell_values import cell_values, rows_in_log
from ._dose_table import DoseRow, rows_of
from ._effect import effects_of

__all__ = ["edit_effects", "edit_rates"]


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
        from inspect_lens.solver import edit_sweep
        from inspect_lens.spec import Zero

        task = Task(
            dataset=organism_dataset("demo")[:2],
            solver=edit_sweep({"no attention": Zero(layers=[4], site="attn_out")}),
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
    """Score every variant of `edit_sweep`, `latent_sweep` or `steering_sweep`, beside its controls.

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
        `edit_sweep` is at layer `all`. A sample whose unedited answer has no value, or that a
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
        from inspect_lens.solver import edit_sweep
        from inspect_lens.spec import Zero

        task = Task(
            dataset=organism_dataset("demo")[:2],
            solver=edit_sweep({"no attention": Zero(layers=[4], site="attn_out")}),
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
