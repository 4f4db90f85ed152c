"""Feeding known tokens again to capture what was not captured while they were generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal
from uuid import uuid4

import anyio.to_thread
import numpy as np
from inspect_ai.model import ChatMessage, ChatMessageAssistant, Model, messages_to_openai
from inspect_ai.tool import ToolInfo
from numpy.typing import NDArray

from inspect_lens._base.arguments import judged_arguments
from inspect_lens._base.http import NO_PLUGIN
from inspect_lens._intake import ChoiceFields
from inspect_lens.errors import ArtifactError, CaptureError, SpecError, UnsupportedError
from inspect_lens.spec import (
    RESID_POST,
    CaptureSpec,
    LensRequest,
    Positions,
    Site,
    to_extra_args,
    to_wire_args,
)

from ._handle import MESSAGES, Activations
from ._places import place_for
from ._response import Keep, LensFields, fetch_payloads, keep_payload, numerics_in, origin_of
from ._scope import LensProvider

__all__ = ["recapture", "token_logprobs"]


def _api(model: Model, what: str, otherwise: str) -> Any:
    if not isinstance(model.api, LensProvider):
        raise UnsupportedError(
            f"{what}: needs a vllm-lens/ model, and this one is {model}; pass --model "
            f"vllm-lens/…, {otherwise}"
        )
    return model.api


@judged_arguments
async def recapture(
    model: Model,
    *,
    prompt_token_ids: Sequence[int],
    token_ids: Sequence[int],
    layers: Sequence[int] | Literal["all"],
    site: Site = RESID_POST,
    positions: Positions = "all",
    beside_log: bool = False,
    adapter: str | Mapping[str, Any] | None = None,
    message_id: str | None = None,
) -> Activations:
    """Capture a finished generation by feeding exactly its tokens again.

    Token ids go through `/v1/completions`, so no chat template is rendered a second time. The
    last sampled token is left out, as it was while generating, and the rows are those that a
    capture would have had: `(layers, n_prompt + n_completion - 1, hidden)` of all tokens. They
    differ from those by the engine's rounding, and in substance where the generation was steered.

    Args:
        model: a `vllm-lens/` model.
        prompt_token_ids: the prompt as the model saw it.
        token_ids: the sampled tokens, at least one.
        layers: layers to capture, or `all`.
        site: place in the block.
        positions: tokens to keep; all that are fed by default. Here everything that is fed is the
            prompt, so `last_prompt` is the last of them.
        beside_log: also write the file that a capture while generating would have, where there
            is a log or INSPECT_LENS_DIR.
        adapter: LoRA adapter that reads: the name of one that the server has loaded, or the
            `lora_request` of the generation, which is loaded where it has a path. Without one
            the model itself reads.
        message_id: of the message whose activations these are; `activations_for` finds them by it
            then, in this process, and their file says of what model, sample and message they are.

    Returns:
        The handle, kept in memory.

    Raises:
        UnsupportedError: the model's provider cannot capture.
        SpecError: there are no tokens.
        CaptureError: the server refused, or returned something else.

    Example:
        <!-- test: server -->
        ```python
        import anyio
        from inspect_ai.model import get_model

        from inspect_lens.model import read_activations, recapture

        call = read_activations("logs/honesty.eval")[0].activations


        async def main() -> None:
            model = get_model("vllm-lens/organism/checkpoint")
            again = await recapture(
                model, prompt_token_ids=call.prompt_token_ids, token_ids=call.token_ids, layers=[2]
            )
            assert again.numpy().shape == (1, call.n_prompt + call.n_completion - 1, 256)


        anyio.run(main)
        ```
    """
    api = _api(model, "recomputing activations", "or capture while generating")
    if not prompt_token_ids or not token_ids:
        raise SpecError("recapture: needs prompt_token_ids and token_ids, at least one of each")
    capture = CaptureSpec(
        layers="all" if layers == "all" else tuple(layers), site=site, positions=positions
    )
    request = LensRequest(capture=capture)
    if await api.offers_binary():
        request = request.over_binary()
    lora = dict(adapter) if isinstance(adapter, Mapping) else None
    if lora is not None:
        await api.load_adapter(lora)
        adapter = str(lora["lora_name"])
    answer: Any = await api.post(
        "/v1/completions",
        {
            **({} if adapter is None else {"model": adapter}),
            "prompt": [*prompt_token_ids, *token_ids[:-1]],
            "max_tokens": 1,
            "temperature": 0,
            "vllm_xargs": to_wire_args(to_extra_args(request)),
        },
    )
    choice = ChoiceFields(
        activations=answer.get("activations"), token_ids=list(token_ids),
        # Chosen positions are found there; rows of all of them begin at the first.
        receipt=None if positions == "all" else answer.get("inspect_lens"),
    )  # fmt: skip
    if not choice.activations:
        raise CaptureError(f"recapture: the server returned no activations; {NO_PLUGIN}")
    fields = LensFields(prompt_token_ids=list(prompt_token_ids), choices=[choice])
    keep = Keep(None, place_for(None) if beside_log else None)

    numerics = await api.numerics()
    origin = (
        numerics_in(numerics)
        if message_id is None
        else origin_of(model.name, message_id, lora, numerics)
    )

    def take() -> Activations:
        (payload,) = fetch_payloads(fields, request, api.fetch)
        return keep_payload(payload.with_origin(origin), keep, uuid4().hex)

    handle = await anyio.to_thread.run_sync(take)
    if message_id is not None:
        MESSAGES.put(message_id, handle)
    return handle


async def reread(
    model: Model,
    *,
    messages: Sequence[ChatMessage],
    answer: ChatMessageAssistant,
    layers: Sequence[int] | Literal["all"],
    tools: Sequence[ToolInfo] = (),
    site: Site = RESID_POST,
) -> Activations:
    """Capture a finished conversation: render it again with the chat template, and feed it.

    For logs without token ids, and for models other than the one that wrote the answer: what
    comes back is how this model reads the text, which is off-policy even where it is the same
    model, because sampled tokens need not be those that the tokenizer makes of their text.
    """
    api = _api(model, "reading a logged conversation", "or model= to a scanner")
    shown: dict[str, Any] = {"add_special_tokens": False}
    if tools:
        shown["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters.model_dump(exclude_none=True),
                },
            }
            for tool in tools
        ]
    before: list[Any] = await messages_to_openai(list(messages))
    after: list[Any] = await messages_to_openai([*messages, answer])
    prompt = await prompt_tokens(api, before, **shown)
    completion = await continued_tokens(api, prompt, after, **shown)
    if completion is None:
        raise ArtifactError(
            f"message {answer.id}: with the answer behind it the chat template renders the "
            "conversation in another way (it may drop reasoning), so the answer's tokens cannot "
            "be told from the prompt's; score activations that were captured instead"
        )
    if not completion:
        raise ArtifactError(f"message {answer.id}: the answer has no text to read")
    # The last token of a completion is never read by the model that wrote it. Here that is the
    # end of the turn, which the rendering leaves out, so any token stands for it.
    return await recapture(
        model,
        prompt_token_ids=prompt,
        token_ids=[*completion, completion[-1]],
        layers=layers,
        site=site,
    )


async def prompt_tokens(api: Any, messages: Sequence[Any] | str, **shown: Any) -> list[int]:
    """Ids of a prompt, by the server's own template; raw text has none."""
    asked = {"messages": messages, "add_generation_prompt": True}
    body = {"prompt": messages} if isinstance(messages, str) else shown | asked
    return [int(token) for token in (await api.post("/tokenize", body))["tokens"]]


async def continued_tokens(
    api: Any, prompt: list[int], messages: Sequence[Any], **shown: Any
) -> list[int] | None:
    """Ids of the last message, behind the prompt; None where the template writes another one."""
    asked = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    whole = [int(token) for token in (await api.post("/tokenize", shown | asked))["tokens"]]
    return whole[len(prompt) :] if whole[: len(prompt)] == prompt else None


@judged_arguments
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
        SpecError: there are no tokens, or some stand for an image, a video or audio: what these
            show is not in the ids, so the numbers would be those of another prompt.
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
    api = _api(model, "log-probabilities of known tokens", "or use a judge model")
    if not prompt_token_ids or not token_ids:
        raise SpecError("token_logprobs: needs prompt_token_ids and token_ids, at least one each")
    tokens = [*prompt_token_ids, *token_ids]
    answer: Any = await api.post(
        "/v1/completions",
        {
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
            # vLLM does so in any case, but a prompt that asks something of the lens is judged.
            "vllm_xargs": to_wire_args(to_extra_args(LensRequest(skip_reading_prefix_cache=True))),
        },
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
