"""`with_capture`: generate, and keep activations."""

from __future__ import annotations

from collections.abc import Sequence

from inspect_ai.agent import Agent
from inspect_ai.model import GenerateConfig
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens.model import activations, lens_config, lens_scope
from inspect_lens.model.provider._scope import require_lens
from inspect_lens.model.scores._engine_probes import ProbeLike, ask_probes, note_refused
from inspect_lens.spec import RESID_POST, Phase, Positions, Reduce, RowDType, Site

from ._attempt import as_inner

__all__ = [
    "with_capture",
    "with_probes",
]


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
        reduce: what the engine makes of these tokens, such as their `mean`; see `CaptureSpec`.
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


@solver
def with_probes(
    probes: ProbeLike | Sequence[ProbeLike],
    positions: Positions | list[int] | None = None,
    inner: Solver | Agent | None = None,
) -> Solver:
    """Generate with probes in the engine, or run a solver or an agent whose every call has them.

    The engine scores each token as it is written, and no activations leave it. `probe_score` and
    all that reads probes take these scores, also with another pool or threshold, and again from
    the log. Tokens that the engine did not score, and probes that it cannot run, are captured or
    recomputed; scores say which in `metadata["source"]`.

    Args:
        probes: names below `probes/`, paths, `hf://` addresses or probes, as a list or separated
            by commas. Give a path as a string: of a `Path` Inspect logs only the last part.
        positions: tokens that are scored; for each probe those of its card by default.
        inner: what to run, such as `react()`; `generate()` by default. The scope reaches all calls
            of the model under evaluation.

    Returns:
        The solver; `inspect_lens.model.probe_scores(state.output)` has the scores.

    Raises:
        ArtifactError: no such probe.
        SpecError: a value is wrong.
        UnsupportedError: when it runs, the model has no lens.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval

        from evals.organism_deception import organism_dataset
        from inspect_lens.scorer import deception_probe
        from inspect_lens.solver import with_probes

        task = Task(
            dataset=organism_dataset("demo")[:2],
            solver=with_probes("organism/deception-lr"),
            scorer=deception_probe("organism/deception-lr"),
        )
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", max_tokens=14)
        for sample in log.samples:
            assert sample.scores["deception_probe"].metadata["source"] == "engine"
        ```
    """
    asked = ask_probes(probes, positions)  # refuses a wrong one before any sample
    run = as_inner(inner)

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        note_refused(asked)
        with lens_scope(probes=asked.uses, capture=asked.capture):
            return await (generate(state) if run is None else run(state, generate))

    return solve
