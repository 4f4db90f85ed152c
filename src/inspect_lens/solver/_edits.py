"""`with_edits`: generate, or run another solver, with the stream edited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inspect_ai.agent import Agent
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens.model import lens_scope
from inspect_lens.spec import Ablate, EditBase, Positions, Site, parse_edits, parse_positions
from inspect_lens.vector import VectorLike, load_vector

from ._attempt import as_inner

__all__ = [
    "ablate_direction",
    "with_edits",
    "with_steering",
]


@solver
def with_edits(
    edits: EditBase | Mapping[str, Any] | Sequence[EditBase | Mapping[str, Any]],
    inner: Solver | Agent | None = None,
) -> Solver:
    """Generate with edits of the residual stream, or run a solver or an agent under them.

    Edits are ablation, clamping, replacement and the other operations of `inspect_lens.spec`. The
    scope reaches all calls of the model under evaluation that `inner` makes; scorers and other
    models are not edited. Nested scopes add up, the outer edits first.

    Args:
        edits: one edit or several, in the order in which they act; each an object such as
            `Ablate(direction=v, layers=[4])`, or its JSON form with `op`.
        inner: what to run; `generate()` by default.

    Returns:
        The solver. The log holds a reference with hashes for each call; tensors are written once
        beside it.

    Raises:
        SpecError: an operation that does not exist, or a value that does not fit it.
        UnsupportedError: when it runs, the model has no lens.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.scorer import includes

        from evals.organism_deception import organism_dataset
        from inspect_lens.solver import with_edits
        from inspect_lens.spec import Ablate
        from inspect_lens.vector import load_vector

        truth = load_vector("organism/truth")
        ablate = Ablate(direction=truth.direction[0], layers=[truth.layers[0]])
        task = Task(
            dataset=organism_dataset("demo")[:2], solver=with_edits(ablate), scorer=includes()
        )
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=14)
        assert log.status == "success"
        ```
    """
    asked = parse_edits(edits)
    run = as_inner(inner)

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        with lens_scope(edits=asked):
            return await (generate(state) if run is None else run(state, generate))

    return solve


@solver
def ablate_direction(
    vector: VectorLike,
    layers: Sequence[int] | int | None = None,
    layer: int | None = None,
    site: Site | None = None,
    strength: float = 1.0,
    positions: Positions | Sequence[int] = "all",
    inner: Solver | Agent | None = None,
) -> Solver:
    """Generate without one direction of the stream, or run a solver or an agent without it.

    One direction is removed at every chosen layer: `h - strength·⟨h, v⟩·v`. Where a model needs
    it to do something, such as to refuse, it no longer can. The scope is that of `with_edits`.

    Args:
        vector: name below `vectors/`, path, `hf://` address, or a vector; `Vector.from_raw` makes
            one of bare numbers. Its length does not matter.
        layers: where it is removed; by default all layers of the vector's card. Arditi et al.
            remove it at every layer of the model.
        layer: whose direction of the vector is taken; that of its card by default.
        site: place in the block; that of the vector by default.
        strength: share that is removed: 1 removes all of it, 2 reflects.
        positions: tokens that lose it, as an edit takes them.
        inner: what to run; `generate()` by default.

    Returns:
        The solver.

    Raises:
        ArtifactError: no such vector.
        SpecError: no direction at that layer, or a value is wrong.
        UnsupportedError: when it runs, the model has no lens.

    Source:
        arXiv:2406.11717, directional ablation.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.scorer import includes

        from evals.organism_deception import organism_dataset
        from inspect_lens.solver import ablate_direction

        task = Task(
            dataset=organism_dataset("demo")[:2],
            solver=ablate_direction("organism/truth", layers=[4]),
            scorer=includes(),
        )
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=14)
        assert log.status == "success"
        ```
    """
    loaded = load_vector(vector)
    direction = loaded.raw(loaded.default_layer() if layer is None else layer)
    where: Sequence[int] | int = loaded.layers if layers is None else layers
    edit = Ablate(
        direction=direction,
        layers=(where,) if isinstance(where, int) else tuple(where),
        site=loaded.site if site is None else site,
        positions=parse_positions(positions, field="positions"),
        strength=strength,
    )
    made: Solver = with_edits(edit, inner=inner)
    return made


@solver
def with_steering(
    vector: VectorLike,
    layers: int | Sequence[int] | None = None,
    scale: float = 1.0,
    norm_match: bool = False,
    positions: Sequence[int] | None = None,
    inner: Solver | Agent | None = None,
) -> Solver:
    """Generate with a vector added, or run a solver or an agent whose every call is steered.

    The scope reaches all calls of the model under evaluation that `inner` makes, whatever config
    they pass; scorers and other models are not steered. Nested scopes add up, also with vectors
    in the task's config. Where a call passes vectors of its own, those replace these.

    Args:
        vector: name below `vectors/`, path, `hf://` address, or a vector. Give a path as a string:
            of a `Path` Inspect logs only the last part.
        layers: one of the vector's layers, or several; that of its card by default.
        scale: factor; 1 is the distance between the two classes that the vector was found on.
        norm_match: scale to the norm of each token's own row instead.
        positions: absolute positions; negative ones count from the end of the prompt; every token
            by default.
        inner: what to run; `generate()` by default.

    Returns:
        The solver. The log holds a reference with the vector's hash for each call; the vector
        itself is written once beside it.

    Raises:
        ArtifactError: no such vector.
        SpecError: no direction at that layer, or a value is wrong.
        UnsupportedError: when it runs, the model has no lens.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.scorer import includes

        from evals.organism_deception import organism_dataset
        from inspect_lens.solver import with_steering

        task = Task(
            dataset=organism_dataset("demo")[:2],
            solver=with_steering("organism/truth", scale=0.8),
            scorer=includes(),
        )
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=14)
        assert log.status == "success"
        ```
    """
    steer = load_vector(vector).to_steering(
        layers, scale, norm_match=norm_match, positions=positions
    )
    run = as_inner(inner)

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        with lens_scope(steer=steer):
            return await (generate(state) if run is None else run(state, generate))

    return solve
