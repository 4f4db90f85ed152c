"""`with_edits`: generate, or run another solver, with the stream edited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inspect_ai.agent import Agent
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens.model import lens_scope
from inspect_lens.spec import EditBase, parse_edits

from ._inner import as_inner

__all__ = ["with_edits"]


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
