"""Models that say what a test scripts, offline."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from uuid import uuid4

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessageAssistant,
    Model,
    ModelOutput,
    ModelUsage,
    get_model,
)
from inspect_ai.tool import ToolCall

__all__ = ["calls", "scripted", "scripted_lens"]


def calls(*made: tuple[str, dict[str, Any]], text: str = "") -> ModelOutput:
    """One turn that calls tools, by name and arguments."""
    tool_calls = [ToolCall(id=uuid4().hex, function=name, arguments=args) for name, args in made]
    message = ChatMessageAssistant(content=text, tool_calls=tool_calls)
    choice = ChatCompletionChoice(message=message, stop_reason="tool_calls")
    return ModelOutput(model="mockllm/model", choices=[choice])


def scripted(outputs: Sequence[ModelOutput]) -> Model:
    """A model that gives these outputs, one per call."""
    # Without usage Inspect counts tokens, with a vocabulary that it downloads.
    usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    made = [output.model_copy(update={"usage": usage}) for output in outputs]
    return get_model("mockllm/model", custom_outputs=made, memoize=False)


def scripted_lens(outputs: Any) -> Model:
    """A model that gives prepared outputs, and counts as one that has a lens.

    Args:
        outputs: as `mockllm` takes them; what they hold stands for what an engine returned.
    """
    model = get_model("mockllm/model", custom_outputs=outputs, memoize=False)
    model.api.__class__ = _scripted_lens(type(model.api))
    return model


@cache
def _scripted_lens(plain: type) -> type:
    from inspect_lens.model._provider import LensAPI

    answers = type("ScriptedLens", (plain,), {})
    LensAPI.register(answers)
    return answers
