"""From the fields of a response to `output.metadata`: handles in place, files written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from inspect_ai.model import ChatMessage, ModelOutput

from inspect_lens._hook_results import SavedValues, read_results
from inspect_lens._intake import ChoiceFields, FetchBytes, Source, qk_values
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.model._host import active_call
from inspect_lens.model.scores._probe_scores import (
    SCORED_MESSAGES,
    ProbeScores,
    ScoreData,
    columns_of,
)
from inspect_lens.model.stored._handle import MESSAGES, Activations
from inspect_lens.spec import LensRequest

from ._response import Keep, LensFields, file_of, take, write_small

__all__ = [
    "LensMetadata",
    "attach",
    "origin_of",
]

TOKEN_KEYS = ("prompt_token_ids", "token_ids")


class LensMetadata(dict[str, Any]):
    """A dict that also answers for the token ids, which it does not store as items.

    vllm-lens puts `prompt_token_ids` and `token_ids` into the metadata, and so into every log,
    twice. Code written for it finds them here too; a log holds only the real items.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]

    def __init__(self, prompt_token_ids: list[int], token_ids: list[int]) -> None:
        super().__init__()
        self.prompt_token_ids = prompt_token_ids
        self.token_ids = token_ids

    def __missing__(self, key: str) -> Any:
        if key in TOKEN_KEYS:
            return getattr(self, key)
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        """The item, or token ids, or `default`."""
        return getattr(self, key) if key in TOKEN_KEYS else super().get(key, default)

    def __bool__(self) -> bool:
        """True also without items: `output.metadata or {}` must not lose the token ids."""
        return bool(len(self) or self.prompt_token_ids)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in TOKEN_KEYS

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.prompt_token_ids, self.token_ids, dict(self.items()))


def _rebuild(prompt: list[int], completion: list[int], items: dict[str, Any]) -> LensMetadata:
    metadata = LensMetadata(prompt, completion)
    metadata.update(items)
    return metadata


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
    """
    first = fields.choices[0]
    lora = (body or {}).get("lora_request")
    metadata = LensMetadata(fields.prompt_token_ids, first.token_ids)
    metadata.update((output.metadata or {}) | _adapter(lora))
    output.metadata = metadata
    scored = _score_data(output, fields, request, lora)
    if request is not None and request.brings_tensors:
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
        metadata["inspect_lens"] = _said(first.receipt)
    if scored:
        await _keep_scores(output, scored, keep=keep)
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


Scored = list[tuple[ChatMessage, ScoreData]]


def _score_data(
    output: ModelOutput, fields: LensFields, request: LensRequest | None, lora: Any
) -> Scored:
    """Token scores of each choice, taken out of its receipt: a log and a capture do without."""
    prompt = fields.prompt_token_ids
    made: Scored = []
    if request is None or not request.scores_tokens:
        return made
    for received, choice in zip(fields.choices, output.choices, strict=False):
        message, ids, receipt = choice.message, received.token_ids, received.receipt or {}
        columns = columns_of(receipt, request.probes, n_prompt=len(prompt), n_completion=len(ids))
        probes = [{k: v for k, v in p.items() if k != "tokens"} for p in receipt["probes"]]
        received.receipt = {**receipt, "probes": probes}
        origin = origin_of(output.model, message.id, lora)
        data = ScoreData(columns=columns, prompt_token_ids=prompt, token_ids=ids, origin=origin)
        made.append((message, data))
    return made


async def _keep_scores(output: ModelOutput, made: Scored, *, keep: Keep) -> None:
    """Put token scores beside the log, and handles into the output."""
    writes = keep.mode == "sidecar" or (keep.mode != "memory" and keep.place is not None)
    root = keep.place.root if keep.place is not None else None
    handles, files = [], {}
    for message, data in made:
        uri, path = file_of(keep, message.id or uuid4().hex, ".scores") if writes else (None, "")
        handle, content = ProbeScores.keep(data, uri=uri, root=root)
        handles.append(handle)
        if uri is not None:
            files[path] = content
    if files:
        await write_small(files, keep)

    for index, (handle, (message, _)) in enumerate(zip(handles, made, strict=True)):
        captured = _activations_in(output.metadata if index == 0 else message.metadata)
        handle.beside(captured)
        if message.id:
            SCORED_MESSAGES.put(message.id, handle)
        if index == 0 and output.metadata is not None:
            output.metadata["probe_scores"] = handle
        else:
            message.metadata = {**(message.metadata or {}), "probe_scores": handle}


def _activations_in(metadata: Mapping[str, Any] | None) -> Activations | None:
    """The handle that was put there just now."""
    found = (metadata or {}).get("activations")
    return found if isinstance(found, Activations) else None


def _said(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """A receipt without fields that say nothing: Inspect walks all of it a dozen times a sample."""
    said = {name: value for name, value in receipt.items() if value is not None}
    if probes := said.get("probes"):
        said["probes"] = [{k: v for k, v in p.items() if v is not None} for p in probes]
    return said


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
    """What a file of activations says of where they are from."""
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
