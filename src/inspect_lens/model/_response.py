"""What a lens server adds to a response: taken out before Inspect dumps it, and kept.

Handles go into `output.metadata`; what they stand for goes into files or into memory.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar
from uuid import uuid4

import anyio.to_thread
from anyio import CancelScope, CapacityLimiter
from anyio.lowlevel import RunVar
from inspect_ai.model import ChatMessage, ModelOutput
from pydantic import BaseModel

from inspect_lens._base.http import NO_PLUGIN
from inspect_lens._base.to_torch import SavedValues, read_results
from inspect_lens._intake import (
    BESIDE,
    ChoiceFields,
    FetchBytes,
    Lost,
    Payload,
    Source,
    Stored,
    encode_file,
    fetch_payload,
    file_job,
    is_local,
    join,
    qk_values,
    remove_file,
    write_file,
    write_job,
)
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.spec import LensRequest, Numerics, is_gate_key

from ._handle import KEEPS_FILES, MESSAGES, NUMERICS, Activations
from ._host import active_call
from ._places import Place
from ._scores import SCORED_MESSAGES, ProbeScores, ScoreData, columns_of

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk


@dataclass(kw_only=True)
class LensFields:
    """Lens fields of one response; there is one entry per choice, in order."""

    prompt_token_ids: list[int] = field(default_factory=list)
    choices: list[ChoiceFields] = field(default_factory=list)


def take_fields(completion: BaseModel) -> LensFields:
    """Remove the lens fields from a chat completion."""
    top = completion.model_extra or {}
    fields = LensFields(prompt_token_ids=list(top.pop("prompt_token_ids", None) or ()))
    for choice in getattr(completion, "choices", None) or ():
        extra = choice.model_extra or {}
        fields.choices.append(
            ChoiceFields(
                activations=extra.pop("activations", None),
                token_ids=list(extra.pop("token_ids", None) or ()),
                receipt=extra.pop("inspect_lens", None),
                hook_results=extra.pop("hook_results", None),
            )
        )
        fields.prompt_token_ids = fields.prompt_token_ids or list(
            extra.pop("prompt_token_ids", None) or ()
        )
    activations, receipt = top.pop("activations", None), top.pop("inspect_lens", None)
    saved = top.pop("hook_results", None)
    if fields.choices:
        first = fields.choices[0]
        first.activations = activations or first.activations
        # A receipt counts one choice's tokens, so the others bring their own or have none.
        first.receipt = receipt or first.receipt
        first.hook_results = saved or first.hook_results
    return fields


def note_open_gates(output: ModelOutput, fields: LensFields) -> None:
    """Keep on each message which gates of a conversation are open behind it.

    There it survives caches, forks and logs, and goes wherever the conversation goes.
    """
    for choice, received in zip(output.choices, fields.choices, strict=False):
        receipt = received.receipt or {}
        gates = (receipt.get("steer") or {}).get("gates") or ()
        keys = [gate["key"] for gate in gates if gate.get("key")]
        if keys:
            is_named = any(not tier.get("opted_out") for tier in receipt.get("tiers") or ())
            kept = {"keys": keys, "named": is_named}
            choice.message.metadata = {**(choice.message.metadata or {}), OPEN_GATES: kept}


def with_open_gates(
    request: LensRequest | None, messages: Sequence[ChatMessage]
) -> LensRequest | None:
    """The request of a call with the gates that its conversation has opened."""
    own: set[str] = set()
    names = False
    if request is not None:
        own = {gate.key for edit in request.edits for gate in edit.gates if gate.conversation}
        names = bool(request.edits_named or request.configs)
    found = dict.fromkeys(() if request is None else request.open_gates)
    for message in messages:
        kept = (message.metadata or {}).get(OPEN_GATES)
        if isinstance(kept, Mapping):
            # Of what a server knows by name, and of its own edits, it alone knows the gates.
            is_any = names or kept.get("named")
            keys = kept.get("keys")
            known = [key for key in keys if is_gate_key(key)] if isinstance(keys, list) else []
            found |= dict.fromkeys(key for key in known if is_any or key in own)
    opened = tuple(found)
    if request is None:
        return LensRequest(open_gates=opened) if opened else None
    if opened == request.open_gates:
        return request
    return request.model_copy(update={"open_gates": opened})


def fetch_payloads(fields: LensFields, request: LensRequest, fetch: FetchBytes) -> list[Payload]:
    """Decode the activations of every choice; not for the event loop."""
    payloads = []
    for index, choice in enumerate(fields.choices):
        if not choice.activations:
            raise CaptureError(missing_activations(index, len(fields.choices)))
        payloads.append(fetch_payload(choice, fields.prompt_token_ids, request, fetch))
        choice.activations = None  # the encoded form is as large as the tensors
    return payloads


def missing_activations(index: int, count: int) -> str:
    """What to say where a choice brought none."""
    if index == 0:
        return f"activations: asked for, and the response has none; {NO_PLUGIN}"
    return (
        f"activations: num_choices={count}, and the server returned none for choice {index}; use "
        "num_choices=1 and call generate once per choice, or epochs"
    )


OPEN_GATES = "inspect_lens_open_gates"
"""Of a message's metadata."""
_RESULTS = ("activations", "hook_results", "inspect_lens")


class StreamFields:
    """Collects lens fields of a stream and puts them on the completion made of it."""

    def __init__(self) -> None:
        self._top: dict[str, Any] = {}
        self._token_ids: dict[int, list[int]] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    async def strip(
        self, stream: AsyncIterable[ChatCompletionChunk]
    ) -> AsyncIterator[ChatCompletionChunk]:
        """Pass chunks on without their lens fields, and swallow the one that is ours."""
        async for chunk in stream:
            extra = chunk.model_extra or {}
            for name in (*_RESULTS, "prompt_token_ids"):
                if extra.get(name) is not None:
                    self._top[name] = extra.pop(name)
            for result in extra.pop("inspect_lens_choices", None) or ():
                self._take_choice(result["index"], dict(result))
            # vllm-lens sends a bare object that has no choices at all.
            choices = getattr(chunk, "choices", None)
            for choice in choices or ():
                self._take_choice(choice.index, choice.model_extra or {})
            if choices or getattr(chunk, "usage", None) is not None:
                yield chunk

    def attach(self, completion: ChatCompletion) -> ChatCompletion:
        """Put what was collected where a plain response has it."""
        _extra(completion).update(self._top)
        for choice in completion.choices:
            more = self._choices.get(choice.index, {})
            ids = self._token_ids.get(choice.index)
            _extra(choice).update(more | ({"token_ids": ids} if ids else {}))
        return completion

    def _take_choice(self, index: int, extra: dict[str, Any]) -> None:
        self._token_ids.setdefault(index, []).extend(extra.pop("token_ids", None) or ())
        for name in _RESULTS:
            if extra.get(name) is not None:
                self._choices.setdefault(index, {})[name] = extra.pop(name)


def _extra(model: Any) -> dict[str, Any]:
    if model.__pydantic_extra__ is None:
        object.__setattr__(model, "__pydantic_extra__", {})
    extra: dict[str, Any] = model.__pydantic_extra__
    return extra


TAKERS = 8
"""Threads that fetch and write at once; each holds a call's activations as they came and decoded.

Calls that end together would start as many threads as Inspect allows, forty: the event loop waits
for each to begin, and they take the interpreter from each other.
"""

_takers: RunVar[CapacityLimiter] = RunVar("inspect_lens_takers")

Made = TypeVar("Made")

Mode = Literal["sidecar", "memory", "drop"]

Named = Sequence[tuple[str, Mapping[str, Any]]]


class Keep(NamedTuple):
    """What happens to activations."""

    mode: Mode | None
    """None: a file where there is a place for one, else memory."""
    place: Place | None

    @property
    def is_written(self) -> bool:
        """Whether they go to a file."""
        return self.place is not None and self.mode in (None, "sidecar")

    @property
    def is_local_file(self) -> bool:
        """Whether they go to a file that any process of this machine can write."""
        return self.place is not None and self.is_written and is_local(self.place.root)


def expect(keep: Keep) -> None:
    """Say that a call is on its way with a file to write: of activations, or of token scores."""
    if keep.is_local_file:
        BESIDE.prepare()


async def take(
    fields: LensFields,
    request: LensRequest,
    named: Named,
    *,
    keep: Keep,
    fetch: FetchBytes,
    source: Source | None,
) -> list[Activations]:
    """Take the activations of each choice in."""
    if source is not None and keep.is_local_file:
        handles = await _take_beside(fields, request, named, keep=keep, source=source)
        if handles is not None:
            return handles

    def take_here() -> list[Activations]:
        payloads = fetch_payloads(fields, request, fetch)
        return [
            keep_payload(payload.with_origin(origin), keep, name)
            for payload, (name, origin) in zip(payloads, named, strict=True)
        ]

    # One visit to a thread for all of it: other samples wait for the event loop.
    return await in_thread(take_here)


async def _take_beside(
    fields: LensFields, request: LensRequest, named: Named, *, keep: Keep, source: Source
) -> list[Activations] | None:
    """Let the process beside do it; None where it cannot, or could not."""
    if not BESIDE.is_ready:
        return None
    uris, jobs = [], []
    for index, (choice, (name, origin)) in enumerate(zip(fields.choices, named, strict=True)):
        if not choice.activations:
            raise CaptureError(missing_activations(index, len(fields.choices)))
        if not all(map(_is_beside, choice.activations.values())):
            return None  # base64 would be copied
        uri, path = file_of(keep, name)
        uris.append(uri)
        jobs.append(
            write_job(
                choice, fields.prompt_token_ids, request, source=source, origin=origin, path=path
            )
        )
    try:
        stored = await _all_done(jobs)
    except Lost:
        return None
    root = keep.place.root if keep.place is not None else None
    if stored is None:
        return None
    found = [facts for facts in stored if facts is not None]
    return [
        Activations.stored(facts, uri=uri, root=root)
        for facts, uri in zip(found, uris, strict=True)
    ]


async def write_small(files: Mapping[str, bytes], keep: Keep) -> None:
    """Write small files whose contents are here, without holding the event loop."""
    if keep.is_local_file and BESIDE.is_ready:
        # In a thread each system call would wait for the interpreter of a busy event loop.
        with contextlib.suppress(Lost):
            if await _all_done([file_job(content, path) for path, content in files.items()]):
                return

    def write() -> None:
        for path, content in files.items():
            write_file(path, [content])

    await in_thread(write)


def _is_beside(entry: object) -> bool:
    return isinstance(entry, Mapping) and ("handle" in entry or "__json__" in entry)


async def _all_done(jobs: Sequence[bytes]) -> list[Stored | None] | None:
    waiting = [BESIDE.send(job) for job in jobs]
    found = [future for future in waiting if future is not None]
    try:
        return [await future for future in found] if len(found) == len(jobs) else None
    finally:
        # Also where this call was cancelled, or one of several failed.
        for future in found:
            if not future.cancel() and not future.cancelled():
                future.exception()


async def in_thread(work: Callable[[], Made]) -> Made:
    """Do what fetches and writes in one of few threads."""
    return await anyio.to_thread.run_sync(work, limiter=_limiter())


def _limiter() -> CapacityLimiter:
    """Of this event loop."""
    try:
        return _takers.get()
    except LookupError:
        _takers.set(limiter := CapacityLimiter(TAKERS))
        return limiter


def file_of(keep: Keep, name: str, kind: str = "") -> tuple[str, str]:
    """Relative and absolute address of a file."""
    if keep.place is None:
        raise SpecError(
            "activations='sidecar': this call is outside an eval, so there is no log to write "
            "beside; set activations_dir= or INSPECT_LENS_DIR, or use activations='memory'"
        )
    root, folder = keep.place
    # Ids are random; 12 characters of one are enough inside a folder, and short in the log.
    uri = f"{folder}/{name[:12]}{kind}.safetensors"
    return uri, join(root, uri)


def keep_payload(payload: Payload, keep: Keep, name: str) -> Activations:
    """Make the handle of a payload: with a file, in memory, or with neither."""
    mode = keep.mode or ("sidecar" if keep.place else "memory")
    if mode == "sidecar":
        uri, path = file_of(keep, name)
        write_file(path, encode_file(payload))
        handle = Activations.of(payload, uri=uri, root=keep.place.root if keep.place else None)
    else:
        handle = Activations.of(payload)
    if mode != "drop":
        handle.remember(payload)
    return handle


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
    KEEPS_FILES.set(None)  # it comes out of Inspect's cache, and all of its handles were read
    metadata = LensMetadata(prompt, completion)
    metadata.update(items)
    return metadata


async def leave_none(output: ModelOutput, keep: Keep) -> None:
    """Have the files of a call go that was cancelled, or failed behind one: no log names them."""
    if keep.place is None or keep.mode in ("memory", "drop"):
        return
    ids = [choice.message.id for choice in output.choices if choice.message.id]
    paths = [file_of(keep, name, kind)[1] for name in ids for kind in ("", SCORES)]
    for path in paths:
        BESIDE.leave_none(path)

    def remove() -> None:
        for path in paths:
            remove_file(path)

    with CancelScope(shield=True):
        await in_thread(remove)


SCORES = ".scores"
"""Part of the name of a file of token scores."""
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
    numerics: Numerics | None = None,
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
    scored = _score_data(output, fields, request, lora, numerics)
    if request is not None and request.brings_tensors:
        metadata.update(qk_values(first))
        if len(fields.choices) != len(output.choices):
            raise CaptureError(
                f"activations: the response has {len(fields.choices)} choices and Inspect made "
                f"{len(output.choices)} of them; use num_choices=1"
            )
        messages = [choice.message for choice in output.choices]
        origins = [origin_of(output.model, message.id, lora, numerics) for message in messages]
        names = [message.id or uuid4().hex for message in messages]

        named = list(zip(names, origins, strict=True))
        handles = await take(fields, request, named, keep=keep, fetch=fetch, source=source)
        for index, (message, handle) in enumerate(zip(messages, handles, strict=True)):
            if message.id:
                MESSAGES.put(message.id, handle)
            _put(output, index, "activations", handle)
    elif first.receipt is not None:
        # With a capture the receipt is in its file, and the log stays small.
        metadata["inspect_lens"] = _said(first.receipt)
    if scored:
        await _keep_scores(output, scored, keep=keep)
    if request is not None and request.hooks and first.hook_results is None:
        raise CaptureError(
            f"apply_hooks: the server answered without results of hooks; {NO_PLUGIN}"
        )
    for index, received in enumerate(fields.choices[: len(output.choices)]):
        if (saved := _saved(received)) is not None:
            _put(output, index, "hook_results", saved)


def _put(output: ModelOutput, index: int, key: str, value: object) -> None:
    """What the first choice has is in the metadata of the output, that of others in their own."""
    if index == 0 and output.metadata is not None:
        output.metadata[key] = value
    else:
        message = output.choices[index].message
        message.metadata = {**(message.metadata or {}), key: value}


Scored = list[tuple[ChatMessage, ScoreData]]


def _score_data(
    output: ModelOutput,
    fields: LensFields,
    request: LensRequest | None,
    lora: Any,
    numerics: Numerics | None,
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
        origin = origin_of(output.model, message.id, lora, numerics)
        data = ScoreData(columns=columns, prompt_token_ids=prompt, token_ids=ids, origin=origin)
        made.append((message, data))
    return made


async def _keep_scores(output: ModelOutput, made: Scored, *, keep: Keep) -> None:
    """Put token scores beside the log, and handles into the output."""
    writes = keep.mode == "sidecar" or (keep.mode != "memory" and keep.place is not None)
    root = keep.place.root if keep.place is not None else None
    handles, files = [], {}
    for message, data in made:
        uri, path = file_of(keep, message.id or uuid4().hex, SCORES) if writes else (None, "")
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
        _put(output, index, "probe_scores", handle)


def _activations_in(metadata: Mapping[str, Any] | None) -> Activations | None:
    """The handle that was put there just now."""
    found = (metadata or {}).get("activations")
    return found if isinstance(found, Activations) else None


def _said(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """A receipt without fields that say nothing: Inspect walks all of it a dozen times a sample."""
    said = {
        name: value
        for name, value in receipt.items()
        if value is not None and (value != [] or name == "paths")
    }
    if probes := said.get("probes"):
        said["probes"] = [
            {k: v for k, v in p.items() if v is not None and v is not False} for p in probes
        ]
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


def origin_of(
    model: str, message_id: str | None, lora: Any, numerics: Numerics | None
) -> Mapping[str, Any]:
    """What a file of activations says of where they are from."""
    call = active_call()
    origin: dict[str, Any] = {"model": model, "message_id": message_id} | _adapter(lora)
    if call is not None:
        origin |= {
            "sample_uuid": call.sample_uuid,
            "sample_id": call.sample_id,
            "epoch": call.epoch,
        }
    return {**origin, **numerics_in(numerics)}


@lru_cache(maxsize=8)
def numerics_in(numerics: Numerics | None) -> Mapping[str, Any]:
    """The part of an origin that says what the engine computed with."""
    return {} if numerics is None else {NUMERICS: numerics.model_dump(mode="json")}


def _adapter(lora_request: Any) -> dict[str, Any]:
    return {} if lora_request is None else {"lora_request": dict(lora_request)}
