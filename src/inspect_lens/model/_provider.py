"""The provider `vllm-lens` (also `lens`): Inspect's vLLM provider that speaks lens.

Order of one call: the hook `LensRequests` spells the config in one way (before the cache is
asked), `generate` reads the request out of it, Inspect logs the request, and only then
`_generate_completion` puts the tensors on the wire and takes the answer's out again.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import AsyncIterable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from subprocess import Popen
from types import NoneType
from typing import Any, Final, get_args

import anyio.to_thread
from inspect_ai.hooks import BeforeModelGenerate, Hooks, SampleInit, hooks
from inspect_ai.model import ChatMessage, GenerateConfig, ModelCall, ModelOutput, RetryDecision
from inspect_ai.tool import ToolChoice, ToolInfo
from openai import (
    APIConnectionError,
    APIStatusError,
    AsyncOpenAI,
    AuthenticationError,
    BadRequestError,
)
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from typing_extensions import override

from inspect_lens._base.arguments import judged_value
from inspect_lens._base.garbage import collect_less
from inspect_lens._base.http import no_answer, with_advice
from inspect_lens._intake import Source
from inspect_lens._settings import Settings
from inspect_lens.errors import CaptureError, LensError, did_you_mean
from inspect_lens.spec import (
    LENS_KEYS,
    LensRequest,
    several,
    shown,
    to_extra_args,
    to_wire_args,
)

from ._handle import KEEPS_FILES
from ._host import VLLMAPI, WORDED, PrerequisiteError, VLLMServer, _vllm_servers, apis_of_task
from ._places import place_for
from ._request import (
    NOT_STREAMED,
    Body,
    Settled,
    edits_of_every_call,
    environment_capture,
    given_by,
    is_lens_call,
    parse_capture,
    read_body,
    respelled,
    save_vectors,
    unwritten,
)
from ._response import (
    Keep,
    LensFields,
    Mode,
    StreamFields,
    attach,
    expect,
    leave_none,
    note_open_gates,
    take_fields,
    with_open_gates,
)
from ._scope import LensProvider, inherited_requests, scope_of
from ._scores import ProbeLike, ask_probes
from ._server import (
    FETCH_TIMEOUT_S,
    UNKNOWN,
    ServerCalls,
    StartedServer,
    adapter_of,
    children_of,
    configuration_of,
    normalise_url,
    reap,
    server_for,
    start_server,
    waits_since,
    weights_of,
)

logger = logging.getLogger(__name__)

_OF_INSPECT: Final = frozenset(inspect.signature(VLLMAPI.__init__).parameters) - {
    "self", "model_name", "config", "server_args",
}  # fmt: skip


def refuse_unknown_arguments(
    given: Mapping[str, Any], own: Collection[str], *, attached: str | None
) -> None:
    """Refuse arguments that no one reads.

    A server that is started gets what is left over, and refuses what it does not know. One that
    runs has its arguments already: a log that is scored again brings those of its own server, so
    these are named in a warning.
    """
    for name, value in given.items():
        if name in _OF_INSPECT or value is None:
            continue
        if name == "stream_results":
            why = NOT_STREAMED
        elif (instead := _INSTEAD.get(name)) is not None:
            why = f"is no argument of the model; put {instead} into the task's solver"
        elif get_close_matches(name, own, n=1, cutoff=0.8):
            why = f"is no argument of the model; {did_you_mean(name, own)}"
        else:
            if attached is not None:
                logger.warning(
                    "vllm-lens: -M %s has no effect: the server at %s is running already",
                    name, attached,
                )  # fmt: skip
            continue
        raise PrerequisiteError(f"vllm-lens: -M {name}={value}: {why}")


def refuse_arrays(name: str, value: Any) -> None:
    """Refuse numbers and arrays of NumPy or PyTorch in an argument, which no log could hold."""
    for part in value.values() if isinstance(value, Mapping) else several(value):
        if isinstance(part, Mapping | list | tuple):
            refuse_arrays(name, part)
        elif isinstance(part, float | str):
            continue  # some of NumPy's are Python's, too, such as what `np.linspace` gives
        elif hasattr(part, "dtype") and hasattr(part, "tolist"):
            raise PrerequisiteError(
                f"vllm-lens: -M {name}={shown(value)}: a log writes arguments of a model as JSON, "
                f"in which {type(part).__name__} is null, so eval-retry would run without it; "
                "pass what its tolist() returns, or an edit such as Ablate or SteeringVector"
            )


def spare_collector() -> None:
    """Let garbage be collected less often in this process, which runs evals."""
    collect_less(Settings.load().garbage_threshold, freezes=True)


MAX_CONNECTIONS = 64
_OWN = (
    "capture", "edits", "steer", "edits_meet", "activations", "activations_dir", "probes", "stream",
)  # fmt: skip
"""Arguments that the provider adds to those of Inspect's."""
_INSTEAD: Final = {
    name: f"{'with_lens' if name == 'lens' else 'lens_config'}({name}=…)"
    for name in LensRequest.model_fields
    if name not in _OWN
}
"""What calls ask for and no argument says, and what does."""

CALLER: ContextVar[LensAPI | None] = ContextVar("inspect_lens_caller", default=None)
"""The provider that this task is about to call; see `LensAPI.connection_key`."""


@dataclass
class _Call:
    """One mutable box per `generate`, filled by `_generate_completion` below it."""

    request: LensRequest | None
    keep: Keep
    fields: LensFields | None = None


_call: ContextVar[_Call | None] = ContextVar("inspect_lens_call", default=None)


class LensAPI(ServerCalls, LensProvider):
    """Inspect's vLLM provider, with capture, steering and adapters per call."""

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        port: int | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 Inspect's own signature
        *,
        capture: Any = None,
        edits: Any = None,
        steer: Any = None,
        edits_meet: Any = None,
        activations: Mode | None = None,
        activations_dir: str | Path | None = None,
        probes: ProbeLike | Sequence[ProbeLike] | None = None,
        stream: bool | None = None,
        lazy_init: bool = True,
        **server_args: Any,
    ) -> None:
        given = {"capture": capture, "edits": edits, "steer": steer, "stream": stream, "port": port}
        for name, value in (given | server_args).items():
            refuse_arrays(name, value)
        with given_by("-M capture"):
            asked = LensRequest(capture=parse_capture(capture))
        with given_by("-M probes"):
            self._asked = asked.with_fields(probes=ask_probes(probes))
        self.edited, self.own_config = edits_of_every_call(edits, steer, edits_meet), config
        with given_by(""):
            Settings.load()
            environment_capture()
        if activations is not None and activations not in get_args(Mode):
            raise PrerequisiteError(
                f"vllm-lens: -M activations={activations!r}; allowed are "
                f"{', '.join(get_args(Mode))}; leave it out for files beside the log"
            )
        with given_by("-M activations_dir"):
            folder = judged_value("activations_dir", activations_dir, str, Path, NoneType)
        with given_by("-M stream"):
            self._forced_stream: bool | None = judged_value("stream", stream, bool, NoneType)
        self._mode = activations
        self._directory = None if folder is None else str(folder)
        base = model_name.partition(":")[0]
        shared = base in _vllm_servers
        super().__init__(model_name, base_url, port, api_key, config, lazy_init=True, **server_args)
        self._server = self._own_server(self._server, shared=shared)
        self.configuration = configuration_of(self.base_model)
        refuse_unknown_arguments(server_args, _OWN, attached=self._init_base_url)
        if not lazy_init:
            self._resolve_server()
        spare_collector()

    # -- server ----------------------------------------------------------------

    def _own_server(self, theirs: VLLMServer, *, shared: bool) -> StartedServer:
        endpoint = super().connection_key()
        if endpoint != self.base_model:
            endpoint = self._init_base_url = normalise_url(endpoint)
        weights = weights_of(self.base_model)
        server = server_for(weights, weights if endpoint == self.base_model else endpoint)
        if self.adapter:
            server.enable_lora = True
            server.max_lora_rank = max(server.max_lora_rank or 0, theirs.max_lora_rank or 0) or None
        if not shared:
            # Inspect's constructor made a record in its own table, which nobody uses.
            _vllm_servers.pop(self.base_model, None)
        self.base_url = self._init_base_url
        return server

    @override
    def _resolve_server(self) -> None:
        name = self.model_name
        try:
            super()._resolve_server()
        finally:
            # Inspect puts the base model there, also where it cannot load the adapter then, and
            # later calls would be logged without it.
            self.model_name = name
        # Part of the cache key and of logged model roles: an explicit URL, or None for a server
        # of ours, whose port is another one in each run.
        self.base_url = self._init_base_url
        if self._init_base_url is None:
            self._server.tell_of_others(self.base_model, self.server_args)

    @override
    def _create_client(self) -> AsyncOpenAI:
        self.base_url = self._server.base_url
        try:
            return super()._create_client()
        finally:
            self.base_url = self._init_base_url

    @override
    def _server_root(self) -> str:
        return str(self._server.base_url).rstrip("/").removesuffix("/v1")

    @override
    def _start_server(
        self, model_path: str, port: int | None = None
    ) -> tuple[str, Popen[str], int]:
        when, why = self._server.failed
        if when > waits_since.get(math.inf):
            raise CaptureError(why)
        try:
            started = start_server(
                weights_of(model_path),
                port=port,
                api_key=str(self.api_key),
                server=self._server,
                args=self.server_args,
            )
        except CaptureError as error:
            self._server.failed = (time.monotonic(), str(error))
            raise
        self._server.args = dict(self.server_args)
        return started

    @override
    def close(self) -> None:
        children = children_of(self._server.process)
        super().close()
        self.names.forget()
        reap(children)

    @override
    def connection_key(self) -> str:
        # Inspect asks for this in the task of a call, right before the hooks of that call run;
        # hooks are told the model's name only, and two models may share one.
        CALLER.set(self)
        KEEPS_FILES.set(self._keep().is_written)
        return super().connection_key()

    def _keep(self) -> Keep:
        return Keep(self._mode, place_for(self._directory))

    async def write_vectors(self, request: LensRequest | None) -> None:
        """Write what the log refers to of a request beside it, once for each log."""
        if request is None or not request.edits:
            return  # most calls, each of which asks three times
        keep = self._keep()
        place = keep.place if keep.is_written else None
        if unwritten(request, place):
            await anyio.to_thread.run_sync(save_vectors, request, place)

    @override
    def max_connections(self) -> int:
        return MAX_CONNECTIONS

    @override
    def should_retry(self, ex: BaseException) -> bool | RetryDecision:
        if isinstance(ex, APIStatusError) and CaptureError.__name__ in str(ex.body):
            return RetryDecision.no()  # it would be incomplete again, and Inspect never gives up
        return super().should_retry(ex)

    # -- a call ----------------------------------------------------------------

    @override
    def read(self, config: GenerateConfig, messages: Sequence[ChatMessage] = ()) -> Body:
        scope = scope_of(self)
        said = config.extra_body and not isinstance(config.extra_body, Settled)
        # Only of a call that says something it has to be known whether it says so itself.
        inherited = inherited_requests(self) if scope is not None and said else ()
        default = self._asked
        if default.capture is None and (capture := environment_capture()) is not None:
            default = default.with_fields(capture=capture)
        body, request = read_body(config.extra_body, default, scope, inherited)
        opened = with_open_gates(request, messages)
        if opened is not None and opened is not request:
            body, request = respelled(body, opened), opened
        return Body(Settled(body), request)

    @override
    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput | tuple[ModelOutput | Exception, ModelCall]:
        body, request = self.read(config, input)
        refused: dict[str, str] = {}
        if request is not None:
            self.judge_before_start(request)
            request, refused = await self.names.serve(request)
            if refused:
                body = Settled(respelled(body, request))
        if not (isinstance(config.extra_body, Settled) and config.extra_body == body):
            config = config.model_copy(update={"extra_body": body})
        await self.load_adapter(body.get("lora_request"))
        await self.write_vectors(request)
        call = _Call(request, self._keep())
        token = _call.set(call)
        try:
            result = await super().generate(input, tools, tool_choice, config)
        finally:
            _call.reset(token)
        output = result[0] if isinstance(result, tuple) else result
        if isinstance(output, ModelOutput) and call.fields is not None and call.fields.choices:
            await self._check_done(request, call.fields)
            note_open_gates(output, call.fields)
            source = Source(self._server_root(), self._headers(), FETCH_TIMEOUT_S)
            is_read = request is not None and (request.brings_tensors or request.scores_tokens)
            numerics = await self.numerics() if is_read else None
            try:
                await attach(
                    output, call.fields, request, body, keep=call.keep, fetch=self.fetch,
                    source=source, numerics=numerics,
                )  # fmt: skip
            except BaseException:
                await leave_none(output, call.keep)
                raise
            if refused and output.metadata is not None:
                output.metadata["probes_refused"] = refused
        KEEPS_FILES.set(None)
        return result

    @override
    def completion_params(self, config: GenerateConfig, tools: bool) -> dict[str, Any]:
        params = super().completion_params(config, tools)
        body = dict(params.get("extra_body") or {})
        args = body.pop("extra_args", None)
        if args:
            # Typed, so that the logged request has references; text only on the wire.
            body["vllm_xargs"] = args
        adapter = adapter_of(body.pop("lora_request", None))
        if adapter is not None:
            params["model"] = adapter.name
        return params | {"extra_body": body}

    @override
    async def _generate_completion(
        self, request: dict[str, Any], config: GenerateConfig
    ) -> ChatCompletion:
        call = _call.get()
        body: dict[str, Any] = {"return_token_ids": True, **(request.get("extra_body") or {})}
        given = body.pop("vllm_xargs", None) or {}
        args = {key: value for key, value in given.items() if key not in LENS_KEYS}
        if call is not None and (asked := call.request) is not None:
            if asked.leaves_transport and await self.offers_binary():
                asked = asked.over_binary()
                expect(call.keep)
            elif asked.scores_tokens:
                expect(call.keep)
            args |= to_extra_args(asked)
            if asked.edits or asked.hooks:
                # Compressing megabytes of vectors is not for the event loop.
                args = await anyio.to_thread.run_sync(to_wire_args, args)
        if args:
            body["vllm_xargs"] = to_wire_args(args)
        asked_for = request | {"extra_body": body}
        try:
            with self._named_errors():
                completion = await super()._generate_completion(asked_for, config)
        except BadRequestError as error:
            if call is None or call.request is None or UNKNOWN not in str(error.body):
                raise
            # Somebody removed a name, or the server was started again.
            self.names.forget()
            await self.names.serve(call.request)
            with self._named_errors():
                completion = await super()._generate_completion(asked_for, config)
        if isinstance(completion, ChatCompletion):
            fields = take_fields(completion)
            if call is not None:
                call.fields = fields
        return completion

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Say whose key is refused, and at which address nobody answers."""
        try:
            yield
        except AuthenticationError as error:
            raise self.refused_key() from error
        except APIConnectionError as error:
            # Of the same type, so that Inspect tries again as ever; OpenAI says "Connection error."
            cause = error.__cause__ or error
            error.message = str(no_answer(self._server_root(), cause, self.told()))
            error.args = (error.message,)  # logs show the one, and tracebacks the other
            setattr(error, WORDED, True)
            raise

    @override
    def handle_bad_request(self, ex: APIStatusError) -> ModelOutput | Exception:
        found = super().handle_bad_request(ex)
        if isinstance(found, ModelOutput) and found.stop_reason == "model_length":
            content = with_advice(found.completion, self._server_root())
            return ModelOutput.from_content(self.model_name, content, stop_reason="model_length")
        return found

    # -- streaming ---------------------------------------------------------------

    @override
    def resolve_stream(self, config: GenerateConfig) -> bool:
        if self._forced_stream is not None:
            return self._forced_stream
        return super().resolve_stream(config)

    @override
    def auto_streamable(self, config: GenerateConfig) -> bool:
        # Large results would arrive as one last chunk: nothing to show, and nothing to gain.
        return not is_lens_call(config.extra_body) and super().auto_streamable(config)

    @override
    async def stream_completion(self, stream: AsyncIterable[ChatCompletionChunk]) -> ChatCompletion:
        fields = StreamFields()
        return fields.attach(await super().stream_completion(fields.strip(stream)))


@hooks(
    name="lens_requests",
    description="Spells lens requests in one way before Inspect computes cache keys.",
)
class LensRequests(Hooks):
    """Replaces the call's `extra_body` by its typed form.

    Without it a raw tensor would be hashed by its abbreviated `repr`, a base64 vector from the
    command line would be logged with every call, and `-M capture` would not be in cache keys.
    """

    async def on_before_model_generate(self, data: BeforeModelGenerate) -> None:
        """Edit the config, which is a copy that belongs to this call."""
        api = CALLER.get()
        if api is None or api.qualified_model_name != data.model_name:
            return
        try:
            body, request = api.read(data.config, data.input)
        except LensError:
            # Inspect only warns about errors in hooks; the provider raises this one again.
            return
        data.config.extra_body = body or None
        # An answer out of the cache is logged with its request, too.
        await api.write_vectors(request)

    async def on_sample_init(self, data: SampleInit) -> None:
        """Write what the log refers to in the arguments of models, whatever becomes of calls."""
        for api in apis_of_task():
            if isinstance(api, LensAPI):
                await api.write_vectors(api.edited)
