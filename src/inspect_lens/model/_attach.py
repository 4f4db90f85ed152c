"""From the fields of a response to `output.metadata`: handles in place, files written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from inspect_ai.model import ModelOutput

from inspect_lens._hook_results import SavedValues, read_results
from inspect_lens._intake import ChoiceFields, FetchBytes, Source, qk_values
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.spec import LensRequest

from ._host import active_call
from ._metadata import LensMetadata
from ._response import LensFields
from ._store import MESSAGES
from ._take import Keep, take

__all__ = ["attach", "origin_of"]

HOOK_RESULTS_BYTES = 1 << 20
"""JSON of hook results that one output may bring into a log."""


async def attach(
    output: ModelOutput,
    fields: LensFields,
    request: LensRequest | None,
    body: Mapping[str, Any] | None = None,
    *,
    keep: Keep,
    fetch: FetchBytes,
    source: Source | None = None,
) -> None:
    """Put what a response brought into the output that Inspect made of it.

    The first choice's activations are in `output.metadata["activations"]`, those of further
    choices in the metadata of their messages; all are found by message id.

    Args:
        output: changed in place.
        fields: taken from the response.
        request: that was sent.
        body: `extra_body` of the call; an adapter of this call is noted with what it wrote, as
            the base model would not read the text alike.
        keep: whether activations go to files.
        fetch: gets the bytes behind a handle of the binary transport, in a thread.
        source: of those bytes, for another process; None where only this one reaches them.

    Raises:
        CaptureError: something is missing, or a file could not be written.
    """
    first = fields.choices[0]
    lora = (body or {}).get("lora_request")
    metadata = LensMetadata(fields.prompt_token_ids, first.token_ids)
    metadata.update((output.metadata or {}) | _adapter(lora))
    output.metadata = metadata
    if request is not None and (request.capture is not None or request.qk is not None):
        metadata.update(qk_values(first))
        if len(fields.choices) != len(output.choices):
            raise CaptureError(
                f"activations: the response has {len(fields.choices)} choices and Inspect made "
                f"{len(output.choices)} of them; use num_choices=1"
            )
        messages = [choice.message for choice in output.choices]
        origins = [origin_of(output.model, message.id, lora) for message in messages]
        names = [message.id or uuid4().hex for message in messages]

        named = list(zip(names, origins, strict=True))
        handles = await take(fields, request, named, keep=keep, fetch=fetch, source=source)
        for index, (message, handle) in enumerate(zip(messages, handles, strict=True)):
            if message.id:
                MESSAGES.put(message.id, handle)
            if index == 0:
                metadata["activations"] = handle
            else:
                message.metadata = {**(message.metadata or {}), "activations": handle}
    elif first.receipt is not None:
        # With a capture the receipt is in its file, and the log stays small.
        metadata["inspect_lens"] = dict(first.receipt)
    if request is not None and request.hooks and first.hook_results is None:
        raise CaptureError(
            "apply_hooks: the server answered without results of hooks; it runs without the "
            "inspect-lens plug-in (see that VLLM_PLUGINS and INSPECT_LENS_DISABLE allow it)"
        )
    for received, made in zip(fields.choices, output.choices, strict=False):
        if (saved := _saved(received)) is None:
            continue
        if received is first:
            metadata["hook_results"] = saved
        else:
            made.message.metadata = {**(made.message.metadata or {}), "hook_results": saved}


def _saved(choice: ChoiceFields) -> SavedValues | None:
    """What hooks saved: it goes into the log, so it has to be small."""
    if choice.hook_results is None:
        return None
    size = len(json.dumps(choice.hook_results))
    if size > HOOK_RESULTS_BYTES:
        raise CaptureError(
            f"hook_results: {size} bytes, and a log takes {HOOK_RESULTS_BYTES}; let hooks save "
            "less (a position, a projection, a mean), capture activations with "
            "output_residual_stream, which go to files, or use LensClient"
        )
    try:
        return read_results(choice.hook_results)
    except SpecError as error:
        raise CaptureError(str(error)) from None


def origin_of(model: str, message_id: str | None, lora: Any) -> Mapping[str, Any]:
    """What a file of activations says of where they are from.

    Args:
        model: that made the call, without its provider.
        message_id: of what it wrote.
        lora: the adapter that wrote it, as vLLM's `lora_request`, or None.

    Returns:
        These, and the sample that is running.
    """
    call = active_call()
    origin: dict[str, Any] = {"model": model, "message_id": message_id} | _adapter(lora)
    if call is not None:
        origin |= {
            "sample_uuid": call.sample_uuid,
            "sample_id": call.sample_id,
            "epoch": call.epoch,
        }
    return origin


def _adapter(lora_request: Any) -> dict[str, Any]:
    return {} if lora_request is None else {"lora_request": dict(lora_request)}
