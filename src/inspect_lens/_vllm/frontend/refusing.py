"""Without the lens: requests that ask for it get a reason, not an answer that passes over it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from inspect_lens._vllm.compat.features import require
from inspect_lens._vllm.compat.seams import seam, wrap
from inspect_lens._vllm.http.bodies import has_lens_words
from inspect_lens._vllm.http.responses import is_serving
from inspect_lens.spec import LENS_KEYS, NATIVE_KEY

__all__ = ["refuse_lens_keys", "refuse_requests"]

_BODIES = ("chat_params", "completion_params")


def refuse_requests(*, own_only: bool = False) -> None:
    """Wrap as little of vLLM as refusing takes, where nothing else of the lens can be installed.

    Args:
        own_only: whether other keys than ours are somebody else's, who serves them.
    """
    keys = (NATIVE_KEY,) if own_only else LENS_KEYS
    wrap(seam("verify_args"), refuse_lens_keys(keys))
    for name in _BODIES if is_serving() else ():
        wrap(seam(name), _refuse_words(keys))


def refuse_lens_keys(keys: Collection[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a wrapper of `SamplingParams._verify_args` that refuses these keys."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def verify_args(self: Any) -> None:
            original(self)
            extra = self.extra_args
            if isinstance(extra, dict) and not extra.keys().isdisjoint(keys):
                require("lens")

        return verify_args

    return make


def _refuse_words(keys: Collection[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a wrapper that refuses bodies of HTTP with these keys, wherever they stand."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> Any:
            if has_lens_words(self, keys):
                require("lens")
            return original(self, *args, **kwargs)

        return to_sampling_params

    return make
