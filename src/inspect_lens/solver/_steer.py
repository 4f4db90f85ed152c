"""`with_steering`: generate, or run another solver, with a vector added."""

from __future__ import annotations

from collections.abc import Sequence

from inspect_ai.agent import Agent
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens.model import lens_scope
from inspect_lens.vector import VectorLike, load_vector

from ._inner import as_inner

__all__ = ["with_steering"]


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
