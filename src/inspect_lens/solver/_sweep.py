"""`steering_sweep`: one prompt under many steerings at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from inspect_ai.scorer import Scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens.errors import SpecError
from inspect_lens.reading import CellKind
from inspect_lens.spec import VectorUse
from inspect_lens.vector import Vector, VectorLike, load_vector

from ._attempt import refuse_tools
from ._cells import BASELINE, CellPlan, SweepRun, refuse_steered

__all__ = ["Control", "steering_sweep"]

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
                    CellPlan(kind, one.name, layer, s, VectorUse(name="cell", scale=s).apply(unit))
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
