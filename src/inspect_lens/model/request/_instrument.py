"""Calls that an instrument makes of the model that it studies: no turns of that model."""

from __future__ import annotations

from collections.abc import Sequence

from inspect_ai.model import ChatMessage, ChatMessageUser

__all__ = ["instrument_message", "is_instrument_call"]

_KEY = "inspect_lens_instrument"


def instrument_message(text: str, *, name: str) -> ChatMessageUser:
    """The message of a call that is an instrument's own; the log keeps the mark.

    Args:
        text: of the message.
        name: of the instrument, such as `oracle`.

    Returns:
        The message; the mark is not sent.
    """
    return ChatMessageUser(content=text, metadata={_KEY: name})


def is_instrument_call(messages: Sequence[ChatMessage]) -> bool:
    """Whether the input of a model call is an instrument's own, live or out of a log."""
    return any(_KEY in (message.metadata or {}) for message in messages)
