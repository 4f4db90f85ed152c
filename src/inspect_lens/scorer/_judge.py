"""Asking a judge model for a number, and what it is shown."""

from __future__ import annotations

import math
import re
from typing import Any, Final, NamedTuple

from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    GenerateConfig,
    Model,
    ModelOutput,
    get_model,
)
from inspect_ai.solver import TaskState

from inspect_lens.reading import Turn

__all__ = ["Verdict", "ask_number", "find_judge", "shown"]

_NUMBER: Final = re.compile(r"(?<![\w.-])\d+(?:\.\d+)?(?![\w.]*\d)")
_OUT_OF: Final = re.compile(r"\s*(?:/|out of)\s*100\b")
_MASS: Final = 0.25
"""Least probability that has to lie on numbers; below it the judge did not answer the question."""


class Verdict(NamedTuple):
    """What a judge said."""

    value: float | None
    """0 to 100; None when its answer holds no such number."""
    answer: str
    """Its words."""
    model: str
    weighted: bool
    """Whether the value is a mean over the judge's probabilities of numbers."""
    tokens: int | None = None
    """That it read and wrote; None where its provider does not count them."""

    def metadata(self) -> dict[str, Any]:
        """Small facts for a score."""
        facts: dict[str, Any] = {
            "judge": self.model,
            "judge_answer": self.answer[:500],
            "judge_weighted": self.weighted,
        }
        return facts if self.tokens is None else facts | {"judge_tokens": self.tokens}


def find_judge(judge: str | Model | None, role: str) -> Model:
    """The judge: the model that was given, else the one in the role.

    As everywhere in Inspect, a role that nobody set is played by the model of the eval; the
    score's metadata names the judge.
    """
    return get_model(judge) if judge is not None else get_model(role=role)


async def ask_number(judge: Model, prompt: str, *, weighted: bool) -> Verdict:
    """Ask for a number from 0 to 100.

    Args:
        judge: the model.
        prompt: ends by asking for the number alone.
        weighted: take the mean over the probabilities of the first token of the answer instead
            of the number that was sampled, where the judge gives them. Needs numbers that are
            one token each.

    Returns:
        The verdict.

    Source:
        arXiv:2507.21509: numbers weighted by the judge's probabilities, refused below a quarter
        of the probability mass.
    """
    config = GenerateConfig(temperature=0.0, max_tokens=16)
    if weighted:
        config = config.merge(GenerateConfig(logprobs=True, top_logprobs=20))
    output = await judge.generate(prompt, config=config)
    answer = output.completion.strip()
    tokens = (output.usage.total_tokens or None) if output.usage else None
    if weighted and (mean := _expected(output)) is not None:
        value, weights = mean
        return Verdict(value if weights >= _MASS else None, answer, str(judge), True, tokens)
    return Verdict(_parse(answer), answer, str(judge), False, tokens)


def shown(state: TaskState, turn: Turn | None = None) -> tuple[str, str]:
    """What a judge reads: the conversation before an answer, and that answer.

    Args:
        state: of the sample.
        turn: the call that wrote the answer; that of the sample's answer by default.

    Returns:
        Both as text.
    """
    messages = list(state.messages)
    ids = [message.id for message in messages]
    output = state.output if turn is None else turn.output
    if turn is not None and turn.message_id in ids:
        messages = messages[: ids.index(turn.message_id)]
    elif messages and isinstance(messages[-1], ChatMessageAssistant):
        messages.pop()
    before = "\n\n".join(_line(message) for message in messages) or state.input_text
    calls = (output.message.tool_calls or []) if turn is not None and output.choices else []
    made = [f"[calls {call.function} with {call.arguments}]" for call in calls]
    return before, "\n".join(filter(None, [output.completion, *made]))


def _parse(answer: str) -> float | None:
    """The one number in an answer; several different ones are no answer."""
    numbers = {float(found) for found in _NUMBER.findall(_OUT_OF.sub("", answer))}
    value = numbers.pop() if len(numbers) == 1 else math.nan
    return value if 0 <= value <= 100 else None


def _line(message: ChatMessage) -> str:
    return f"[{message.role}] {message.text}"


def _expected(output: ModelOutput) -> tuple[float, float] | None:
    """Mean of the numbers that the first token may be, and their probability."""
    logprobs = output.choices[0].logprobs if output.choices else None
    if logprobs is None or not logprobs.content or not logprobs.content[0].top_logprobs:
        return None
    total = weights = 0.0
    for option in logprobs.content[0].top_logprobs:
        text = option.token.strip()
        if text.isdecimal() and int(text) <= 100:
            weight = math.exp(option.logprob)
            total += weight * int(text)
            weights += weight
    return (total / weights if weights else 0.0), weights
