"""What a lens server adds to a response: taken out before Inspect dumps it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import anyio.to_thread
from anyio import CapacityLimiter
from anyio.lowlevel import RunVar
from pydantic import BaseModel

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
    write_file,
    write_job,
)
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.model.stored._handle import Activations
from inspect_lens.model.stored._places import Place
from inspect_lens.spec import LensRequest

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

__all__ = [
    "TAKERS",
    "Keep",
    "LensFields",
    "Mode",
    "StreamFields",
    "expect",
    "fetch_payloads",
    "file_of",
    "in_thread",
    "keep_payload",
    "missing_activations",
    "take",
    "take_fields",
    "write_small",
]


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
        return (
            "activations: asked for, and the response has none; the server runs without the "
            "inspect-lens plug-in (install inspect-lens in the server's environment, and see "
            "that VLLM_PLUGINS and INSPECT_LENS_DISABLE allow it)"
        )
    return (
        f"activations: num_choices={count}, and the server returned none for choice {index}; use "
        "num_choices=1 and call generate once per choice, or epochs"
    )


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
    def is_local_file(self) -> bool:
        """Whether they go to a file that any process of this machine can write."""
        if self.place is None or self.mode not in (None, "sidecar"):
            return False
        return is_local(self.place.root)


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
