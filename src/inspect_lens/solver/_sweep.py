"""`steering_sweep`: one prompt under many steerings at once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from inspect_ai.log import transcript
from inspect_ai.model import get_model
from inspect_ai.scorer import Scorer, value_to_float
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import span
from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, field_validator

from inspect_lens.errors import SpecError
from inspect_lens.model import lens_scope
from inspect_lens.model.request._inherited import steering_around
from inspect_lens.reading import CellKind, CellScores, SteeringCell, SteeringCells
from inspect_lens.spec import Add, EditBase, parse_edits
from inspect_lens.vector import Vector, VectorLike, load_vector

from ._attempt import adopt, gather, refuse_tools

__all__ = [
    "BASELINE",
    "CellDone",
    "CellPlan",
    "Control",
    "EditVariant",
    "SweepRun",
    "edit_sweep",
    "refuse_steered",
    "steering_sweep",
]


class CellPlan(NamedTuple):
    """One generation that a sweep is going to make."""

    kind: CellKind
    vector: str | None
    layer: int | None
    scale: float
    steer: Add | None = None
    edits: Sequence[EditBase] = ()
    note: str = ""
    """What the span says beside vector, layer and scale."""

    @property
    def where(self) -> str:
        """For the name of the span."""
        if self.kind == "baseline":
            return "unsteered"
        layer = "" if self.layer is None else f", layer {self.layer}"
        return f"{self.vector}{layer}, scale {self.scale:g}{self.note}"


BASELINE = CellPlan("baseline", None, None, 0.0)
"""The answer that nothing changes."""


class CellDone(NamedTuple):
    """What became of a plan."""

    cell: SteeringCell
    value: float | None
    state: TaskState


class SweepRun(NamedTuple):
    """The cells of one sample."""

    asker: str
    """Name of the solver."""
    state: TaskState
    generate: Generate
    scorer: Scorer | None
    """Scores each cell where it is generated, if there is one."""
    capture: Any = None

    async def cells(self, plans: Sequence[CellPlan]) -> list[CellDone]:
        """Generate all of them at the same time."""

        def run(plan: CellPlan) -> Any:
            return lambda: self.cell(plan)

        return await gather([run(plan) for plan in plans])

    async def cell(self, plan: CellPlan) -> CellDone:
        """One generation, in a span of its own."""
        async with span(f"{plan.kind}: {plan.where}", type="steering_cell"):
            edits = list(plan.edits) or None
            with lens_scope(steer=plan.steer, edits=edits, capture=self.capture):
                made = await self.generate(deepcopy(self.state))
            cell = SteeringCell(
                vector=plan.vector,
                layer=plan.layer,
                scale=plan.scale,
                kind=plan.kind,
                completion=made.output.completion,
                message_id=made.output.message.id if made.output.choices else None,
            )
            value = None if self.scorer is None else await _value(self.scorer, made)
            if self.scorer is not None:
                transcript().info({"value": value}, source=f"inspect_lens/{self.asker}")
        return CellDone(cell, value, made)

    def keep(self, done: Sequence[CellDone]) -> TaskState:
        """Write the cells into the sample's store; the first one's answer stands."""
        self.state.store_as(SteeringCells).cells = [d.cell for d in done]
        if self.scorer is not None:
            self.state.store_as(CellScores).values = [d.value for d in done]
        return adopt(self.state, done[0].state)


def refuse_steered(asker: str, what: str, instead: str) -> None:
    """Refuse to call an answer unsteered that would be steered."""
    if (around := steering_around(get_model())) is not None:
        raise SpecError(
            f"{asker}: {what} an unsteered answer, and {around}; take that out, or, to steer on "
            f"top of it, use {instead}"
        )


async def _value(scorer: Scorer, state: TaskState) -> float | None:
    score = await scorer(state, state.target)
    if score is None:
        return None
    value = float(value_to_float()(score.value))
    return value if math.isfinite(value) else None


Control = Literal["random", "orthogonal"]
"""A random direction, or a random one at right angles to the vector; both of its length."""


@solver
def steering_sweep(
    vector: VectorLike | Sequence[VectorLike],
    scales: Sequence[float],
    layers: Sequence[int] | int | None = None,
    controls: Sequence[Control] = ("random", "orthogonal"),
    scorer: Scorer | None = None,
    norm_match: bool = False,
    positions: Sequence[int] | None = None,
    control_draws: int = 1,
    seed: int = 0,
    capture: dict[str, Any] | list[int] | None = None,
) -> Solver:
    """Answer each prompt once unsteered and once per vector, layer and scale, all at the same time.

    Every cell is a request of its own, so that the engine batches cells of one sample and of all
    samples alike. Controls have the vector's length at each layer and are the same for all
    prompts. Cells are in the sample's store (`inspect_lens.reading.SteeringCells`), where the
    scorer `dose_response` finds them, also in a finished log. What stands as
    the sample's answer is the unsteered one.

    Args:
        vector: name below `vectors/`, path, `hf://` address, or a vector; or several of these,
            each with controls of its own.
        scales: factors; 0 may be among them and is the unsteered answer, which is always there.
        layers: of the vector; that of its card by default.
        controls: vectors to compare with.
        scorer: scores each cell where it is generated; `dose_response` then needs none. Leave it
            out to score later, with any scorer.
        norm_match: scale to the norm of each token's own row.
        positions: absolute positions to steer; every token by default.
        control_draws: controls of each kind, with seeds `seed`, `seed + 1`, …
        seed: of the first control.
        capture: layers, or the fields of a `CaptureSpec`, to capture in every cell.

    Returns:
        The solver.

    Raises:
        ArtifactError: no such vector.
        SpecError: no scales, an unknown control, no direction at a layer, or vectors of one name;
            when it runs, tools are set, whose side effects every cell would repeat; or the task's
            config, the model's or a scope around steers already, and the unsteered answer would be
            none.
        UnsupportedError: when it runs, the model has no lens.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.util import Store

        from evals.organism_deception import organism_dataset
        from inspect_lens.reading import read_cells
        from inspect_lens.solver import steering_sweep

        sweep = steering_sweep("organism/truth", [-0.4, 0.4], controls=["random"])
        task = Task(dataset=organism_dataset("demo")[:1], solver=sweep)
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=14)
        for cell in read_cells(Store(log.samples[0].store)):
            print(cell.kind, cell.scale, cell.completion)
        ```
    """
    loaded = _load(vector)
    steered = sorted({float(s) for s in scales} - {0.0})
    if not steered:
        raise SpecError(f"scales={list(scales)}; allowed is one that is not 0, at least")
    if unknown := [c for c in controls if c not in get_args(Control)]:
        raise SpecError(f"controls={unknown}; allowed are {', '.join(get_args(Control))}, or none")
    if control_draws < 1:
        raise SpecError(f"control_draws={control_draws}; allowed is 1 or more")
    plans = [BASELINE]
    for one in loaded:
        at = [one.default_layer()] if layers is None else layers
        chosen = [at] if isinstance(at, int) else list(at)
        for kind, source in _sources(one, controls, control_draws, seed):
            for layer in chosen:
                # One tensor per layer: every scale shares its content and its file.
                unit = source.to_steering(layer, 1.0, norm_match=norm_match, positions=positions)
                plans += [
                    CellPlan(kind, one.name, layer, s, unit.model_copy(update={"scale": s}))
                    for s in steered
                ]
    names = ", ".join(repr(one.name) for one in loaded)

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        refuse_steered(
            "steering_sweep",
            f"vector {names} is to be swept from",
            "with_steering in a task per scale",
        )
        refuse_tools(
            state,
            "steering_sweep",
            "put use_tools behind the sweep, or use with_steering "
            "with inner=react(), in a task per scale",
        )
        run = SweepRun("steering_sweep", state, generate, scorer, capture)
        return run.keep(await run.cells(plans))

    return solve


def _load(vector: VectorLike | Sequence[VectorLike]) -> list[Vector]:
    """One vector or several, which their names tell apart."""
    given = [vector] if isinstance(vector, str | Path | Vector) else vector
    loaded = [load_vector(one) for one in given]
    names = [one.name for one in loaded]
    if not names or len(set(names)) < len(names):
        raise SpecError(
            f"vector={names}; allowed are one or more vectors with names of their own, as answers "
            "are told apart by these; rename one in its card"
        )
    return loaded


def _sources(
    vector: Vector, controls: Sequence[Control], draws: int, seed: int
) -> list[tuple[CellKind, Vector]]:
    made: list[tuple[CellKind, Vector]] = [("vector", vector)]
    for control in dict.fromkeys(controls):
        draw = vector.random_control if control == "random" else vector.orthogonal_control
        made += [(control, draw(seed + i)) for i in range(draws)]
    return made


Edits = EditBase | Mapping[str, Any] | Sequence[EditBase | Mapping[str, Any]]
"""One edit or several, each an object or its JSON form with `op`."""


class EditVariant(BaseModel):
    """One way in which a prompt is answered: edits under a name.

    Example:
        ```python
        import numpy as np

        from inspect_lens.solver import EditVariant
        from inspect_lens.spec import Ablate

        rng = np.random.default_rng(0)
        variants = [
            EditVariant(
                name="ablated",
                edits=Ablate(direction=rng.standard_normal(256), layers=range(6)),
                control=control,
            )
            for control in (False, True)
        ]
        assert [variant.control for variant in variants] == [False, True]
        ```
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: str = Field(min_length=1)
    """What was done. A control has the name of the variant that it stands beside."""
    edits: tuple[SerializeAsAny[EditBase], ...] = Field(min_length=1)
    """In the order in which they act."""
    dose: float = Field(default=1.0, allow_inf_nan=False)
    """How much of it, where variants of one name differ in that: a strength, or a value."""
    control: bool = False
    """Whether it is something of the same kind that should do nothing, such as a random
    direction. Controls of one variant are averaged."""

    @field_validator("edits", mode="before")
    @classmethod
    def _edits(cls, value: Any) -> Any:
        return parse_edits(value)


@solver
def edit_sweep(
    variants: Mapping[str, Edits] | Sequence[EditVariant | Mapping[str, Any]],
    scorer: Scorer | None = None,
    capture: dict[str, Any] | list[int] | None = None,
) -> Solver:
    """Answer each prompt once unedited and once per variant, all at the same time.

    A variant is anything that edits can do: a direction ablated everywhere, a head switched off, a
    vector added behind a gate. Every answer is a request of its own. The answers are in the
    sample's store as cells (`inspect_lens.reading.SteeringCells`), where the scorers
    `edit_effects` and `dose_response` find them, also in a finished log. What stands as the
    sample's answer is the unedited one.

    Args:
        variants: edits by name; or `EditVariant`s or their fields, which may also be controls, and
            differ in their dose.
        scorer: scores each answer where it is generated; `edit_effects` then needs none.
        capture: layers, or the fields of a `CaptureSpec`, to capture in every cell.

    Returns:
        The solver. The log holds a reference with hashes for each edit; tensors are written once
        beside it.

    Raises:
        SpecError: no variants, an edit that is wrong, variants of one name and dose, or a control
            of none; when it runs, tools are set, whose side effects every variant would repeat; or
            the task's config, the model's or a scope around steers or edits already.
        UnsupportedError: when it runs, the model has no lens.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.scorer import includes

        from evals.organism_deception import organism_dataset
        from inspect_lens.scorer import edit_effects
        from inspect_lens.solver import EditVariant, edit_sweep
        from inspect_lens.spec import Ablate
        from inspect_lens.vector import load_vector

        truth = load_vector("organism/truth")
        variants = [
            EditVariant(
                name="ablated",
                edits=Ablate(direction=one.raw(4), layers=range(6), site="attn_out"),
                control=one is not truth,
            )
            for one in (truth, truth.random_control(0))
        ]
        task = Task(
            dataset=organism_dataset("demo")[:2],
            solver=edit_sweep(variants),
            scorer=edit_effects(includes()),
        )
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=14)
        found = log.results.scores[0].metrics
        assert {"unedited", "ablated", "ablated_effect", "ablated_random_effect"} <= set(found)
        ```
    """
    made = _variants(variants)
    # Controls behind all others, so that the log reads in this order.
    plans = [BASELINE] + [
        CellPlan("random" if one.control else "vector", one.name, None, one.dose, edits=one.edits)
        for one in sorted(made, key=lambda one: one.control)
    ]

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        refuse_steered(
            "edit_sweep", "its variants are compared with", "with_edits in a task for each"
        )
        refuse_tools(
            state,
            "edit_sweep",
            "put use_tools behind the sweep, or use with_edits with inner=react(), in a task for "
            "each variant",
        )
        run = SweepRun("edit_sweep", state, generate, scorer, capture)
        return run.keep(await run.cells(plans))

    return solve


def _variants(
    given: Mapping[str, Edits] | Sequence[EditVariant | Mapping[str, Any]],
) -> list[EditVariant]:
    """What was given, checked against each other."""
    rows: list[Any] = list(given) if not isinstance(given, Mapping) else [
        {"name": name, "edits": edits} for name, edits in given.items()
    ]  # fmt: skip
    try:
        made = [r if isinstance(r, EditVariant) else EditVariant.model_validate(r) for r in rows]
    except SpecError:
        raise
    except ValueError as error:
        raise SpecError(
            f"variants: {error}; allowed are edits by name, or EditVariant(name=…, edits=…)"
        ) from None
    own = Counter((one.name, one.dose) for one in made if not one.control)
    if not own:
        raise SpecError("variants: none that is not a control; allowed is one at least")
    if twice := [at for at, n in own.items() if n > 1]:
        raise SpecError(
            f"variants: name and dose {twice[0]} are there twice; answers are told apart by these, "
            "so give another name or dose, or control=True"
        )
    if lost := [(one.name, one.dose) for one in made if (one.name, one.dose) not in own]:
        raise SpecError(
            f"variants: control {lost[0]} has no variant to stand beside; allowed are name and "
            f"dose of one: {sorted(own)}"
        )
    return made
