"""From the fields of a response to `output.metadata`: handles in place, files written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple
from uuid import uuid4

import anyio.to_thread
from anyio import CapacityLimiter
from anyio.lowlevel import RunVar
from inspect_ai.model import ModelOutput

from inspect_lens._hook_results import SavedValues, read_results
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.spec import LensRequest

from ._files import join, write_file
from ._handle import Activations
from ._host import active_call
from ._metadata import LensMetadata
from ._payload import Payload, encode_file
from ._places import Place
from ._response import ChoiceFields, FetchBytes, LensFields, fetch_payloads, qk_values
from ._store import MESSAGES

__all__ = ["Keep", "Mode", "attach", "keep_payload", "origin_of"]

HOOK_RESULTS_BYTES = 1 << 20
"""JSON of hook results that one output may bring into a log."""

TAKERS = 8
"""Threads that fetch and write at once; each holds a call's activations as they came and decoded.

Calls that end together would start as many threads as Inspect allows, forty: the event loop waits
for each to begin, and they take the interpreter from each other.
"""

_takers: RunVar[CapacityLimiter] = RunVar("inspect_lens_takers")

Mode = Literal["sidecar", "memory", "drop"]


class Keep(NamedTuple):
    """What happens to activations."""

    mode: Mode | None
    """None: a file where there is a place for one, else memory."""
    place: Place | None


async def attach(
    output: ModelOutput,
    fields: LensFields,
    request: LensRequest | None,
    body: Mapping[str, Any] | None = None,
    *,
    keep: Keep,
    fetch: FetchBytes,
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

        def take() -> list[Activations]:
            payloads = fetch_payloads(fields, request, fetch)
            return [
                keep_payload(payload.with_origin(origin), keep, name)
                for payload, origin, name in zip(payloads, origins, names, strict=True)
            ]

        # One visit to a thread for all of it: other samples wait for the event loop.
        handles = await anyio.to_thread.run_sync(take, limiter=_limiter())
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


def _limiter() -> CapacityLimiter:
    """Of this event loop."""
    try:
        return _takers.get()
    except LookupError:
        _takers.set(limiter := CapacityLimiter(TAKERS))
        return limiter


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


def keep_payload(payload: Payload, keep: Keep, name: str) -> Activations:
    """Make the handle of a payload: with a file, in memory, or with neither.

    Args:
        payload: of one choice.
        keep: where it goes.
        name: of the file; 12 characters of it are used.

    Returns:
        The handle.

    Raises:
        SpecError: a file is wanted and there is no place for one.
        CaptureError: the file could not be written.
    """
    mode = keep.mode or ("sidecar" if keep.place else "memory")
    if mode == "sidecar":
        if keep.place is None:
            raise SpecError(
                "activations='sidecar': this call is outside an eval, so there is no log to write "
                "beside; set activations_dir= or INSPECT_LENS_DIR, or use activations='memory'"
            )
        root, folder = keep.place
        # Ids are random; 12 characters of one are enough inside a folder, and short in the log.
        uri = f"{folder}/{name[:12]}.safetensors"
        write_file(join(root, uri), encode_file(payload))
        handle = Activations.of(payload, uri=uri, root=root)
    else:
        handle = Activations.of(payload)
    if mode != "drop":
        handle.remember(payload)
    return handle


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
