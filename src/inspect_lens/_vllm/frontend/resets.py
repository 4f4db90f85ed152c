"""What a front-end asks of an engine beside requests: it comes by two methods of its client.

Rows that are kept of earlier prompts go where vLLM's prefix cache may go, or the weights change.
And whether the workers have the lens is asked behind the first call to an engine that has started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from inspect_lens._vllm.compat.cpu_lora import CpuAdapters
from inspect_lens._vllm.compat.off import off, turn_off
from inspect_lens._vllm.registered.prompt_rows import is_harmless

from .state import front_end

__all__ = ["RESET_WRAPPERS"]


@contextmanager
def _forgetting(client: Any, method: str, args: Sequence[Any]) -> Iterator[None]:
    """Forget before, for requests that come meanwhile, and after, for what these captured."""
    if method in _ADAPTERS and (adapters := CpuAdapters.of(client.vllm_config)) is not None:
        adapters.loaded(method, args)
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
        with _forgetting(self, method, args):
            result = original(self, method, *args, **kwargs)
        if method == _FIRST_CALL:
            with _hearing(self) as heard:
                heard += original(self, *_ASK, **kwargs)
        return result

    return call_utility


def _call_utility_async(original: Callable[..., Any]) -> Callable[..., Any]:
    async def call_utility(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        with _forgetting(self, method, args):
            result = await original(self, method, *args, **kwargs)
        if method == _FIRST_CALL:
            with _hearing(self) as heard:
                heard += await original(self, *_ASK, **kwargs)
        return result

    return call_utility


_ADAPTERS = ("add_lora", "remove_lora")
_FIRST_CALL = "get_supported_tasks"
"""What every front-end asks an engine that has started, before its first request."""
_ASK = ("collective_rpc", "inspect_lens_refusal", None, (), {})


@contextmanager
def _hearing(client: Any) -> Iterator[list[str | None]]:
    """Take note of why the workers of an engine are without the lens, if they are."""
    config = client.vllm_config
    heard: list[str | None] = []
    try:
        yield heard
    except Exception as error:  # noqa: BLE001 - its workers do not know us
        heard = [f"its workers are without inspect-lens ({error})"]
    reason = next((one for one in heard if one is not None), None)
    if reason is not None and off(config) is None:
        turn_off(config, reason, is_told=True)


RESET_WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "call_utility": _call_utility,
    "call_utility_async": _call_utility_async,
}
"""Wrapper by seam name."""
