"""Responses of tokens that also have results: those of vLLM drop what they do not know."""

from __future__ import annotations

import functools
from typing import Any

from pydantic import PrivateAttr

__all__ = ["with_room"]


def with_room(response: Any, found: list[dict[str, Any]]) -> Any:
    """Put results into a response: the first choice's at the top, each one's on its choice.

    Args:
        response: vLLM's.
        found: results of each choice, in order; empty where it has none.

    Returns:
        A response of a class below vLLM's; the response itself where there is nothing to add.
    """
    if not any(found) or not hasattr(response, "choices"):
        return response
    kind: Any = type(response)
    made = _roomy(kind).model_construct(**dict(response))
    made._found = found
    return made


@functools.cache
def _roomy(kind: Any) -> Any:
    """A response of tokens that also has results: those of vLLM drop what they do not know."""

    class Roomy(kind):  # type: ignore[misc]
        _found: list[dict[str, Any]] = PrivateAttr(default_factory=list)

        def model_dump(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            body: dict[str, Any] = super().model_dump(*args, **kwargs)
            if len(self._found) > 1:
                for choice, result in zip(body["choices"], self._found, strict=True):
                    choice.update(result)
            return body | self._found[0]

    return Roomy
