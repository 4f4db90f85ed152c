"""Streaming: the SDK's accumulator drops fields it does not know, so they are taken first."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk

__all__ = ["StreamFields"]

_RESULTS = ("activations", "hook_results", "inspect_lens")


class StreamFields:
    """Collects lens fields of a stream and puts them on the completion made of it."""

    def __init__(self) -> None:
        self._top: dict[str, Any] = {}
        self._token_ids: dict[int, list[int]] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    async def strip(
        self, stream: AsyncIterable[ChatCompletionChunk]
    ) -> AsyncIterator[ChatCompletionChunk]:
        """Pass chunks on without their lens fields, and swallow the one that is ours."""
        async for chunk in stream:
            extra = chunk.model_extra or {}
            for name in (*_RESULTS, "prompt_token_ids"):
                if extra.get(name) is not None:
                    self._top[name] = extra.pop(name)
            for result in extra.pop("inspect_lens_choices", None) or ():
                self._take_choice(result["index"], dict(result))
            # vllm-lens sends a bare object that has no choices at all.
            choices = getattr(chunk, "choices", None)
            for choice in choices or ():
                self._take_choice(choice.index, choice.model_extra or {})
            if choices or getattr(chunk, "usage", None) is not None:
                yield chunk

    def attach(self, completion: ChatCompletion) -> ChatCompletion:
        """Put what was collected where a plain response has it."""
        _extra(completion).update(self._top)
        for choice in completion.choices:
            more = self._choices.get(choice.index, {})
            ids = self._token_ids.get(choice.index)
            _extra(choice).update(more | ({"token_ids": ids} if ids else {}))
        return completion

    def _take_choice(self, index: int, extra: dict[str, Any]) -> None:
        self._token_ids.setdefault(index, []).extend(extra.pop("token_ids", None) or ())
        for name in _RESULTS:
            if extra.get(name) is not None:
                self._choices.setdefault(index, {})[name] = extra.pop(name)


def _extra(model: Any) -> dict[str, Any]:
    if model.__pydantic_extra__ is None:
        object.__setattr__(model, "__pydantic_extra__", {})
    extra: dict[str, Any] = model.__pydantic_extra__
    return extra
