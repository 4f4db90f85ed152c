"""The keyword arguments of `LensClient` as a request."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import httpx

from ._base.http import DELAYS_S, is_broken, no_answer, with_advice
from .errors import LensError, SpecError, UnsupportedError
from .spec import (
    LENS_KEYS,
    NATIVE_KEY,
    STEER_KEY,
    Add,
    CaptureSpec,
    Edit,
    Hook,
    LensRequest,
    LogitLens,
    SinkUse,
    parse_extra_args,
    refuse_misspelled,
    split_body,
    to_extra_args,
    to_wire_args,
)

__all__ = [
    "answer_of",
    "json_of",
    "lens_facts",
    "lines_of",
    "request_of",
    "served_models",
    "with_request",
]

_ARGUMENTS = (
    "capture_layers", "steering_vectors", "activations_transport", "capture", "hooks",
    "capture_qk", "lens", "sink", "edits",
)  # fmt: skip
"""Of `LensClient.generate`, for the lens."""


def request_of(
    capture_layers: Sequence[int] | bool | None,
    steering_vectors: Sequence[Add | Mapping[str, Any]] | None,
    transport: str | None,
    capture: CaptureSpec | Mapping[str, Any] | None,
    hooks: Sequence[Hook | Mapping[str, Any]] | None,
    capture_qk: Sequence[int] | bool | None,
    lens: LogitLens | Mapping[str, Any] | Sequence[int] | str | None,
    sink: SinkUse | Mapping[str, Any] | str | None = None,
    edits: Sequence[Edit | Mapping[str, Any]] | None = None,
) -> LensRequest | None:
    """Read them; the arguments are those of `LensClient.generate`."""
    args: dict[str, Any] = {}
    if hooks is not None:
        args["apply_hooks"] = list(hooks)
    if capture_qk is not None:
        args["output_qk"] = capture_qk if isinstance(capture_qk, bool) else list(capture_qk)
    if capture_layers is not None:
        layers = capture_layers
        args["output_residual_stream"] = layers if isinstance(layers, bool) else list(layers)
    if steering_vectors is not None:
        args[STEER_KEY] = list(steering_vectors)
    if transport is not None:
        args["activations_transport"] = transport
    request = parse_extra_args(args)
    native: dict[str, Any] = {}
    if capture is not None:
        if capture_layers is not None:
            raise SpecError("capture and capture_layers: give one of them")
        native["capture"] = _fields(capture, transport)
    if lens is not None:
        named = lens if isinstance(lens, LogitLens | Mapping) else {"layers": lens}
        native["lens"] = _fields(named, transport)
    if edits is not None:
        native["edits"] = [*(() if request is None else request.edits), *edits]
    if sink is not None:
        native["sink"] = sink.model_dump() if isinstance(sink, SinkUse) else sink
    if native and (asked := parse_extra_args({NATIVE_KEY: native})) is not None:
        update = {name: getattr(asked, name) for name in native}
        request = (request or LensRequest()).model_copy(update=update)
    return request


def _fields(
    asked: CaptureSpec | LogitLens | Mapping[str, Any], transport: str | None
) -> dict[str, Any]:
    fields = dict(asked) if isinstance(asked, Mapping) else asked.model_dump()
    return fields if transport is None else fields | {"transport": transport}


def with_request(
    body: Mapping[str, Any], request: LensRequest | None
) -> tuple[dict[str, Any], LensRequest | None]:
    """Put a request into the body of a call."""
    refuse_misspelled(body, "arguments", known=_ARGUMENTS)
    # A server with the plug-in reads lens keys elsewhere, too; in one place any server may
    # understand them.
    rest, given = split_body(body, where="body")
    own = {k: v for k, v in (body.get("vllm_xargs") or {}).items() if k not in LENS_KEYS}
    theirs = to_wire_args(given) | own
    args = theirs | to_wire_args(to_extra_args(request))
    if any(key in LENS_KEYS for key in theirs):
        request = parse_extra_args({key: args[key] for key in LENS_KEYS if key in args})
    return ({**rest, "vllm_xargs": args} if args else rest), request


def answer_of(
    http: httpx.Client, method: str, path: str, body: Any = None, *, again: bool = True
) -> httpx.Response:
    """Send a request, again where the connection broke and that does no harm."""
    for delay in (*(DELAYS_S if again else ()), None):
        try:
            return http.request(method, path, json=body)
        except httpx.TransportError as error:
            if delay is None or not is_broken(error):
                raise no_answer(_address(http, path), error) from error
        time.sleep(delay)
    raise AssertionError("unreachable")


def lines_of(http: httpx.Client, path: str, body: Any) -> Generator[str]:
    """Post a request and give the lines of its answer as they come."""
    try:
        with http.stream("POST", path, json=body) as response:
            if not response.is_success:
                response.read()
                json_of(response)  # raises
            yield from response.iter_lines()
    except httpx.TransportError as error:
        raise no_answer(_address(http, path), error) from error


def _address(http: httpx.Client, path: str) -> str:
    return str(http.base_url.join(path))


def served_models(http: httpx.Client) -> list[str]:
    """Names of the models that a server has, the first its default."""
    found = json_of(answer_of(http, "GET", "/v1/models"))
    try:
        names = [str(item["id"]) for item in found["data"]]
    except (KeyError, TypeError):
        names = []
    if not names:
        raise LensError(f"{http.base_url}: names no model at /v1/models; it is no vLLM server")
    return names


def lens_facts(http: httpx.Client) -> dict[str, Any]:
    """What a server says of its engines; raises where it does not serve the lens, or no one."""
    answer = answer_of(http, "GET", "/v1/inspect_lens")
    base = str(http.base_url).rstrip("/")
    if answer.status_code == httpx.codes.NOT_FOUND:
        raise UnsupportedError(
            f"{base}: serves models without inspect-lens, or without its HTTP routes; install "
            "inspect-lens[vllm] beside vLLM there, and start it again"
        )
    found = json_of(answer)
    facts: dict[str, Any] = found if isinstance(found, dict) else {}
    engines = facts.get("engines")
    if not isinstance(engines, list) or not all(isinstance(e, dict) for e in engines or [None]):
        raise LensError(f"{base}: its answer at /v1/inspect_lens names no engine; look at its log")
    return facts


def json_of(response: httpx.Response) -> Any:
    """The JSON of a good answer; the server's words as an error otherwise."""
    address = f"{response.url.scheme}://{response.url.netloc.decode()}"
    try:
        content = response.json()
    except ValueError:
        content = None
    error = content.get("error") if isinstance(content, dict) else None
    if response.is_success and error is None:
        if content is None:
            kind = response.headers.get("content-type", "no content type")
            raise LensError(
                f"{address}: answers with {kind} in the place of JSON, so it is no vLLM server; "
                "pass the address of one as base_url="
            )
        return content
    status = response.status_code
    if status == httpx.codes.UNAUTHORIZED:
        raise SpecError(
            f"{address} refuses the key (HTTP 401); pass one of that server with api_key="
        )
    message = error.get("message") if isinstance(error, Mapping) else error
    said = str(message or response.text[:500] or response.reason_phrase)
    text = f"HTTP {status}: {with_advice(said, address)}"
    raise SpecError(text) if status in (400, 422) else LensError(text)
