"""In the API server: what a body asks of the lens, read once, and its answer with results.

vLLM would have a body read where the parameters of sampling are made, on the event loop that serves
everybody, and makes 1 of a `true` in `vllm_xargs` before. Large bodies are read in a thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from pydantic_core import from_json

from inspect_lens._base.http import json_bytes
from inspect_lens._base.partial import PARTIAL_KEY, Partial, listed
from inspect_lens._engine.protocol.processes import contained, ends_process
from inspect_lens._vllm.compat.api_server import list_models, sampling_fields, shown_key
from inspect_lens._vllm.compat.features import (
    FEATURES,
    fault_of,
    is_off,
    not_served,
    pass_over,
    require,
)
from inspect_lens._vllm.telemetry import (
    CALLER,
    Asked,
    Caller,
    delivered,
    failed,
    remember,
    stored,
)
from inspect_lens.errors import CapacityError, LensError, SpecError, UnsupportedError
from inspect_lens.spec import (
    ENVELOPE_KEY,
    LENS_KEYS,
    NATIVE_KEY,
    NO_REQUEST,
    OWN_WORDS,
    PLACES,
    Cache,
    EngineFacts,
    LensRequest,
    PatternBudget,
    ServerConfig,
    TensorData,
    TensorLimits,
    check_size,
    encode_saved,
    judging,
    parse_extra_args,
    refuse_misspelled,
    refuse_own_words,
    split_body,
)

from .payloads import PayloadStore, handle_entries, inline_entries
from .refusals import Message, Send, as_utf8, refuse

logger = logging.getLogger("vllm.inspect_lens")

payloads = PayloadStore(on_change=stored)
"""The store of this process; a handle is valid at the process that made it."""


Pieces = list[bytes | str]
"""Of JSON. A text is base64 of rows, which may be hundreds of megabytes: it is neither looked
through nor copied as a whole in the event loop of all."""


class Part(NamedTuple):
    """What has come of a choice with one output."""

    choice: int
    """Its index."""
    pieces: list[list[bytes]]
    """Of a `Partial`, as JSON; none where the output carried nothing."""


@dataclass
class Body:
    """A body that was read: what it asks of the lens, and the results of its choices."""

    request: LensRequest | None = None
    kind: str = ""
    """What events of its stream are."""
    takes_parts: bool = True
    """Whether its stream has events for what comes before the end."""
    others: dict[str, Any] = field(default_factory=dict)
    """Extra arguments that are not ours, wherever in the body they stand."""
    patterns: PatternBudget = field(default_factory=PatternBudget)
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    """As JSON, by index of the choice."""
    parts: list[Part] = field(default_factory=list)
    """What has come and no event of the stream has carried yet, by output."""
    handles: list[str] = field(default_factory=list)
    """By which its results are fetched, until all of the answer has been sent."""
    is_over: bool = False
    """Whether nobody waits for the answer any more."""
    n_choices: int = 0
    n_prompts: int = 0
    span: Any = None
    """Of OpenTelemetry."""
    error: BaseException | None = None
    """Why a prompt has no results."""

    @property
    def is_left_out(self) -> bool:
        """Whether it leaves out what acts on all requests."""
        return self.request is not None and self.request.server is False

    def begin(self, params: Any) -> int:
        """Have a prompt's parameters ask what the body asks; index of its first choice.

        vLLM asks for the prompts of a body one after the other.
        """
        given = {**(params.extra_args or {}), **self.others}
        args = {key: value for key, value in given.items() if key not in LENS_KEYS}
        if self.request is not None:
            args[NATIVE_KEY] = self.request
        params.extra_args = args or None
        first, self.n_choices = self.n_choices, self.n_choices + params.n
        self.n_prompts += 1
        return first

    def take(self, output: Any, first: int) -> None:
        """Take what is ours from an output of a prompt."""
        for completion in output.outputs:
            index = first + completion.index
            pieces = completion.__dict__.pop("inspect_lens_partial_json", [])
            # Of several prompts each output has its part, which finds its event by its number.
            is_counted = self.n_prompts > 1 and hasattr(completion, "inspect_lens_running")
            if self.takes_parts and (pieces or is_counted):
                self.parts.append(Part(index, pieces))
            if result := getattr(completion, "inspect_lens_json", None):
                self.results[index] = result
                remember(self.span, result)

    def forget(self) -> None:
        """Let go of everything: tasks that outlive the request have its context."""
        self.is_over = True
        if self.handles:  # it was broken off, or failed, and with it go rows that were not fetched
            # They stay in the list, to which a thread may append still, and then discards all.
            payloads.discard(tuple(self.handles))
        self.request, self.patterns, self.others = None, PatternBudget(), {}
        self.results, self.parts = {}, []
        self.span = self.error = None


SERVED: ContextVar[Body | None] = ContextVar("inspect_lens_body", default=None)
"""The body whose request is served."""


TIER_HEADER = b"x-inspect-lens-server"
"""Of answers of a server that does something to all requests, whether they have a receipt or not:
the hash of what it does."""


_READS_MODEL: ContextVar[bool] = ContextVar("inspect_lens_reads_model", default=False)
"""Whether a request may name a configuration as its model: its body was read, or it generates
nothing."""


def _check_model(name: str) -> None:
    """Refuse a configuration's name as a model where its request would be a plain one."""
    if not _READS_MODEL.get():
        raise UnsupportedError(
            f"model={name!r}: chooses a configuration, which this route would pass over; name the "
            "model itself, or use /v1/chat/completions, /v1/completions, /v1/responses, "
            "/v1/messages or /inference/v1/generate"
        )


def with_header(send: Send, sha256: str) -> Send:
    """Send an answer that says that something acts on all requests; refusals do not."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] < 300:
            header = (TIER_HEADER, sha256.encode())
            message = {**message, "headers": [*message.get("headers", ()), header]}
        await send(message)

    return sending


class Answer:
    """What an application sends in answer to a body, with its results."""

    def __init__(self, send: Send, body: Body) -> None:
        self._send, self._body = send, body
        self._start: Message | None = None
        """The head of an answer that is sent when its length is known."""
        self._parts: list[bytes] = []
        self._is_stream = False
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if self._is_stream and message["type"] == "http.response.body":
            await self._send_event(message)
            return
        if message["type"] == "http.response.start":
            kind = b"".join(
                v for name, v in message.get("headers", ()) if name.lower() == b"content-type"
            )
            self._is_stream, self.status = b"event-stream" in kind, message["status"]
            if message["status"] == 200 and b"json" in kind:
                self._start = message
                return
        elif message["type"] == "http.response.body" and self._start is not None:
            self._parts.append(message.get("body", b""))
            if not message.get("more_body"):
                await self._send_whole(self._start)
            return
        await self._send(message)

    async def _send_whole(self, start: Message) -> None:
        data = b"".join(self._parts)
        try:
            pieces = with_results(data, self._body.results, self._body.n_choices)
        except BaseException as error:
            if ends_process(error):
                raise
            await refuse(fault_of(error), self._send)
            return
        others = [h for h in start.get("headers", ()) if h[0].lower() != b"content-length"]
        headers = [*others, (b"content-length", b"%d" % sum(map(len, pieces)))]
        await self._send({**start, "headers": headers})
        await self._send_pieces(pieces, {"type": "http.response.body"})
        self._body.handles.clear()

    async def _send_pieces(self, pieces: Pieces, message: Message) -> None:
        """Send a body, in so many messages that other responses have their turn in between."""
        if (left := sum(map(len, pieces))) <= _EVENT_BYTES:
            await self._send({**message, "body": b"".join(map(_as_bytes, pieces))})
            return
        for part in _written(pieces):
            left -= len(part)
            more = {"more_body": True} if left else {}
            await self._send({**message, "body": part, **more})
            if left:
                await asyncio.sleep(0)

    async def _send_event(self, message: Message) -> None:
        """Send what is ready behind its tokens, and the results before the stream ends."""
        # In one message: each costs the event loop as much as a token's.
        body, data = self._body, message.get("body", b"")
        is_end = data.startswith(b"data: [DONE]")
        if not (is_end or body.parts):
            await self._send(message)
            return
        texts: Pieces = [] if is_end else [data]
        for i, event in enumerate(_events(self._ready(data, is_end=is_end), body.kind)):
            if i:
                await self._send_pieces(texts, {**message, "more_body": True})
                await asyncio.sleep(0)  # other responses have their turn
                texts = []
            texts += event
        if is_end and body.results:
            texts += b"data: ", *_last_event(body.results, body.kind), b"\n\n"
        if is_end:
            texts.append(data)
        await self._send_pieces(texts, message)
        if is_end:
            body.handles.clear()

    def _ready(self, data: bytes, *, is_end: bool) -> list[Part]:
        """Take the parts that come with some text of vLLM's."""
        body = self._body
        # A completion of one choice has no event but of its tokens, while there are some.
        is_plain = body.n_choices == 1 and body.kind == "text_completion"
        if not body.parts or is_end or is_plain:
            ready, body.parts = body.parts, []
            return ready
        sent = _choices_in(data)
        ready = [p for p in body.parts if sent is None or p.choice in sent]
        if sent is not None and body.n_prompts > 1:
            # vLLM asks several prompts ahead of what it has sent: each one's first.
            ready = list({p.choice: p for p in reversed(ready)}.values())
        body.parts = [p for p in body.parts if not any(p is one for one in ready)]
        return ready


def _events(parts: list[Part], kind: str) -> Iterator[list[bytes]]:
    """Parts in one event; where one is in several pieces, each piece in its own."""
    pieces = [
        (b'{"index":%d,' % part.choice, *piece[1:]) for part in parts for piece in part.pieces
    ]
    is_small = all(len(part.pieces) <= 1 for part in parts)
    for some in [pieces] if is_small and pieces else [[piece] for piece in pieces]:
        texts = [_head(kind), *some[0]]
        for one in some[1:]:
            texts += b",", *one
        yield _event(*texts, b"]}")


@cache
def _head(kind: str) -> bytes:
    """How events of parts begin."""
    return json_bytes({"object": kind, "choices": [], PARTIAL_KEY: []})[:-2]


def _choices_in(data: bytes) -> set[int] | None:
    """Choices of whose tokens an event tells; None where it is no event of choices."""
    try:
        event = from_json(data.removeprefix(b"data:").strip())
        return {c["index"] for c in event["choices"] if not _is_role(c)}
    except (ValueError, KeyError, TypeError):
        return None


def _is_role(choice: Mapping[str, Any]) -> bool:
    """Whether a chat begins so, before any token."""
    delta = choice.get("delta") or {}
    told = [value for key, value in delta.items() if key != "role"]
    return "role" in delta and not any(
        (*told, choice.get("token_ids"), choice.get("finish_reason"))
    )


def with_results(data: bytes, found: dict[int, dict[str, Any]], n_choices: int) -> Pieces:
    """A response with results: the first choice's at the top, each one's on its choice."""
    if not found:
        return [data]
    first = _fields_of(found[min(found)])
    if n_choices == 1:
        # As text: a batch ends in one step, behind which nothing hides reading it again.
        return [data[: data.rindex(b"}")], b",", *first, b"}"]
    response = from_json(data)
    choices = enumerate(response.pop("choices", ()))
    each = [_with_fields(choice, _fields_of(found.get(i, {}))) for i, choice in choices]
    return _with_fields(response, [b'"choices":[', *listed(each), b"],", *first])


def _fields_of(result: Mapping[str, Any]) -> Pieces:
    """A result as fields of a JSON object."""
    if not any(map(_is_large, result.get("activations", {}).values())):
        return [json_bytes(result)[1:-1]] if result else []
    fields: list[Pieces] = []
    for key, value in result.items():
        if key != "activations":
            fields.append([json_bytes(key), b":", json_bytes(value)])
            continue
        entries = [[json_bytes(name), b":", *_entry(entry)] for name, entry in value.items()]
        fields.append([b'"activations":{', *listed(entries), b"}"])
    return list(listed(fields))


def _is_large(entry: Any) -> bool:
    """Whether an entry has its rows in it, as base64."""
    return isinstance(entry, dict) and "data" in entry


def _entry(entry: Any) -> Pieces:
    if not _is_large(entry):
        return [json_bytes(entry)]
    others = {key: value for key, value in entry.items() if key != "data"}
    return _with_fields(others, [b'"data":"', entry["data"], b'"'])


def _with_fields(value: Mapping[str, Any], fields: Pieces) -> Pieces:
    """A JSON object with further fields."""
    return [json_bytes(value)[:-1], b"," if value and fields else b"", *fields, b"}"]


def _written(pieces: Pieces) -> Iterator[bytes]:
    """Pieces as bytes, so many at a time that writing them takes a moment."""
    parts: list[bytes] = []
    n = 0
    for piece in pieces:
        for at in range(0, len(piece), _EVENT_BYTES):
            part = piece[at : at + _EVENT_BYTES]
            if n + len(part) > _EVENT_BYTES:
                yield b"".join(parts)
                parts, n = [], 0
            parts.append(_as_bytes(part))
            n += len(part)
    yield b"".join(parts)


def _as_bytes(piece: bytes | str) -> bytes:
    return piece.encode("ascii") if isinstance(piece, str) else piece


def _event(*texts: bytes) -> list[bytes]:
    """An event of so much JSON."""
    return [b"data: ", *texts, b"\n\n"]


def _last_event(found: dict[int, dict[str, Any]], kind: str) -> Pieces:
    fields = _fields_of(found[min(found)])
    if len(found) > 1:
        each = [_with_fields({"index": i}, _fields_of(found[i])) for i in sorted(found)]
        fields += b',"inspect_lens_choices":[', *listed(each), b"]"
    return _with_fields({"object": kind, "choices": []}, fields)


_EVENT_BYTES = 1 << 20
"""Bytes that are written at once in the event loop of all, those of an event or of a part of an
answer: some milliseconds."""


def part_as_json(part: Partial, handles: list[str]) -> list[list[bytes]]:
    """What has come of a choice, as events have it; large rows that are not fetched in pieces."""
    if part.transport == "binary":
        return [part.to_json(_entries(part.tensors, part.transport, handles))]
    return [piece.to_json() for piece in part.split(_EVENT_BYTES)]


def _entries(
    tensors: Mapping[str, TensorData], transport: str, handles: list[str]
) -> dict[str, Any]:
    try:
        if transport != "binary":
            return inline_entries(tensors)
        kept = handle_entries(tensors, payloads)
    except LensError as error:
        failed(error)
        raise
    handles += [entry["handle"] for entry in kept.values()]
    return kept


def as_json(completion: Any, handles: list[str]) -> dict[str, Any]:
    """A choice's result as it stands in a response: `activations` and `inspect_lens`."""
    result: dict[str, Any] = {"inspect_lens": completion.inspect_lens.model_dump(mode="json")}
    tensors: dict[str, TensorData] = completion.inspect_lens_tensors
    plain = getattr(completion, "inspect_lens_plain", {})
    if tensors or plain:
        entries = _entries(tensors, completion.inspect_lens_transport, handles)
        result["activations"] = entries | {n: {"__json__": value} for n, value in plain.items()}
    if (saved := getattr(completion, "inspect_lens_saved", None)) is not None:
        result["hook_results"] = encode_saved(saved)
    delivered(completion)
    return result


Receive = Callable[[], Awaitable[Message]]

FETCH_PATH = "/v1/activations/"
TOKENS_PATH = "/inference/v1/generate"
_SERVED = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/invocations",
    TOKENS_PATH,
)
"""Ends of paths whose handlers read lens keys."""
_TIERED = ("/v1/responses", "/v1/messages")
"""Ends of paths whose answers have a receipt, and whose bodies may choose what acts on all."""
_ACTED_ON = (
    *_SERVED,
    *_TIERED,
    "/cohere/v2/chat",
    "/generative_scoring",
    "/v1/systemone",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
)
"""Ends of paths whose requests have what acts on all."""
_FINE = ("/render", "/tokenize", "/count_tokens")
"""Ends of paths that generate nothing."""
_OWN = ("/v1/inspect_lens", "/v1/hooks")
"""Of our own routes, which have bodies of their own."""
_GENERATE = ("/v1/messages", TOKENS_PATH)
"""Ends of paths that generate text, and whose own fields none of our words is among."""
_UNGUARDED = "/invocations"
"""Where vLLM asks for no key of `--api-key`."""
_NO_KEY = (
    "this server asks for a key (--api-key) where something is asked of the lens; send "
    "'Authorization: Bearer KEY'"
)
_KEYS = re.compile("|".join(LENS_KEYS).encode())
_WORDS = (
    *(f'"{word}"'.encode() for word in (ENVELOPE_KEY, *OWN_WORDS)),
    *(b"inspect", b"lens", b"residual", b"steer", b"vectors", b"hooks", b"_qk", b"activations"),
)
"""A body has one of these that has a word of ours where nobody reads it, or nearly a key."""
_ESCAPED = re.compile(rb"\\u00[4-7]")
"""A letter that no encoder of JSON escapes: a key may be hidden."""
_SMALL = 1 << 16
_MOST_TABLES = 8
"""Times the table of steering rows: what vectors of requests under way may take together."""


class LensBodies:
    """ASGI middleware: what a body asks of the lens is parsed and judged before vLLM sees it.

    A JSON body that asks for something is refused where its route would pass over it, and
    everywhere while the lens is off.
    """

    _threads = ThreadPoolExecutor(2, thread_name_prefix="inspect-lens-read")

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        front_end: Callable[[], Any],
        keys: Collection[str] = LENS_KEYS,
        *,
        fetch: Callable[[Any], Awaitable[Any]] | None = None,
        begin: Callable[[Any], None] = lambda app: None,
    ) -> None:
        """Wrap an application.

        Args:
            app: the application.
            front_end: gives the front-end, once there is one.
            keys: those that are refused while the lens is off.
            fetch: answers who asks for results by handle. FastAPI's own way to a route, and vLLM's
                metrics, take several times as long, as often as there are results.
            begin: called with the whole application before its first request.
        """
        self._app = app
        self._front_end = front_end
        self._keys, self._fetch, self._begin = keys, fetch, begin
        self._n_bytes = 0
        """Of vectors of requests under way."""
        self._configs: tuple[str, ...] = ()
        """Configurations that are listed as models."""
        self._listed: Mapping[str, str] = {}
        """Each by the model's name."""

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._pass_on(scope, receive, send)
            return
        CALLER.set(Caller(scope, shown_key))
        path, is_post = scope["path"], scope["method"] == "POST"
        if self._fetch is not None and not is_post and (handle := _handle_in(scope)):
            from starlette.requests import Request

            found = await self._fetch(Request({**scope, "path_params": {"handle": handle}}))
            await found(scope, receive, send)
            return
        server, configs = "", self._listed
        # Whether a server lives, and its metrics, depend on no name.
        if is_post or "/v1/" in path:
            try:
                server, configs = await self._tiers(scope)
            except BaseException as error:
                if ends_process(error):
                    raise
                # Every request comes here; those on which something acts are judged again.
                logger.exception("inspect_lens: what acts on requests is not known")
        _READS_MODEL.set(path.endswith(_FINE))
        acts = bool(server) and is_post and path.endswith(_ACTED_ON)
        acting = with_header(send, server) if acts else send
        if not (is_post and _may_ask(scope)):
            await self._app(scope, receive, acting)
            return
        body, again = await whole_body(receive)
        if _may_say(body, path, configs) or server or _runs_hooks(scope):
            read = partial(read_body, path, body, configs=configs, has_server=bool(server))
            await self._serve(scope, again, send, acting, body, read)
        else:
            await self._app(scope, again, send)

    async def _serve(
        self,
        scope: Mapping[str, Any],
        again: Receive,
        send: Send,
        acting: Send,
        body: bytes,
        read: Callable[..., Body | None],
    ) -> None:
        """Serve a request that may ask for something, or on which something acts."""
        asked: Body | None = None
        n_bytes, span = 0, Asked(scope)
        try:
            front = self._front_end()
            facts: EngineFacts | None = getattr(front, "facts", None)
            off = self._off(front)
            if scope["path"].endswith(_UNGUARDED) and shown_key(scope) is None and _is_ours(off):
                await refuse(error := SpecError(_NO_KEY), send, status=401)
                span.end(401, error=error)
                return
            read = partial(read, facts=facts, off=off)
            if len(body) <= _SMALL and b"zstd" not in body and not _ESCAPED.search(body):
                asked = read()
            else:
                asked = await asyncio.get_running_loop().run_in_executor(self._threads, read)
            if asked is not None and asked.request is not None:
                n_bytes = asked.request.tensor_bytes
            self._admit(n_bytes, facts)
        except LensError as error:
            span.end(error.status, error=error)
            await refuse(error, send)
            return
        except BaseException as error:  # noqa: BLE001 - the loop is everybody's
            pass_over(error, uses_lens=_KEYS.search(body) is not None)
        if asked is None:
            await self._app(scope, again, acting)
            return
        self._n_bytes += n_bytes
        _READS_MODEL.set(True)
        token, answer = SERVED.set(asked), Answer(send if asked.is_left_out else acting, asked)
        is_traced = asked.request is not None and span.span is not None
        asked.span = span.span if is_traced else None
        try:
            await self._app(span.scope if is_traced else scope, again, answer)
        except Exception as error:
            asked.error = asked.error or error
            raise
        finally:
            SERVED.reset(token)
            if is_traced:
                span.end(answer.status, asked.request, asked.results.values(), asked.error)
            asked.forget()
            self._n_bytes -= n_bytes

    async def _pass_on(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve what is no request; a server's life is told of before its first one."""
        if scope["type"] == "lifespan":
            with contained(lambda _: logger.exception("inspect_lens: its routes come first")):
                self._begin(scope["app"])
        await self._app(scope, receive, send)

    async def _tiers(self, scope: Mapping[str, Any]) -> tuple[str, Mapping[str, str]]:
        """Hash of what acts on all requests, and configurations by the names of their models."""
        registry = getattr(self._front_end(), "registry", None)
        if registry is None:
            return "", {}
        if registry.is_behind:
            await registry.catch_up()
        configs: tuple[str, ...] = registry.configs
        if configs != self._configs and is_off("models") is None:
            listed = list_models(scope, configs, _check_model)
            if listed is not None:
                self._configs, self._listed = configs, listed
        server: ServerConfig | None = registry.server
        return "" if server is None else registry.sha256_of(server), self._listed

    def _admit(self, n_bytes: int, facts: EngineFacts | None) -> None:
        if facts is None or not n_bytes or not self._n_bytes:
            return
        most = _MOST_TABLES * facts.bank_rows * facts.hidden * 4
        if self._n_bytes + n_bytes > most:
            raise CapacityError(
                f"steering vectors of requests under way take {self._n_bytes} bytes, and together "
                f"with the {n_bytes} of this one more than {most}; try again later, register "
                "vectors that many requests use, or raise INSPECT_LENS_BANK_BYTES"
            )

    def _off(self, front: Any) -> tuple[str, Collection[str]] | None:
        """Why the lens is off in this process, with the keys that are refused then; or None."""
        for feature in ("lens", "http"):
            if (reason := is_off(feature)) is not None:
                return f"{FEATURES[feature]}: off in this server: {reason}", self._keys
        refusal: str | None = getattr(front, "refusal", None)
        # An engine that is not served refuses all of them, whoever else is loaded.
        return None if refusal is None else (str(not_served(refusal)), LENS_KEYS)


def _runs_hooks(scope: Mapping[str, Any]) -> bool:
    """Whether persistent hooks run on every request, whose answer then says so."""
    client = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
    book = getattr(getattr(client, "input_processor", None), "inspect_lens_book", None)
    return bool(getattr(book, "hooks", ())) and scope["path"].endswith(_SERVED)


def _handle_in(scope: Mapping[str, Any]) -> str:
    """The handle of a request for a result; empty where it is none."""
    # As the router finds it, and as vLLM looks for a path's key.
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    before, _, handle = path.partition(FETCH_PATH)
    return "" if before or "/" in handle or scope["method"] != "GET" else handle


def _may_ask(scope: Mapping[str, Any]) -> bool:
    """Whether the body of a request has to be looked at."""
    path: str = scope["path"]
    if path.endswith(_SERVED):
        return True
    if path.endswith(_FINE) or any(own in path for own in _OWN):
        return False
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    return any(b"json" in kind.lower() for kind in kinds)


def _may_say(body: bytes, path: str, configs: Collection[str]) -> bool:
    """Whether a body may ask for something of ours, or nearly does."""
    return bool(
        _KEYS.search(body)
        or _ESCAPED.search(body)
        or (configs and b"@" in body)
        or (path.endswith(_GENERATE) and any(word in body for word in _WORDS))
    )


async def whole_body(receive: Receive) -> tuple[bytes, Receive]:
    """Read a body; returns it, and what gives its messages to the application."""
    messages = [await receive()]
    body: bytes = messages[0].get("body", b"")
    if messages[0].get("more_body"):
        while messages[-1]["type"] == "http.request" and messages[-1].get("more_body"):
            messages.append(await receive())
        body = b"".join([message.get("body", b"") for message in messages])
    if messages[-1]["type"] == "http.request" and (read := as_utf8(body)) is not body:
        body, messages = read, [{"type": "http.request", "body": read, "more_body": False}]
    waiting = iter(messages)

    async def again() -> Message:
        return next(waiting, None) or await receive()

    return body, again


def read_body(
    path: str,
    body: bytes,
    facts: EngineFacts | None,
    off: tuple[str, Collection[str]] | None = None,
    configs: Mapping[str, str] = MappingProxyType({}),
    has_server: bool = False,
) -> Body | None:
    """Parse what a body asks of the lens; None where its route serves no results."""
    with judging("the body"):
        if (fields := _fields(body)) is None:
            return None  # vLLM has words for it
        is_tokens = path.endswith(TOKENS_PATH)
        params = fields.get("sampling_params") if is_tokens else fields
        params = cast("dict[str, Any]", params) if isinstance(params, dict) else {}
        if off is not None:
            reason, keys = off
            if _keys_in(fields, keys) or _keys_in(params, keys):
                raise UnsupportedError(reason)
            if not _is_ours(off):
                return None  # the other keys are another plug-in's
        if is_tokens or not path.endswith((*_SERVED, *_TIERED)):
            _refuse_lost(path, fields)
        if not path.endswith((*_SERVED, *_TIERED)):
            return None
        args = params.get("extra_args") if is_tokens else split_body(fields, where="the body").args
        if args is not None and not isinstance(args, dict):
            return None
        args = args or {}
        request = parse_extra_args(args, limits=None if facts is None else TensorLimits(facts))
        request = with_config_of(fields.get("model"), request, configs)
        _refuse_together(path, fields, request, has_server=has_server)
        for edit in () if request is None else request.edits:
            for tensor in edit.tensors.values():
                tensor.sha256  # noqa: B018 - worked out here, and not on the event loop
        chunks = "chat.completion.chunk" if "messages" in fields else "text_completion"
        kind = "inference.generate.chunk" if is_tokens else chunks
        others = {k: v for k, v in args.items() if k not in LENS_KEYS}
        takes_parts = bool(fields.get("stream")) and not path.endswith(_TIERED)
        return Body(request, kind, takes_parts, others)


def _fields(body: bytes) -> dict[str, Any] | None:
    check_size(body)
    try:
        fields = from_json(body)
    except ValueError as error:
        if "recursion" in str(error):
            raise SpecError("the body is nested too deep") from None
        try:
            fields = json.loads(body)  # vLLM's reader, which takes halves of surrogate pairs
        except (ValueError, RecursionError):
            return None
    return cast("dict[str, Any]", fields) if isinstance(fields, dict) else None


def _is_ours(off: tuple[str, Collection[str]] | None) -> bool:
    """Whether all lens keys are meant for this package."""
    return off is None or set(off[1]) == set(LENS_KEYS)


def _keys_in(fields: Mapping[str, Any], keys: Collection[str] = LENS_KEYS) -> list[str]:
    """Paths of keys at the top of a body, and in the places that may have them."""
    places = {"": fields, **{f"{name}.": fields.get(name) for name in PLACES}}
    return [
        f"{place}{key}"
        for place, inner in places.items()
        for key in keys
        if isinstance(inner, Mapping) and key in inner
    ]


_CHOSEN: Cache[tuple[int, str], tuple[LensRequest, LensRequest]] = Cache(1024)
"""Requests that chose a configuration as their model: as they came, and with it."""


def with_config_of(
    model: object, request: LensRequest | None, configs: Mapping[str, str]
) -> LensRequest | None:
    """A request with the configuration that its `model` names, as `model@name`."""
    name = configs.get(model) if isinstance(model, str) else None
    if name is None:
        return request
    if request is None:
        return parse_extra_args({NATIVE_KEY: {"configs": [name]}})
    # One object for equal requests, as others know what they did for it by its identity.
    known = _CHOSEN.get((id(request), name))
    if known is None or known[0] is not request:
        made = request.model_copy(update={"configs": (name, *request.configs)})
        known = request, made
        _CHOSEN.keep((id(request), name), known, request.tensor_bytes)
    return known[1]


def _refuse_together(
    path: str, fields: dict[str, Any], request: LensRequest | None, *, has_server: bool
) -> None:
    """Refuse what is asked of the lens beside what cannot have it."""
    if fields.get("use_beam_search") and (request is not None or has_server):
        asked = ", ".join(_keys_in(fields)) or "what this server does to all requests"
        raise UnsupportedError(
            f"use_beam_search cannot be used with {asked}: beams have no results; leave one of "
            "them out"
        )
    if not path.endswith(_TIERED):
        return
    tiers = {"configs": (), "server": None, "open_gates": ()}
    if request is None or request.model_copy(update=tiers) != NO_REQUEST:
        _refuse_lost(path, fields)
    elif fields.get("background"):
        raise UnsupportedError(
            "background cannot be used with a configuration (configs, model@name) or server: the "
            "answer is made when the request is over; leave background out"
        )


def _refuse_lost(path: str, fields: dict[str, Any]) -> None:
    """Refuse keys that a route knows nothing of, which it would pass over."""
    params = fields.get("sampling_params") if path.endswith(TOKENS_PATH) else None
    params = params if isinstance(params, dict) else {}
    beside = [key for key in params if key not in sampling_fields()]
    found = [*_keys_in(fields), *(f"sampling_params.{key}" for key in beside if key in LENS_KEYS)]
    if found:
        where = (
            "put them into sampling_params.extra_args"
            if path.endswith(TOKENS_PATH)
            else "use /v1/chat/completions, /v1/completions or /inference/v1/generate"
        )
        raise UnsupportedError(f"{path} would pass over {', '.join(found)}; {where}")
    if path.endswith(_GENERATE):
        for where, keys in (("the body", [*fields]), ("sampling_params", beside)):
            refuse_own_words(keys, where)
            refuse_misspelled([key for key in keys if key not in PLACES], where)


def pattern_budget() -> PatternBudget:
    """That of the body that is served, which may have many prompts; a new one elsewhere."""
    body = SERVED.get()
    return PatternBudget() if body is None else body.patterns


def check_unread(request: Any, keys: Collection[str] = LENS_KEYS) -> None:
    """Refuse what a body of vLLM asks of the lens where `LensBodies` has not read it.

    vLLM passes over fields that it does not know: what is meant for the lens there must not be
    lost in silence, nor what almost is.
    """
    unknown: dict[str, Any] = request.model_extra or {}
    xargs: dict[str, Any] = getattr(request, "vllm_xargs", None) or {}
    if not (unknown or xargs) or SERVED.get() is not None:
        return
    found = has_lens_words(request, keys)
    if found:
        require("lens")
    elif is_off("lens") is not None:
        return  # the other keys may be another plug-in's
    split_body({**unknown, **({"vllm_xargs": xargs} if xargs else {})}, where="the body")
    if found:
        raise UnsupportedError(
            f"{type(request).__name__}: nothing here returns what {found} asks for; send it to "
            "/v1/chat/completions, /v1/completions or /inference/v1/generate of a server"
        )


def has_lens_words(request: Any, keys: Collection[str] = LENS_KEYS) -> str:
    """A key of ours that a body of vLLM has, wherever it stands; empty for none."""
    places = [getattr(request, "vllm_xargs", None), getattr(request, "model_extra", None)]
    found = [place for place in places if isinstance(place, dict)]
    inner = [place[name] for place in found for name in PLACES if isinstance(place.get(name), dict)]
    return next((key for place in (*found, *inner) for key in keys if key in place), "")
