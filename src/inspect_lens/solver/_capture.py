"""`with_capture`: generate, and keep activations."""

from __future__ import annotations

from collections.abc import Sequence

from inspect_ai.agent import Agent
from inspect_ai.model import GenerateConfig
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens.model import activations, lens_config, lens_scope
from inspect_lens.model.provider._scope import require_lens
from inspect_lens.spec import RESID_POST, Phase, Positions, Reduce, RowDType, Site

from ._inner import as_inner

__all__ = ["with_capture"]


@solver
def with_capture(
    layers: Sequence[int] | int | str = "all",
    positions: Positions | Sequence[int] | Sequence[bool] = "all",
    site: Site | Sequence[Site] = RESID_POST,
    *,
    reduce: Reduce = "none",
    dtype: RowDType = "model",
    phase: Phase = "both",
    inner: Solver | Agent | None = None,
) -> Solver:
    """Generate with capture, or run a solver or an agent whose every call captures.

    It is what `generate()` is to a task without it. The scope of `inner` reaches all calls of the
    model under evaluation, but for those that ask for a capture of their own; scorers and other
    models do not capture. `-M capture=…` captures in every solver of an eval.

    Args:
        layers: `all`, or layer numbers.
        positions: tokens to keep, such as `completion`.
        site: place in the block, or several; the server has to serve them.
        reduce: `mean`, `last` or `max` over these tokens, or the `norm` of each, made in the
            engine.
        dtype: of the result; `model` is that of the stream.
        phase: keep only tokens of the prompt (`prefill`) or sampled ones (`decode`).
        inner: what to run, such as `react()`; `generate()` by default.

    Returns:
        The solver; activations are in `state.output.metadata["activations"]`.

    Raises:
        SpecError: a value is wrong.
        UnsupportedError: when it runs, the model has no lens, and captured nothing.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval

        from evals.organism_deception import organism_dataset
        from inspect_lens.model import read_activations
        from inspect_lens.solver import with_capture

        task = Task(
            dataset=organism_dataset("demo")[:2], solver=with_capture([4], positions="completion")
        )
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", max_tokens=14)
        for call in read_activations(log):
            print(call.sample_id, call.activations.numpy().shape)  # (layers, tokens, hidden)
        ```
    """
    capture = {
        "layers": layers,
        "positions": positions,
        "site": site,
        "reduce": reduce,
        "dtype": dtype,
        "phase": phase,
    }
    lens_config(capture=capture, base=GenerateConfig())  # refuse a wrong spec before any sample

    run = as_inner(inner)

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        if run is not None:
            with lens_scope(capture=capture):
                return await run(state, generate)
        # Without a base it adds to the extra_body of the running task.
        made = await generate(state, extra_body=lens_config(capture=capture).extra_body)
        if activations(made.output) is None:
            require_lens("with_capture")  # or the answer is one of no token
        return made

    return solve
