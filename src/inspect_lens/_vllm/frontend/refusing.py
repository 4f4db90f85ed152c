"""Without the lens: requests that ask for it get a reason, not an answer that passes over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inspect_lens._vllm.compat.features import require
from inspect_lens.spec import LENS_KEYS

__all__ = ["refuse_lens_keys"]


def refuse_lens_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `SamplingParams._verify_args` where nothing else of the lens can be installed.

    Args:
        original: vLLM's.
    """

    def verify_args(self: Any) -> None:
        original(self)
        extra = self.extra_args
        if isinstance(extra, dict) and not extra.keys().isdisjoint(LENS_KEYS):
            require("lens")

    return verify_args
