"""`with_probes`: generate, and let the engine score every token with probes."""

from __future__ import annotations

from collections.abc import Sequence

from inspect_ai.agent import Agent
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens.model import lens_scope
from inspect_lens.model.scores._engine_probes import ProbeLike, ask_probes, note_refused
from inspect_lens.spec import Positions

from ._inner import as_inner

__all__ = ["with_probes"]


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
