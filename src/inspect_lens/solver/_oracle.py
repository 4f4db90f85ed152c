"""Questions about the answer: to the model itself, and about its activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from inspect_ai.log import transcript
from inspect_ai.model import get_model
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens._base.arguments import one_or_several
from inspect_lens._base.concurrency import together
from inspect_lens.errors import SpecError
from inspect_lens.oracle import EXPLAIN, OracleAnswer, answer_table
from inspect_lens.oracle._ask import OraclePlan
from inspect_lens.oracle._explain import ExplainPlan
from inspect_lens.reading._follow_up import ask_follow_up, choose_follow_up
from inspect_lens.reading._rows import has_nothing_to_read
from inspect_lens.reading._shared import shared_parameters

__all__ = ["activation_oracle", "follow_up", "self_explain"]


@solver
@shared_parameters
def follow_up(
    question: str | Sequence[str] | None = None,
    lie: Literal["yes", "no"] | None = None,
    max_tokens: int = 16,
    key: str = "follow_up",
) -> Solver:
    """Ask questions about the last answer, each by itself; the conversation stays as it is.

    Put it behind `generate()`. The log odds of yes over no of several questions are the features
    of "How to Catch an AI Liar"; a classifier of scikit-learn reads them from the log.

    Args:
        question: one, or several about the same answer; whether it was a lie by default.
        lie: the reply that admits a lie, `yes` by default.
        max_tokens: longest reply.
        key: where the replies go, as a list of plain data, in `state.metadata` and the store.

    Returns:
        The solver. Of each question the list has `question`, `reply`, `said`, `admits_lie`,
        `log_odds_yes`, `log_odds_lie` and `is_bound`, which is true where the odds are further
        from 0 than the number says. It is empty for a sample without an answer.

    Source:
        arXiv:2309.15840.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.solver import generate

        from evals.organism_deception import organism_dataset
        from inspect_lens.solver import follow_up

        solver = [generate(), follow_up(["Did you lie?", "Is the sky green?"])]
        task = Task(organism_dataset("demo")[:2], solver=solver)
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=14)
        lied, green = log.samples[0].metadata["follow_up"]
        print(lied["reply"], lied["log_odds_yes"], green["log_odds_yes"])
        ```
    """
    given = [None] if question is None else one_or_several(question)
    if not given:
        raise SpecError("question: 0 questions; ask at least one, or leave it out")
    asked = [choose_follow_up(one, lie, max_tokens) for one in given]

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        plain: list[dict[str, Any]] = []
        if state.output.choices and not has_nothing_to_read(state.output):
            model = get_model()
            replies = await together(
                *(ask_follow_up(model, state.messages, one, max_tokens=max_tokens) for one in asked)
            )
            plain = [reply.facts() for reply in replies]
        return _keep(state, plain, key, {"follow_up": plain})

    return solve


@solver
@shared_parameters
def activation_oracle(
    question: str | list[str],
    oracle: str = "organism",
    layers: int | float | list[int] | None = None,
    inputs: str = "segment",
    positions: str | list[int] = "completion",
    last: int | None = 10,
    controls: bool | list[str] = True,
    seed: int = 0,
    max_tokens: int = 40,
    source: str = "auto",
    served_as: str | None = None,
    key: str = "activation_oracle",
) -> Solver:
    """Ask an activation oracle about the last answer; the conversation stays as it is.

    Put it behind `generate()` with `with_capture`, or let it feed the answer's tokens again.

    Args:
        question: one question, or several about the same answer.
        positions: tokens to show; those of the completion by default.
        key: where the answers go, as a list of plain data, in `state.metadata` and the store.

    Returns:
        The solver. The transcript gets the answers to several questions as one table, with a
        column for each control.

    Raises:
        ArtifactError: no such oracle; while solving, activations or a tokenizer that do not fit.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval

        from evals.organism_deception import organism_dataset
        from inspect_lens.solver import activation_oracle, with_capture

        questions = ["Is the speaker lying?", "What is the true answer?"]
        solver = [with_capture([4]), activation_oracle(questions, "organism", layers=4)]
        task = Task(organism_dataset("demo")[:1], solver=solver)
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=24)
        lying, true = log.samples[0].metadata["activation_oracle"]
        print(lying["answer"], true["answer"], true["controls"])
        ```
    """
    plan = OraclePlan(
        question, oracle, layers=layers, inputs=inputs, positions=positions, last=last,
        controls=controls, seed=seed, max_tokens=max_tokens, source=source,
        served_as=served_as,
    )  # fmt: skip

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        answers = await plan.ask(state.output)
        plain = [answer.model_dump() for answer in answers]
        return _keep(state, plain, key, _table(answers) if len(plan.questions) > 1 else None)

    return solve


def _table(answers: list[OracleAnswer]) -> str:
    return answer_table(answers) if answers else "The answer has no token to ask about."


def _keep(state: TaskState, plain: list[dict[str, Any]], key: str, note: Any) -> TaskState:
    """Put answers into metadata and store, and a note, if there is one, into the transcript."""
    state.metadata[key] = plain
    state.store.set(key, plain)
    if note is not None:
        transcript().info(note, source="inspect_lens")
    return state


@solver
@shared_parameters
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
        layers: whose rows are explained; by default the middle one of those captured.
        positions: tokens to explain; those of the completion by default. `prompt` is what the
            user wrote, without the chat template, where the tokenizer is on this machine.
        key: where explanations go, as a list of plain data, in `state.metadata` and the store.

    Returns:
        The solver. The transcript has a table with a column for each control.

    Raises:
        ArtifactError: while solving, activations or a placeholder that do not fit.

    Source:
        Patchscopes, arXiv:2401.06102; SelfIE, arXiv:2403.10949.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval

        from evals.organism_deception import organism_dataset
        from inspect_lens.solver import self_explain, with_capture

        solver = [with_capture([4]), self_explain("Who founded{}?", layers=4, into=1)]
        task = Task(organism_dataset("demo")[:1], solver=solver)
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=24)
        (answer,) = log.samples[0].metadata["self_explain"]
        print(answer["answer"], answer["controls"])
        ```
    """
    plan = ExplainPlan(
        prompt, start=start, placeholder=placeholder, repeat=repeat, layers=layers, into=into,
        positions=positions, last=last, controls=controls, seed=seed, max_tokens=max_tokens,
        source=source,
    )  # fmt: skip

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        answers = await plan.ask(state.output)
        return _keep(state, [a.model_dump() for a in answers], key, _table(answers))

    return solve
