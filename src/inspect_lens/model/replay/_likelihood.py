"""How likely known tokens are to a model that is not steered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from inspect_ai.model import Model
from numpy.typing import NDArray

from inspect_lens.errors import CaptureError, SpecError, UnsupportedError

__all__ = ["token_logprobs"]


async def token_logprobs(
    model: Model, *, prompt_token_ids: Sequence[int], token_ids: Sequence[int]
) -> NDArray[np.float64]:
    """Log-probabilities of a completion's tokens, given its prompt, under the plain model.

    Exactly these token ids are fed, in one forward pass without steering, whatever the
    generation was steered with; the server's own `prompt_logprobs` are read. They are those of
    the distribution at temperature 1, before any top-p or top-k.

    Args:
        model: a `vllm-lens/` model.
        prompt_token_ids: the prompt as the model saw it, at least one token.
        token_ids: the completion, at least one token, the last one included.

    Returns:
        (n_completion,) float64, natural logarithms.

    Raises:
        UnsupportedError: the model's provider cannot.
        SpecError: there are no tokens.
        CaptureError: the server refused, or returned something else.

    Example:
        <!-- test: skip vLLM 0.32 on a CPU crashes on prompt_logprobs beside LoRA -->
        ```python
        import anyio
        from inspect_ai.model import get_model

        from inspect_lens.model import read_activations, token_logprobs

        call = read_activations("logs/honesty.eval")[0].activations


        async def main() -> None:
            model = get_model("vllm-lens/organism/checkpoint")
            logprobs = await token_logprobs(
                model, prompt_token_ids=call.prompt_token_ids, token_ids=call.token_ids
            )
            assert logprobs.shape == (call.n_completion,)


        anyio.run(main)
        ```
    """
    # Imported here: reading what was captured does without the provider.
    from inspect_lens.model.provider._provider import LensAPI

    api = model.api
    if not isinstance(api, LensAPI):
        raise UnsupportedError(
            f"log-probabilities of known tokens need a vllm-lens/ model, and this one is {model}; "
            "pass --model vllm-lens/…, or use a judge model"
        )
    if not prompt_token_ids or not token_ids:
        raise SpecError("token_logprobs: needs prompt_token_ids and token_ids, at least one each")
    tokens = [*prompt_token_ids, *token_ids]
    answer: Any = await api.post(
        "/v1/completions",
        {"prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0},
    )
    entries = answer["choices"][0].get("prompt_logprobs") if answer.get("choices") else None
    if not isinstance(entries, Sequence) or len(entries) != len(tokens):
        raise CaptureError(
            f"token_logprobs: the server returned "
            f"{len(entries) if isinstance(entries, Sequence) else 'no'} prompt_logprobs for "
            f"{len(tokens)} tokens; wanted is one entry per token, as vLLM gives them"
        )
    start = len(prompt_token_ids)
    pairs = zip(tokens[start:], entries[start:], strict=True)
    return np.array([_logprob(entry, token) for token, entry in pairs], dtype=np.float64)


def _logprob(entry: object, token: int) -> float:
    found = entry.get(str(token)) if isinstance(entry, Mapping) else None
    if not isinstance(found, Mapping) or "logprob" not in found:
        raise CaptureError(
            f"token_logprobs: no log-probability of token {token} in the server's answer; wanted "
            "is the entry of each prompt token, as vLLM gives them"
        )
    return float(found["logprob"])
