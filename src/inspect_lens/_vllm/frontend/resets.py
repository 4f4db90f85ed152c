"""Rows that are kept of earlier prompts go where vLLM's prefix cache may go, or the weights change.

All that a front-end asks of an engine beside requests comes by two methods of its client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from inspect_lens._vllm.registered.prompt_rows import is_harmless

from .state import front_end

__all__ = ["RESET_WRAPPERS"]


@contextmanager
def _forgetting(method: str, args: Sequence[Any]) -> Iterator[None]:
    """Forget before, for requests that come meanwhile, and after, for what these captured."""
    is_fine = is_harmless(method, args)
    if not is_fine:
        front_end().forget_rows()
    try:
        yield
    finally:
        if not is_fine:
            front_end().forget_rows()


def _call_utility(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_utility(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        with _forgetting(method, args):
            return original(self, method, *args, **kwargs)

    return call_utility


def _call_utility_async(original: Callable[..., Any]) -> Callable[..., Any]:
    async def call_utility(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        with _forgetting(method, args):
            return await original(self, method, *args, **kwargs)

    return call_utility


RESET_WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "call_utility": _call_utility,
    "call_utility_async": _call_utility_async,
}
"""Wrapper by seam name."""
