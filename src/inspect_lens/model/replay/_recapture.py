"""Feeding known tokens again to capture what was not captured while they were generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal
from uuid import uuid4

import anyio.to_thread
from inspect_ai.model import Model

from inspect_lens._intake import ChoiceFields
from inspect_lens.errors import CaptureError, SpecError, UnsupportedError
from inspect_lens.model.request._transport import over_binary
from inspect_lens.model.response._attach import origin_of
from inspect_lens.model.response._response import LensFields, fetch_payloads
from inspect_lens.model.response._take import Keep, keep_payload
from inspect_lens.model.stored._handle import MESSAGES, Activations
from inspect_lens.model.stored._places import place_for
from inspect_lens.spec import (
    RESID_POST,
    CaptureSpec,
    LensRequest,
    Site,
    to_extra_args,
    to_wire_args,
)

__all__ = ["recapture", "recaptures"]


def recaptures(model: Model) -> bool:
    """Tell whether `recapture` works with a model.

    Args:
        model: any.

    Returns:
        True for models of this provider.

    Example:
        ```python
        from inspect_ai.model import get_model

        from inspect_lens.model import recaptures

        assert recaptures(get_model("vllm-lens/organism/checkpoint"))
        assert not recaptures(get_model("mockllm/model"))
        ```
    """
    from inspect_lens.model.provider._provider import LensAPI

    return isinstance(model.api, LensAPI)


async def recapture(
    model: Model,
    *,
    prompt_token_ids: Sequence[int],
    token_ids: Sequence[int],
    layers: Sequence[int] | Literal["all"],
    site: Site = RESID_POST,
    beside_log: bool = False,
    adapter: str | Mapping[str, Any] | None = None,
    message_id: str | None = None,
) -> Activations:
    """Capture a finished generation by feeding exactly its tokens again.

    Token ids go through `/v1/completions`, so no chat template is rendered a second time. The
    last sampled token is left out, as it was while generating, and the rows are those that a
    capture would have had: `(layers, n_prompt + n_completion - 1, hidden)`. They differ from
    those by the engine's rounding, and in substance where the generation was steered.

    Args:
        model: a `vllm-lens/` model.
        prompt_token_ids: the prompt as the model saw it.
        token_ids: the sampled tokens, at least one.
        layers: layers to capture, or `all`.
        site: place in the block.
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
                model,
                prompt_token_ids=call.prompt_token_ids,
                token_ids=call.token_ids,
                layers=[2],
            )
            assert again.numpy().shape == (1, call.n_prompt + call.n_completion - 1, 256)


        anyio.run(main)
        ```
    """
    # Imported here: reading what was captured does without the provider.
    from inspect_lens.model.provider._provider import LensAPI

    api = model.api
    if not isinstance(api, LensAPI):
        raise UnsupportedError(
            f"recomputing activations needs a vllm-lens/ model, and the active model is {model}; "
            "pass --model vllm-lens/… , or capture while generating"
        )
    if not prompt_token_ids or not token_ids:
        raise SpecError("recapture: needs prompt_token_ids and token_ids, at least one of each")
    capture = CaptureSpec(layers="all" if layers == "all" else tuple(layers), site=site)
    request = LensRequest(capture=capture)
    args = to_extra_args(request)
    if await api.offers_binary():
        args = over_binary(args)
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
            "vllm_xargs": to_wire_args(args),
        },
    )
    choice = ChoiceFields(activations=answer.get("activations"), token_ids=list(token_ids))
    if not choice.activations:
        raise CaptureError(
            "recapture: the server returned no activations; it runs without the inspect-lens "
            "plug-in, or with INSPECT_LENS_DISABLE set"
        )
    fields = LensFields(prompt_token_ids=list(prompt_token_ids), choices=[choice])
    keep = Keep(None, place_for(None) if beside_log else None)

    origin = origin_of(model.name, message_id, lora) if message_id is not None else {}

    def take() -> Activations:
        (payload,) = fetch_payloads(fields, request, api.fetch)
        return keep_payload(payload.with_origin(origin), keep, uuid4().hex)

    handle = await anyio.to_thread.run_sync(take)
    if message_id is not None:
        MESSAGES.put(message_id, handle)
    return handle
