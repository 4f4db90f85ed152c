"""`follow_up`: questions about the answer, whose replies are kept beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from inspect_ai.log import transcript
from inspect_ai.model import get_model
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens._base.concurrency import together
from inspect_lens.errors import SpecError
from inspect_lens.reading._follow_up import ask_follow_up, choose_follow_up
from inspect_lens.reading._rows import has_nothing_to_read


@solver
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

    Raises:
        SpecError: an argument is wrong.

    Source:
        arXiv:2309.15840.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.solver import generate

        from evals.organism_deception import organism_dataset
        from inspect_lens.solver import follow_up

        task = Task(
            dataset=organism_dataset("demo")[:2],
            solver=[generate(), follow_up(["Did you lie?", "Is the sky green?"])],
        )
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=14)
        lied, green = log.samples[0].metadata["follow_up"]
        print(lied["reply"], lied["log_odds_yes"], green["log_odds_yes"])
        ```
    """
    given = [question] if question is None or isinstance(question, str) else list(question)
    if not given:
        raise SpecError("question: 0 questions; ask at least one, or leave it out")
    asked = [choose_follow_up(one, lie, max_tokens) for one in given]

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        plain: list[Any] = []
        if state.output.choices and not has_nothing_to_read(state.output):
            model = get_model()
            replies = await together(
                *(ask_follow_up(model, state.messages, one, max_tokens=max_tokens) for one in asked)
            )
            plain = [reply.facts() for reply in replies]
        state.metadata[key] = plain
        state.store.set(key, plain)
        transcript().info({"follow_up": plain}, source="inspect_lens")
        return state

    return solve
