"""`edit_effects`: what a scorer says of the variants of a sweep, and what each variant changed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from inspect_ai.event import SampleLimitEvent
from inspect_ai.log import transcript
from inspect_ai.model import ChatCompletionChoice, ChatMessageAssistant, ModelOutput
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
from inspect_lens.model import activations_for
from inspect_lens.reading import CellScores, SteeringCell, read_cells

from ._dose_table import DoseRow, rows_of
from ._refusal import is_broken

__all__ = [
    "Valued",
    "cell_state",
    "cell_values",
    "cells_or_limit",
    "edit_effects",
    "edit_rates",
    "effects_of",
    "rows_in_log",
]


def cells_or_limit(state: TaskState, scorer: str) -> Sequence[SteeringCell] | Score:
    """The cells of a sample.

    Where a limit ended it in the middle of its sweep, what to say of it.
    """
    cells = read_cells(state.store)
    if any(cell.kind == "baseline" for cell in cells):
        return cells
    if any(isinstance(event, SampleLimitEvent) for event in transcript().events):
        return Score.unscored(
            reason="limit", explanation="A limit ended the sample before its sweep was over."
        )
    raise ArtifactError(
        f"store: {len(cells)} steering cells and no baseline among them; allowed is a sample that "
        f"steering_sweep ran with its baseline; put steering_sweep(...) before {scorer}"
    )


def cell_state(state: TaskState, cell: SteeringCell) -> TaskState:
    """The sample as it would be had the model answered with this cell's completion."""
    message = ChatMessageAssistant(
        content=cell.completion, id=cell.message_id, model=str(state.model), source="generate"
    )
    output = ModelOutput(model=str(state.model), choices=[ChatCompletionChoice(message=message)])
    handle = activations_for(cell.message_id) if cell.message_id else None
    if handle is not None:
        output.metadata = {"activations": handle}
    messages = list(state.messages)
    while messages and isinstance(messages[-1], ChatMessageAssistant):
        messages.pop()
    return TaskState(
        model=state.model,
        sample_id=state.sample_id,
        epoch=state.epoch,
        input=state.input,
        messages=[*messages, message],
        target=state.target,
        output=output,
        completed=True,
        metadata=state.metadata,
        sample_uuid=state.uuid,
    )


Valued = tuple[SteeringCell, float | None]
"""A cell and its value; None where it has none."""


async def cell_values(
    state: TaskState,
    target: Target,
    cells: Sequence[SteeringCell],
    scorer: Scorer | None,
    *,
    key: str | None,
    asker: str,
) -> list[Valued]:
    """Score each cell on the sample's prompt with that cell's completion."""
    if scorer is not None:
        return [(cell, await _number(scorer, state, cell, target, key)) for cell in cells]
    values = list(CellScores(store=state.store).values)
    if len(values) != len(cells):
        raise ArtifactError(
            f"store: {len(values)} values for {len(cells)} cells; allowed is one each; pass a "
            f"scorer to {asker}, or to the solver that made the cells"
        )
    return list(zip(cells, values, strict=True))


def rows_in_log(valued: Sequence[Valued]) -> list[list[Any]]:
    """The form in which `rows_of` and `dose_curves` read cells."""
    return [
        [c.kind, c.layer, c.scale, v, c.vector, v is None or is_broken(c.completion)]
        for c, v in valued
    ]


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


def effects_of(cells: Sequence[tuple[SteeringCell, float | None]]) -> dict[str, float | None]:
    """Differences from the unsteered answer, by vector, layer and scale."""
    known = [(cell, math.nan if value is None else value) for cell, value in cells]
    base = float(np.mean([value for cell, value in known if cell.kind == "baseline"]))
    effects = [(cell, value - base) for cell, value in known if cell.kind != "baseline"]
    made = {"baseline": base, **_means(effects), **_slopes(effects), **_beyond(effects)}
    return {name: value if math.isfinite(value) else None for name, value in made.items()}


def _where(cell: SteeringCell) -> str:
    layer = "all" if cell.layer is None else str(cell.layer)
    return f"{cell.vector or 'vector'}@{layer}"


def _label(cell: SteeringCell) -> str:
    prefix = "" if cell.kind == "vector" else f"{cell.kind}:"
    return f"{prefix}{_where(cell)}x{cell.scale:g}"


def _means(effects: Sequence[tuple[SteeringCell, float]]) -> dict[str, float]:
    """Mean effect of each kind of cell."""
    found: dict[str, list[float]] = defaultdict(list)
    for cell, effect in effects:
        found[_label(cell)].append(effect)
    return {label: float(np.mean(values)) for label, values in found.items()}


def _slopes(effects: Sequence[tuple[SteeringCell, float]]) -> dict[str, float]:
    """Slope of the line through the baseline, by vector and layer."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for cell, effect in effects:
        if cell.kind == "vector" and cell.scale:
            found[_where(cell)].append((cell.scale, effect))
    slopes = {}
    for where, points in found.items():
        x, y = np.array(points).T
        slopes[f"slope:{where}"] = float(x @ y / (x @ x))
    return slopes


def _beyond(effects: Sequence[tuple[SteeringCell, float]]) -> dict[str, float]:
    """Effect of the vector less that of each control beside it."""
    means = _means(effects)
    found = {}
    for cell, _ in effects:
        own = cell.model_copy(update={"kind": "vector"})
        if cell.kind in ("random", "orthogonal") and _label(own) in means:
            found[f"beyond:{_label(cell)}"] = means[_label(own)] - means[_label(cell)]
    return found


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
