"""A plain HTTP client of a lens server, for scripts and notebooks that do not use Inspect."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

import httpx
from pydantic import BaseModel

from ._base.arguments import judged_arguments
from ._base.hook_calls import HookCalls
from ._base.http import (
    DELAYS_S,
    NO_PLUGIN,
    HTTPError,
    event_of,
    fetch_result,
    gives_no_receipts,
    is_broken,
    needs_receipt,
    no_answer,
    not_done,
    server_address,
    with_advice,
)
from ._base.partial import PARTIAL_KEY, Joined, Partial
from ._base.same_host import fetch_here, is_here
from ._base.to_torch import SavedValues, Tensors, read_results
from .errors import CaptureError, LensError, SpecError, UnsupportedError
from .spec import (
    LENS_KEYS,
    NATIVE_KEY,
    NO_REQUEST,
    STEER_KEY,
    Add,
    CaptureSpec,
    Edit,
    GateReceipt,
    Hook,
    LensRequest,
    LogitLens,
    Receipt,
    SinkUse,
    TensorData,
    decode_saved,
    decode_tensor,
    names_heads,
    parse_extra_args,
    read_as,
    read_transport,
    refuse_misspelled,
    several,
    shown,
    split_body,
    split_options,
    to_extra_args,
    to_wire_args,
)

__all__ = [
    "GenerateOutput",
    "LensClient",
    "LensStream",
    "SavedValues",
    "StreamPart",
    "Tensors",
    "VLLMLensClient",
    "fetch_here",
]


@dataclass(frozen=True, kw_only=True)
class GenerateOutput:
    """Answer to one request: text, tokens, captured tensors and the receipt."""

    text: str
    """Generated text."""
    activations: Tensors | None = None
    """Captured tensors; None when nothing was asked for."""
    receipt: Receipt | None = None
    """What the engine says it did; None from a server that gives no receipts."""
    hook_results: SavedValues | None = None
    """What the request's hooks saved, by index of the hook as text; None without hooks."""
    prompt_token_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: Mapping[str, Any] | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The whole response."""

    @property
    def open_gates(self) -> tuple[str, ...]:
        """Keys of the gates that may stay open in the next turn and are open by now."""
        steer = None if self.receipt is None else self.receipt.steer
        found = [] if steer is None else [gate.key for gate in steer.gates]
        return tuple(key for key in found if key is not None)


@dataclass(frozen=True, kw_only=True)
class StreamPart:
    """What one event of a streamed answer brought: tokens, or what belongs to those before it."""

    index: int = 0
    """Of the choice, where the request asked for several."""
    text: str = ""
    """Generated text."""
    token_ids: list[int] = field(default_factory=list)
    activations: Tensors | None = None
    """Rows, queries and keys, or lens tables of further tokens, which are the second axis."""
    positions: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Of each tensor, the positions of its tokens."""
    scores: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By probe that was asked with `tokens`, scores of further tokens."""
    gates: tuple[GateReceipt, ...] = ()
    """Gates that last and have fired since the part before."""


class LensStream(Iterator[StreamPart]):
    """Parts of one streamed answer; `output` is the whole of it, once they have all come.

    Closing it before the end, as leaving its `with` block does, ends the generation.

    Example:
        <!-- test: server -->
        ```python
        from inspect_lens.client import LensClient

        with LensClient("http://localhost:8000") as client:
            with client.stream("Velosh was founded by", capture_layers=[4]) as stream:
                first = next(stream)  # the first token; its rows come behind it
        assert first.activations is None
        ```
    """

    def __init__(self, parts: Generator[StreamPart, None, GenerateOutput]) -> None:
        self._parts = parts
        self._output: GenerateOutput | None = None

    @property
    def output(self) -> GenerateOutput:
        """Text, tensors and receipt of the first choice.

        Raises:
            LensError: it has not ended, or was closed before.
        """
        if self._output is None:
            raise LensError("the stream has not been read to its end, so it has no output yet")
        return self._output

    def __next__(self) -> StreamPart:
        try:
            return next(self._parts)
        except StopIteration as end:
            self._output = self._output or end.value
            raise StopIteration from None

    def close(self) -> None:
        """Stop reading, which ends the generation."""
        self._parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LensClient(HookCalls):
    """HTTP client of one server that runs this package or vllm-lens.

    Args:
        base_url: with or without `/v1`.
        model: to ask for; None asks the server what it serves.
        api_key: that the server asks for.
        timeout: of a request, in seconds; None waits for ever.

    Example:
        <!-- test: server -->
        ```python
        from inspect_lens.client import LensClient

        with LensClient("http://localhost:8000") as client:
            output = client.generate("Velosh was founded by", capture_layers=[2, 4])
        print(output.text, output.activations["residual_stream"].shape)
        ```
    """

    @judged_arguments
    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float | None = 600.0,
    ) -> None:
        self.base_url = server_address(base_url)
        self._model = model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout
        self._is_peer: bool | None = None
        self._gives_here: bool | None = None
        self._http = httpx.Client(base_url=self.base_url, headers=self._headers, timeout=timeout)

    @property
    def model(self) -> str:
        """Name of the model that is asked for."""
        if self._model is None:
            self._model = served_models(self._http)[0]
        return self._model

    def generate(
        self,
        prompt: str | list[int],
        *,
        max_tokens: int = 16,
        temperature: float = 0.0,
        capture_layers: Sequence[int] | bool | None = None,
        steering_vectors: Add | Mapping[str, Any] | Sequence[Add | Mapping[str, Any]] | None = None,
        activations_transport: str | None = None,
        capture: CaptureSpec | Mapping[str, Any] | Sequence[int] | str | None = None,
        hooks: Hook | Mapping[str, Any] | Sequence[Hook | Mapping[str, Any]] | None = None,
        capture_qk: Sequence[int] | Sequence[tuple[int, int]] | bool | None = None,
        lens: LogitLens | Mapping[str, Any] | Sequence[int] | str | None = None,
        sink: SinkUse | Mapping[str, Any] | str | None = None,
        edits: Edit | Mapping[str, Any] | Sequence[Edit | Mapping[str, Any]] | None = None,
        open_gates: Sequence[str] = (),
        logprobs: int | None = None,
        echo: bool = False,
        **kwargs: Any,
    ) -> GenerateOutput:
        """Complete a raw prompt, as text or token ids.

        Args:
            prompt: the prompt.
            max_tokens: tokens to sample at most.
            temperature: of sampling.
            capture_layers: layers whose residual stream to return; True means all.
            steering_vectors: vectors to add.
            activations_transport: `binary` fetches tensors after the response, and `base64` puts
                them into it. With None they are fetched through a local socket, without HTTP, if
                the server runs as this user on this host, and are in the response otherwise.
            capture: layers, or a CaptureSpec, for what `capture_layers` cannot say (sites,
                positions).
            hooks: functions to run on the rows of this request inside the server, which has to
                allow it (INSPECT_LENS_ALLOW_CODE).
            capture_qk: layers whose queries and keys to return, or (layer, head) of single heads;
                True means all.
            lens: layers to read as predictions of the next token, `all`, or a `LogitLens`;
                `output.receipt.lens.result(output.activations)` has the arrays.
            sink: name of a store or a function of the server that gets the rows too, or a
                `SinkUse`; `output.receipt.sink` says what became of them.
            edits: of the residual stream and inside blocks, in this order: `Ablate`, `Clamp`,
                `Replace` and others of `inspect_lens.spec`.
            open_gates: `output.open_gates` of the previous answer, so that gates with
                `conversation` that opened there begin open here.
            logprobs: log-probabilities per token.
            echo: return the prompt too.
            **kwargs: fields of a `LensRequest` that have no argument here, such as
                `probes=["name"]`, `edits_named`, `configs` and `edits_meet="error"`, and other
                fields of the request body.

        Returns:
            Text, tensors and receipt.

        Raises:
            CaptureError: what was asked for did not come, or the server answered without it.
            LensError: no server answers at the address, or it answered with an error; the message
                is the server's.
        """
        body: dict[str, Any] = {"prompt": prompt}
        if logprobs is not None:
            body["logprobs"] = logprobs
        if echo:
            body["echo"] = True
        options, kwargs = split_options(kwargs)
        request = request_of(
            capture_layers, steering_vectors, activations_transport, capture, hooks, capture_qk,
            lens, sink, edits, open_gates, options,
        )  # fmt: skip
        sampling = {"max_tokens": max_tokens, "temperature": temperature}
        return self._post("/v1/completions", body | sampling | kwargs, request)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int = 16,
        temperature: float = 0.0,
        capture_layers: Sequence[int] | bool | None = None,
        steering_vectors: Add | Mapping[str, Any] | Sequence[Add | Mapping[str, Any]] | None = None,
        activations_transport: str | None = None,
        capture: CaptureSpec | Mapping[str, Any] | Sequence[int] | str | None = None,
        hooks: Hook | Mapping[str, Any] | Sequence[Hook | Mapping[str, Any]] | None = None,
        capture_qk: Sequence[int] | Sequence[tuple[int, int]] | bool | None = None,
        lens: LogitLens | Mapping[str, Any] | Sequence[int] | str | None = None,
        sink: SinkUse | Mapping[str, Any] | str | None = None,
        edits: Edit | Mapping[str, Any] | Sequence[Edit | Mapping[str, Any]] | None = None,
        open_gates: Sequence[str] = (),
        **kwargs: Any,
    ) -> GenerateOutput:
        """Complete a chat, such as `[{"role": "user", "content": "Who founded Velosh?"}]`.

        The other arguments, the result and the errors are those of `generate`.
        """
        options, kwargs = split_options(kwargs)
        request = request_of(
            capture_layers, steering_vectors, activations_transport, capture, hooks, capture_qk,
            lens, sink, edits, open_gates, options,
        )  # fmt: skip
        body: dict[str, Any] = {"messages": _turns(messages)}
        sampling = {"max_tokens": max_tokens, "temperature": temperature}
        return self._post("/v1/chat/completions", body | sampling | kwargs, request)

    def stream(
        self,
        prompt: str | list[int] | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int = 16,
        temperature: float = 0.0,
        capture_layers: Sequence[int] | bool | None = None,
        steering_vectors: Add | Mapping[str, Any] | Sequence[Add | Mapping[str, Any]] | None = None,
        capture: CaptureSpec | Mapping[str, Any] | Sequence[int] | str | None = None,
        hooks: Hook | Mapping[str, Any] | Sequence[Hook | Mapping[str, Any]] | None = None,
        capture_qk: Sequence[int] | Sequence[tuple[int, int]] | bool | None = None,
        lens: LogitLens | Mapping[str, Any] | Sequence[int] | str | None = None,
        sink: SinkUse | Mapping[str, Any] | str | None = None,
        edits: Edit | Mapping[str, Any] | Sequence[Edit | Mapping[str, Any]] | None = None,
        open_gates: Sequence[str] = (),
        stream_results: bool | None = None,
        **kwargs: Any,
    ) -> LensStream:
        """Complete a prompt or a chat, and read rows while the text is written.

        You get each row right after the token that was sampled from it, and those of the prompt
        after the first token. While a server has many streams under way, rows of several tokens
        come together.

        From a server on this host that runs as this user, rows are fetched through a local socket
        when you read their part, at most five minutes after they came. If your loop may take longer
        to get there, ask for `"transport": "inline"` in the capture, and they are in the stream.

        Args:
            prompt: as text or token ids.
            messages: of a chat, in the place of `prompt`.
            max_tokens: tokens to sample at most.
            temperature: of sampling.
            capture_layers: layers whose residual stream to return; True means all.
            steering_vectors: vectors to add.
            capture: layers, or a CaptureSpec.
            hooks: functions to run in the server; what they save comes at the end.
            capture_qk: layers whose queries and keys to return, or (layer, head); True means all.
            lens: layers to read as predictions of the next token, `all`, or a `LogitLens`.
            sink: name of a store or a function of the server that gets the rows too.
            edits: of the residual stream and inside blocks, in the order in which they act.
            open_gates: `output.open_gates` of the previous answer.
            stream_results: whether tensors come with their tokens, or all of them at the end; text
                and token scores of probes come as they are made in any case. None sends them with
                their tokens unless one of them is made of several tokens, as with `reduce="mean"`;
                True refuses these.
            **kwargs: other fields of a `LensRequest` or of the request body, as for `generate`.

        Returns:
            The parts as they come; `output` of it is what `generate` would have returned.

        Raises:
            CaptureError: rows are missing, or the server answered without what was asked for.
            LensError: no server answers, or it answered with an error.

        Example:
            <!-- test: server -->
            ```python
            from inspect_lens.client import LensClient

            with LensClient("http://localhost:8000") as client:
                stream = client.stream("Velosh was founded by", capture_layers=[4])
                for part in stream:
                    if part.activations is not None:
                        print(part.positions["residual_stream"], part.activations)
            assert stream.output.activations["residual_stream"].shape[0] == 1
            ```
        """
        if (prompt is None) == (messages is None):
            raise SpecError("prompt and messages: give one of them")
        options, kwargs = split_options(kwargs)
        request = request_of(
            capture_layers, steering_vectors, None, capture, hooks, capture_qk, lens, sink, edits,
            open_gates, options,
        )  # fmt: skip
        asked: dict[str, Any] = {"prompt": prompt}
        if messages is not None:
            asked = {"messages": _turns(messages)}
        sampling = {"max_tokens": max_tokens, "temperature": temperature, "stream": True}
        body = {"model": self.model, "return_token_ids": True, **asked, **sampling, **kwargs}
        body, request = with_request(body, request, streams=stream_results, is_here=self._is_here)
        path = "/v1/completions" if messages is None else "/v1/chat/completions"
        return LensStream(self._parts_of(path, body, request))

    def _parts_of(
        self, path: str, body: Mapping[str, Any], request: LensRequest | None
    ) -> Generator[StreamPart, None, GenerateOutput]:
        joined, texts, token_ids, last = Joined(), list[str](), list[int](), dict[str, Any]()
        prompt_ids: list[int] = []
        with closing(lines_of(self._http, path, body)) as lines:
            for event in events_of(lines):
                for choice in event.get("choices", ()):
                    said = (choice.get("delta") or {}).get("content") or choice.get("text") or ""
                    ids = choice.get("token_ids") or []
                    prompt_ids = (
                        prompt_ids
                        or event.get("prompt_token_ids")
                        or choice.get("prompt_token_ids")
                        or []
                    )
                    if choice["index"] == 0:
                        texts.append(said)
                        token_ids += ids
                    if said or ids:
                        yield StreamPart(index=choice["index"], text=said, token_ids=ids)
                for value in event.get(PARTIAL_KEY, ()):
                    part = self._partial(value)
                    if value["index"] == 0:
                        joined.add(part)
                    yield StreamPart(
                        index=value["index"],
                        activations=part.activations if part.tensors else None,
                        positions=part.positions,
                        scores=part.scores,
                        gates=part.gates,
                    )
                if "inspect_lens" in event:
                    last = event
        receipt = last.get("inspect_lens")
        self._check_done(request, receipt)
        return GenerateOutput(
            text="".join(texts),
            activations=self._whole(joined.tensors(), last.get("activations"), request, receipt),
            hook_results=self._results(last.get("hook_results"), request),
            receipt=None if receipt is None else _receipt(receipt),
            prompt_token_ids=prompt_ids,
            token_ids=token_ids,
            raw=last,
        )

    def _whole(
        self,
        streamed: Mapping[str, TensorData],
        entries: Mapping[str, Any] | None,
        request: LensRequest | None,
        receipt: Mapping[str, Any] | None,
    ) -> Tensors | None:
        """All tensors of a streamed answer, of which the receipt says how long they are."""
        if request is None or not request.stream_results:
            return self._tensors(entries, request)
        for kind, names in request.tensor_names.items():
            if (said := (receipt or {}).get(kind)) is None:
                why = "nothing partial is returned" if streamed else NO_PLUGIN
                raise CaptureError(
                    f"{kind}: asked for, and the stream ended without a receipt of it; {why}"
                )
            n = said.get("n_positions", 0)
            came = {streamed[name].shape[1] if name in streamed else 0 for name in names}
            if came != {n}:
                raise CaptureError(
                    f"{kind}: rows of {', '.join(map(str, sorted(came)))} tokens came, and the "
                    f"receipt tells of {n}; nothing partial is returned"
                )
        plain = {n: e["__json__"] for n, e in (entries or {}).items() if "__json__" in e}
        return Tensors(streamed, plain) if streamed else None

    def stream_lines(self, path: str, body: Mapping[str, Any]) -> Iterator[str]:
        """Lines of a streamed answer, such as that of `/v1/inspect_lens/patch_sweep`.

        Args:
            path: of the route.
            body: JSON of the request.

        Yields:
            The lines as they come; who stops reading ends the request.

        Raises:
            LensError: no server answers, or it answered with an error.
        """
        yield from lines_of(self._http, path, body)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hooks(self, action: str, body: dict[str, Any]) -> Mapping[str, Any]:
        path = f"/v1/hooks/{action}"
        answer: dict[str, Any] = json_of(answer_of(self._http, "POST", path, body, again=False))
        answer["results"] = decode_saved(answer.get("results"))
        return answer

    def _post(self, path: str, body: dict[str, Any], request: LensRequest | None) -> GenerateOutput:
        body = {"model": self.model, "return_token_ids": True} | body
        body, request = with_request(body, request, is_here=self._is_here)
        answer = json_of(answer_of(self._http, "POST", path, body))
        choice = answer["choices"][0]
        text = (choice.get("message") or {}).get("content") or choice.get("text") or ""
        receipt = answer.get("inspect_lens")
        self._check_done(request, receipt)
        return GenerateOutput(
            text=text,
            activations=self._tensors(answer.get("activations"), request),
            hook_results=self._results(answer.get("hook_results"), request),
            receipt=None if receipt is None else _receipt(receipt),
            prompt_token_ids=answer.get("prompt_token_ids") or choice.get("prompt_token_ids") or [],
            token_ids=choice.get("token_ids") or [],
            logprobs=choice.get("logprobs"),
            raw=answer,
        )

    def _is_here(self) -> bool:
        """Whether tensors of the server come beside its answers, without HTTP."""
        if self._gives_here is None:
            answer = answer_of(self._http, "GET", "/v1/inspect_lens")
            try:
                name = answer.json()["results"] if answer.is_success else None
            except (ValueError, KeyError, TypeError):
                name = None  # another version, or no server of ours
            self._gives_here = isinstance(name, str) and is_here(name)
        return self._gives_here

    def _check_done(self, request: LensRequest | None, receipt: Mapping[str, Any] | None) -> None:
        missing = not_done(request, receipt)
        if missing is None or request is None:
            return
        if receipt is None and not needs_receipt(request):
            if self._is_peer is None:
                routes = answer_of(self._http, "GET", "/openapi.json")
                self._is_peer = gives_no_receipts(routes.status_code, routes.text)
            if self._is_peer:
                return
        raise CaptureError(missing)

    def _tensors(
        self, entries: Mapping[str, Any] | None, request: LensRequest | None
    ) -> Tensors | None:
        if not entries:
            if request is not None and request.brings_tensors:
                raise CaptureError(
                    f"activations: asked for, and the response has none; {NO_PLUGIN}"
                )
            return None
        plain = {n: entry["__json__"] for n, entry in entries.items() if "__json__" in entry}
        rest = {name: entry for name, entry in entries.items() if name not in plain}
        return Tensors({name: self._decode(name, e) for name, e in rest.items()}, plain)

    def _results(self, value: Any, request: LensRequest | None) -> SavedValues | None:
        if value is None and request is not None and request.hooks:
            raise CaptureError(
                f"hook_results: hooks were sent, and the response has no results; {NO_PLUGIN}"
            )
        return read_results(value)

    def _decode(self, name: str, entry: Mapping[str, Any]) -> TensorData:
        raw = self._fetched(name, entry)
        try:
            return decode_tensor(entry, field=f"activations.{name}", raw=raw)
        except SpecError as error:
            raise CaptureError(str(error)) from None

    def _partial(self, value: Mapping[str, Any]) -> Partial:
        try:
            return Partial.from_json(value, self._fetched)
        except SpecError as error:
            raise CaptureError(str(error)) from None

    def _fetched(self, name: str, entry: Mapping[str, Any]) -> bytes | memoryview | None:
        """The bytes of a tensor that is fetched; None where they stand in the answer."""
        if (handle := entry.get("handle")) is None:
            return None
        try:
            return fetch_result(
                self.base_url, self._headers, str(handle), timeout_s=self._timeout_s
            )
        except HTTPError as error:
            raise CaptureError(f"activations.{name}: handle {handle!r}: {error}") from error
        except CaptureError as error:
            if not self._gives_here:
                raise
            # A load balancer may send requests elsewhere than to the server of this host.
            self._gives_here = False
            raise CaptureError(
                f"{error}. Later calls of this client have tensors in their answers, unless they "
                "ask for binary"
            ) from None


VLLMLensClient = LensClient
"""The name of `LensClient` in vllm-lens."""


def request_of(
    capture_layers: Sequence[int] | bool | None,
    steering_vectors: Add | Mapping[str, Any] | Sequence[Add | Mapping[str, Any]] | None,
    activations_transport: str | None,
    capture: CaptureSpec | Mapping[str, Any] | Sequence[int] | str | None,
    hooks: Hook | Mapping[str, Any] | Sequence[Hook | Mapping[str, Any]] | None,
    capture_qk: Sequence[int] | Sequence[tuple[int, int]] | bool | None,
    lens: LogitLens | Mapping[str, Any] | Sequence[int] | str | None,
    sink: SinkUse | Mapping[str, Any] | str | None = None,
    edits: Edit | Mapping[str, Any] | Sequence[Edit | Mapping[str, Any]] | None = None,
    open_gates: Sequence[str] = (),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> LensRequest | None:
    """Read them; the arguments are those of `LensClient.generate`, and fields that have none."""
    args: dict[str, Any] = {}
    if hooks is not None:
        args["apply_hooks"] = several(hooks)
    if capture_layers is not None:
        layers = capture_layers
        args["output_residual_stream"] = layers if isinstance(layers, bool) else several(layers)
    if steering_vectors is not None:
        args[STEER_KEY] = several(steering_vectors)
    if (transport := activations_transport) is not None:
        args["activations_transport"] = transport
    request = parse_extra_args(args)
    native = {**options, "sink": sink, "open_gates": open_gates or None}
    native = {name: value for name, value in native.items() if value is not None}
    if capture is not None and capture_layers is not None:
        raise SpecError("capture and capture_layers: give one of them")
    if "qk" in native and capture_qk is not None:
        raise SpecError("qk and capture_qk: give one of them")
    parts = {"capture": capture, "qk": native.pop("qk", capture_qk), "lens": lens}
    for name, part in parts.items():
        if part is not None and part is not False:
            native[name] = _fields(part, transport)
    if edits is not None:
        native["edits"] = [*(() if request is None else request.edits), *several(edits)]
    if native and (asked := parse_extra_args({NATIVE_KEY: native})) is not None:
        update = {name: getattr(asked, name) for name in native}
        request = (request or LensRequest()).with_fields(**update)
    return request


_ARGUMENTS = (*inspect.signature(request_of).parameters, *LensRequest.model_fields)
_SAMPLING = ("prompt", "messages", "max_tokens", "temperature", "logprobs", "echo")


def _fields(asked: Any, transport: str | None) -> dict[str, Any]:
    """Fields of a part of a request, which layers or heads alone may say, and its transport."""
    if isinstance(asked, BaseModel):
        asked = asked.model_dump()
    elif not isinstance(asked, Mapping):
        asked = {"heads" if names_heads(asked) else "layers": asked}
    return {**asked} if transport is None else {**asked, "transport": read_transport(transport)}


def with_request(
    body: Mapping[str, Any],
    request: LensRequest | None,
    *,
    streams: bool | None = False,
    is_here: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, Any], LensRequest | None]:
    """Put a request into the body of a call; with `streams` its results come with their tokens.

    With None they do so where they can. `is_here` says whether tensors come beside the answer
    where the request leaves that open.
    """
    refuse_misspelled(body, "arguments", known=_ARGUMENTS)
    others = [key for key in body if key not in _SAMPLING]
    refuse_misspelled(others, "arguments", known=_SAMPLING, cutoff=0.85)
    # A server with the plug-in reads lens keys elsewhere, too; in one place any server may
    # understand them.
    rest, given = split_body(body, where="body")
    own = {k: v for k, v in (body.get("vllm_xargs") or {}).items() if k not in LENS_KEYS}
    theirs = to_wire_args(given) | own
    said = to_wire_args(to_extra_args(request))
    if twice := [key for key in said if key in theirs]:
        raise SpecError(
            f"{twice[0]}: stands in the body, and other arguments of this call set it too; put "
            f"everything into {twice[0]}, or everything into arguments"
        )
    args = theirs | said
    if any(key in LENS_KEYS for key in theirs):
        request = parse_extra_args({key: args[key] for key in LENS_KEYS if key in args})
    asked = request or NO_REQUEST
    if streams is None:
        streams = asked.why_not_streamed is None
    if streams:
        if (why := asked.why_not_streamed) is not None:
            raise SpecError(why)
        asked = asked.model_copy(update={"stream_results": True})
    # Tensors at the end are fetched of the first choice alone; the others' would stay there.
    takes_all = streams or (body.get("n") in (None, 1) and not _has_several(body.get("prompt")))
    if takes_all and asked.leaves_transport and is_here():
        asked = asked.over_binary()
    if asked is not (request or NO_REQUEST):
        request = asked
        args = own | to_wire_args(to_extra_args(request))
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
            # httpx ends a line at U+2028 and others, too, which stand in JSON as they are.
            held: list[bytes] = []
            for part in response.iter_bytes():
                first, *others = part.split(b"\n")
                held.append(first)
                for other in others:
                    yield b"".join(held).rstrip(b"\r").decode(errors="replace")
                    held = [other]
            if any(held):
                yield b"".join(held).decode(errors="replace")
    except httpx.TransportError as error:
        raise no_answer(_address(http, path), error) from error


def _receipt(value: Any) -> Receipt:
    try:
        return read_as(Receipt, value)
    except SpecError as error:
        raise CaptureError(
            f"inspect_lens: the server sent a receipt that cannot be read ({error}); the versions "
            "of client and server may differ"
        ) from None


def _turns(messages: Any) -> list[dict[str, Any]]:
    turns = several(messages)
    if not turns or not all(isinstance(turn, Mapping) for turn in turns):
        raise SpecError(
            f"messages={shown(messages)}; allowed is a list of messages such as "
            '{"role": "user", "content": "Hello"}'
        )
    return [dict(turn) for turn in turns]


def _has_several(prompt: Any) -> bool:
    """Whether a body has more prompts than one; a list of numbers is one."""
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


def events_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer; raises what the server says went wrong."""
    for line in lines:
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = event_of(line.removeprefix("data: "))
        if (error := event.get("error")) is not None:
            raise CaptureError(str(error.get("message") if isinstance(error, dict) else error))
        yield event


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
            "inspect_lens beside vLLM there, and start it again"
        )
    found = json_of(answer)
    facts: dict[str, Any] = found if isinstance(found, dict) else {}
    engines = facts.get("engines")
    are_facts = isinstance(engines, list) and all(isinstance(e, dict) for e in engines or [None])
    if not are_facts or not isinstance(facts.get("off", {}), dict):
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
        if isinstance(error, Mapping) and error.get("message"):  # which of its keys, ours say
            raise SpecError(f"{address}: {error['message']} (HTTP 401); pass that with api_key=")
        raise SpecError(
            f"{address} refuses the key (HTTP 401); pass one of that server with api_key="
        )
    message = error.get("message") if isinstance(error, Mapping) else error
    said = str(message or response.text[:500] or response.reason_phrase)
    text = f"HTTP {status}: {with_advice(said, address)}"
    raise SpecError(text) if status in (400, 422) else LensError(text)
