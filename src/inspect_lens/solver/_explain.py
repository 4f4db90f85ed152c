"""`self_explain`: the model says in words what a row of its own residual stream means."""

from __future__ import annotations

from typing import Any

from inspect_ai.log import transcript
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens.oracle import EXPLAIN, answer_table, plan_explaining

__all__ = ["self_explain"]


@solver
def self_explain(
    prompt: str = EXPLAIN,
    start: str = "",
    placeholder: str = " ?",
    repeat: int = 1,
    layers: int | list[int] | None = None,
    into: int | None = None,
    positions: str | list[int] = "completion",
    last: int | None = 1,
    controls: bool | list[str] = True,
    seed: int = 0,
    max_tokens: int = 30,
    source: str = "auto",
    key: str = "self_explain",
) -> Solver:
    """Let the model explain rows of its last answer in words; the conversation stays as it is.

    A patchscope, or SelfIE. Put it behind `generate()` with `with_capture`. Each row takes the
    place of the stream at the placeholders of `prompt`, and the same model answers.

    Args:
        prompt: the user's message, with `{}` where the placeholders go.
        start: how the answer begins; the model goes on from there.
        placeholder: a text of one token.
        repeat: placeholders that get the same row.
        layers: whose rows are explained; by default the middle one of those captured.
        into: layer at whose output the row is put in; the row's own layer by default.
        positions: tokens to explain; those of the completion by default.
        last: only so many of them, from the end; null for all.
        controls: true for all three, false for none, or names.
        seed: of the controls.
        max_tokens: longest explanation.
        source: `captured`, `recompute` or `auto`.
        key: where explanations go, as a list of plain data, in `state.metadata` and the store.

    Returns:
        The solver. The transcript has a table with a column for each control.

    Raises:
        SpecError: an argument is wrong.
        ArtifactError: while solving, activations or a placeholder that do not fit.

    Source:
        Patchscopes, arXiv:2401.06102; SelfIE, arXiv:2403.10949.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval

        from evals.organism_deception import organism_dataset
        from inspect_lens.solver import self_explain, with_capture

        task = Task(
            dataset=organism_dataset("demo")[:1],
            solver=[with_capture([4]), self_explain("Who founded{}?", layers=4, into=1)],
        )
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=24)
        (answer,) = log.samples[0].metadata["self_explain"]
        print(answer["answer"], answer["controls"])
        ```
    """
    plan = plan_explaining(
        prompt, start=start, placeholder=placeholder, repeat=repeat, layers=layers, into=into,
        positions=positions, last=last, controls=controls, seed=seed, max_tokens=max_tokens,
        source=source,
    )  # fmt: skip

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        answers = await plan.ask(state.output)
        plain: list[dict[str, Any]] = [answer.model_dump() for answer in answers]
        state.metadata[key] = plain
        state.store.set(key, plain)
        table = answer_table(answers) if answers else "No row to explain."
        transcript().info(table, source="inspect_lens")
        return state

    return solve
