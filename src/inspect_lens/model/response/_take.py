"""Activations of a response, taken in: fetched, written or remembered, and a handle for each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import anyio.to_thread
from anyio import CapacityLimiter
from anyio.lowlevel import RunVar

from inspect_lens._intake import (
    BESIDE,
    FetchBytes,
    Lost,
    Payload,
    Source,
    Stored,
    encode_file,
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

from ._response import LensFields, fetch_payloads, missing_activations

__all__ = [
    "TAKERS",
    "Keep",
    "Mode",
    "expect",
    "file_of",
    "in_thread",
    "keep_payload",
    "take",
    "write_small",
]

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
    """Take the activations of each choice in.

    Args:
        fields: of the response; encoded tensors are taken out of it.
        request: that was sent; it asked for a capture.
        named: of each choice, the name of its file and where it is from.
        keep: where they go.
        fetch: gets the bytes behind a handle, in a thread.
        source: of those bytes, for another process.

    Returns:
        A handle per choice.

    Raises:
        CaptureError: something that was asked for did not come, does not fit the tokens, or could
            not be written.
        SpecError: a file is wanted and there is no place for one.
    """
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
    """Write small files whose contents are here, without holding the event loop.

    Args:
        files: contents by address.
        keep: where they go.

    Raises:
        CaptureError: a file could not be written.
    """
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
    """Relative and absolute address of a file.

    Args:
        keep: with a place.
        name: of which 12 characters are used.
        kind: of file, such as `.scores`; none for activations.

    Returns:
        Both.

    Raises:
        SpecError: there is no place for a file.
    """
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
        uri, path = file_of(keep, name)
        write_file(path, encode_file(payload))
        handle = Activations.of(payload, uri=uri, root=keep.place.root if keep.place else None)
    else:
        handle = Activations.of(payload)
    if mode != "drop":
        handle.remember(payload)
    return handle
