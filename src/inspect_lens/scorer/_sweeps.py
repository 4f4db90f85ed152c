"""Answers of a sweep: scored each by itself, compared with the unsteered one, and as a table."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from inspect_ai.event import SampleLimitEvent
from inspect_ai.log import transcript
from inspect_ai.model import ChatCompletionChoice, ChatMessageAssistant, ModelOutput
from inspect_ai.scorer import SampleScore, Score, Scorer, Target
from inspect_ai.solver import TaskState

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model import activations_for
from inspect_lens.probe import Interval
from inspect_lens.reading import SteeringCell, read_cells
from inspect_lens.reading._stored import CellScores, number_of
from inspect_lens.vector import Response
from inspect_lens.vector import dose_response as _dose_response

from ._judges import is_broken

__all__ = ["DoseRow"]


def cells_or_limit(state: TaskState) -> Sequence[SteeringCell] | Score:
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
        f"steering_sweep ran with its baseline; put steering_sweep(...) before "
        "dose_response"
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
) -> list[Valued]:
    """Score each cell on the sample's prompt with that cell's completion."""
    if scorer is not None:
        made = [await scorer(cell_state(state, cell), target) for cell in cells]
        return [(cell, number_of(one, key)) for cell, one in zip(cells, made, strict=True)]
    values = list(CellScores(store=state.store).values)
    if len(values) != len(cells):
        raise ArtifactError(
            f"store: {len(values)} values for {len(cells)} cells; allowed is one each; pass a "
            "scorer to dose_response, or to the solver that made the cells"
        )
    return list(zip(cells, values, strict=True))


def rows_in_log(valued: Sequence[Valued]) -> list[list[Any]]:
    """The form in which `rows_of` and `dose_curves` read cells."""
    return [
        [c.kind, c.layer, c.scale, v, c.vector, v is None or is_broken(c.completion)]
        for c, v in valued
    ]


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
    """95%, by a bootstrap of prompts; None for fewer than 8."""
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


class SweptCell(NamedTuple):
    """One steered answer, as the log has it."""

    prompt: str
    kind: str
    vector: str | None
    layer: int | None
    scale: float
    value: float | None
    broken: bool


class Swept(NamedTuple):
    """The answers of a sweep."""

    cells: list[SweptCell]
    baseline: dict[str, float]
    """Value of the unsteered answer, by prompt."""
    coherence: float
    """Share of the unsteered answers that did not fall apart."""
    samples: dict[str, str]
    """Of which sample a prompt is an epoch."""

    @classmethod
    def of(cls, scores: Sequence[SampleScore]) -> Self:
        """Read what `rows_in_log` wrote; a sample that a limit ended has none."""
        cells: list[SweptCell] = []
        baseline: dict[str, float] = {}
        whole: list[bool] = []
        samples: dict[str, str] = {}
        for i, sample in enumerate(scores):
            prompt = f"{sample.sample_id}#{i}"
            if sample.sample_id is not None:
                samples[prompt] = repr(sample.sample_id)
            rows = (sample.score.metadata or {}).get("cells") or ()
            for kind, layer, scale, value, vector, broken in rows:
                number = None if value is None else float(value)
                if kind != "baseline":
                    cells.append(
                        SweptCell(prompt, kind, vector, layer, float(scale), number, broken)
                    )
                    continue
                whole.append(not broken)
                if number is not None:
                    baseline[prompt] = number
        share = sum(whole) / len(whole) if whole else 0.0
        return cls(cells, baseline, share, samples)


def rows_of(swept: Swept, *, n_resamples: int = 2000, seed: int = 0) -> list[DoseRow]:
    """Every row, as `dose_table` gives them; a warning names those that can show no effect."""
    cells: dict[Any, list[SweptCell]] = defaultdict(list)
    # A scale or a control that changes nothing says something where the vector changes answers.
    own: dict[Any, list[SweptCell]] = defaultdict(list)
    for cell in swept.cells:
        cells[cell.kind, cell.vector, cell.layer, cell.scale].append(cell)
        if cell.kind == "vector":
            own[cell.vector, cell.layer].append(cell)
    blind = {place: _unseen(answers, swept.baseline) for place, answers in own.items()}
    for (vector, layer), why in blind.items():
        if why:
            at = "" if layer is None else f" at layer {layer}"
            logger.warning("%s%s: %s", vector or "vector", at, why)
    return [
        _row(answers, swept, blind.get(key[1:3], ""), n_resamples, seed)
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
        for row in rows_of(Swept.of(part), n_resamples=n_resamples, seed=seed)
    ]


def _row(
    answers: Sequence[SweptCell], swept: Swept, unseen: str, n_resamples: int, seed: int
) -> DoseRow:
    _, kind, vector, layer, scale, *_ = answers[0]
    # Its effect is that of two points, 0 and 1, whatever the scale is: a latent clamped to 0 has
    # an effect, too.
    found = [
        Response(a.prompt, 1.0, a.value)
        for a in answers
        if a.value is not None and a.prompt in swept.baseline
    ]
    effect, mean, interval, prompts = math.nan, math.nan, None, 0
    if found:
        curve = _dose_response(
            found, swept.baseline, groups=swept.samples, n_resamples=n_resamples, seed=seed
        )
        mean, prompts = curve.points[-1].mean, curve.n_prompts
        if not unseen:
            effect = curve.effect
            interval = curve.effect_interval if math.isfinite(curve.effect_interval.low) else None
    broken = sum(a.broken for a in answers)
    share = 1.0 - broken / len(answers)
    usable = share >= _USABLE * swept.coherence and share > 0.0 and not unseen
    return DoseRow(
        kind, vector, layer, scale, prompts, effect, interval, share, broken, usable, mean, unseen
    )


def _unseen(answers: Sequence[SweptCell], baseline: Mapping[str, float]) -> str:
    """Why these show no effect: they and the unedited ones have one value, which may be a bound."""
    known = [a for a in answers if a.value is not None and a.prompt in baseline]
    values = {value for a in known for value in (a.value, baseline[a.prompt])}
    if len(values) != 1:
        return ""
    n = len({a.prompt for a in answers})
    return (
        f"all unedited answers to {n} prompts have the value {values.pop():g}, and so have all "
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
