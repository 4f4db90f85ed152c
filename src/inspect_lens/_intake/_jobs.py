"""One job: the activations of one choice, from a server's answer to a file; and its JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote

from pydantic_core import to_json

from inspect_lens._base.http import fetch_bytes
from inspect_lens.errors import CaptureError
from inspect_lens.spec import CaptureSpec, LensRequest, LogitLens, QKSpec, Reduce

from ._decode import ChoiceFields, fetch_payload
from ._files import stamp_of, write_file
from ._payload import Payload, encode_file

PATH = "/v1/activations/"


class Source(NamedTuple):
    """Where the bytes behind handles are."""

    root: str
    """Address of the server, without `/v1`."""
    headers: Mapping[str, str]
    timeout_s: float


class Stored(NamedTuple):
    """What is known of a payload once its bytes are elsewhere."""

    sha256: str
    tensors: Mapping[str, tuple[tuple[int, ...], str, tuple[int, ...]]]
    """Shape, dtype and layers by name."""
    n_prompt: int
    n_completion: int
    reduce: Reduce
    steered: bool
    stamp: str | None = None
    """Of the file, from `stamp_of`."""

    @classmethod
    def of(cls, payload: Payload, stamp: str | None = None) -> Stored:
        """The facts of a payload."""
        capture = payload.receipt.capture if payload.receipt else None
        return cls(
            sha256=payload.sha256,
            tensors={
                name: (tensor.shape, tensor.dtype, payload.layers[name])
                for name, tensor in payload.tensors.items()
            },
            n_prompt=len(payload.prompt_token_ids),
            n_completion=len(payload.token_ids),
            reduce=capture.reduce if capture else "none",
            steered=payload.receipt is not None and payload.receipt.steer is not None,
            stamp=stamp,
        )


def fetch_from(source: Source, handle: str) -> bytes:
    """Bytes behind a handle, in the calling thread."""
    url = f"{source.root}{PATH}{quote(handle, safe='')}"
    status, data = fetch_bytes(url, source.headers, timeout_s=source.timeout_s)
    return fetched(handle, status, data)


def fetched(handle: str, status: int, data: bytes) -> bytes:
    """The bytes of an answer."""
    if status != 200:
        raise CaptureError(
            f"activations: handle {handle!r} answered HTTP {status}; it expired, was evicted, "
            "or is out of reach behind a gateway; use activations_transport='base64'"
        )
    return data


def store(payload: Payload, path: str) -> Stored:
    """Write the file of a payload."""
    write_file(path, encode_file(payload))
    return Stored.of(payload, stamp_of(path))


def write_job(
    choice: ChoiceFields,
    prompt_token_ids: list[int],
    request: LensRequest,
    *,
    source: Source,
    origin: Mapping[str, Any],
    path: str,
) -> bytes:
    """Spell a job, for `fetch_job` in another process."""
    job = {
        "activations": choice.activations,
        "receipt": choice.receipt,
        "token_ids": choice.token_ids,
        "prompt_token_ids": prompt_token_ids,
        "source": source,
        "origin": origin,
        "path": path,
    }
    asked = _asked(request.capture, request.qk, request.lens)
    return b'%s,"asked":%s' % (to_json(job)[:-1], asked)


def file_job(content: bytes, path: str) -> bytes:
    """Spell a job that writes a small file, whose contents are here already."""
    return b'{"content":"%s","path":%s' % (base64.b64encode(content), to_json(path))


def content_of(job: Mapping[str, Any]) -> bytes | None:
    """The contents that a job from `file_job` brings; None for another job."""
    given = job.get("content")
    return None if given is None else base64.b64decode(given)


@lru_cache(maxsize=64)
def _asked(capture: CaptureSpec | None, qk: QKSpec | None, lens: LogitLens | None) -> bytes:
    """The part of a request that a result is checked against; alike for all calls of an eval."""
    asked = LensRequest(capture=capture, qk=qk, lens=lens)
    return asked.model_dump_json(exclude_none=True).encode()


@lru_cache(maxsize=64)
def _request(asked: str) -> LensRequest:
    return LensRequest.model_validate_json(asked)


def fetch_job(job: Mapping[str, Any]) -> Payload:
    """Fetch, decode and check what a job is about."""
    source = Source(*job["source"])
    choice = ChoiceFields(
        activations=job["activations"], token_ids=job["token_ids"], receipt=job["receipt"]
    )
    request = _request(json.dumps(job["asked"]))
    payload = fetch_payload(
        choice, job["prompt_token_ids"], request, lambda handle: fetch_from(source, handle)
    )
    return payload.with_origin(job["origin"])
