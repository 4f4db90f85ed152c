"""Parameters of a request that asks an engine for one token and the chance of chosen ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["one_token", "status_of"]


def one_token(tokens: Sequence[int], extra_args: dict[str, Any] | None) -> Any:
    """Make vLLM's sampling parameters."""
    from vllm.sampling_params import SamplingParams

    return SamplingParams(
        max_tokens=1, temperature=0, detokenize=False, extra_args=extra_args,
        logprob_token_ids=list(tokens) or None,
    )  # fmt: skip


def status_of(error: BaseException) -> int:
    """HTTP status that vLLM's API server gives an error, ours among them."""
    for name in ("status", "http_status", "status_code"):
        found = getattr(error, name, None)
        if isinstance(found, int):
            return int(found)
    import vllm.exceptions as known

    # Releases without this class raise a ValueError.
    wrong = getattr(known, "VLLMClientError", ValueError)
    return 400 if isinstance(error, (ValueError, wrong)) else 500
