"""The provider `vllm-lens` (also `lens`): Inspect's vLLM provider that speaks lens.

Order of one call: the hook in `_hook.py` spells the config in one way (before the cache is
asked), `generate` reads the request out of it, Inspect logs the request, and only then
`_generate_completion` puts the tensors on the wire and takes the answer's out again.
"""

from __future__ import annotations

from collections.abc import AsyncIterable
from contextvars import ContextVar
from dataclasses import dataclass
from subprocess import Popen
from typing import Any, cast, get_args
from urllib.parse import quote

import anyio.from_thread
import anyio.to_thread
import httpx
from inspect_ai.model import ChatMessage, GenerateConfig, ModelCall, ModelOutput, RetryDecision
from inspect_ai.tool import ToolChoice, ToolInfo
from openai import APIStatusError, AsyncOpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from typing_extensions import override

from inspect_lens._fetch import HTTPError
from inspect_lens._intake import Source, fetch_from, fetched
from inspect_lens._receipts import gives_no_receipts, needs_receipt, not_done
from inspect_lens.errors import CaptureError, LensError
from inspect_lens.spec import CaptureSpec, LensRequest, to_wire_args

from ._attach import attach
from ._body import (
    Body,
    Settled,
    environment_capture,
    is_lens_call,
    parse_capture,
    read_body,
    without_refusals,
)
from ._host import VLLMAPI, PrerequisiteError, VLLMServer, _vllm_servers, ensure_adapter_loaded
from ._inherited import inherited_requests
from ._lora import adapter_of, announce
from ._places import place_for
from ._response import LensFields, take_fields
from ._scopes import scope_of
from ._server import children_of, normalise_url, reap, server_for, start_server
from ._stream import StreamFields
from ._take import Keep, Mode, expect
from ._transport import over_binary, wants_transport
from ._vectors import save_vectors

__all__ = ["CALLER", "LensAPI"]

FETCH_TIMEOUT_S = 600.0
POST_ATTEMPTS = 3
MAX_CONNECTIONS = 64

CALLER: ContextVar[LensAPI | None] = ContextVar("inspect_lens_caller", default=None)
"""The provider that this task is about to call; see `LensAPI.connection_key`."""


@dataclass
class _Call:
    """One mutable box per `generate`, filled by `_generate_completion` below it."""

    request: LensRequest | None
    keep: Keep
    fields: LensFields | None = None


_call: ContextVar[_Call | None] = ContextVar("inspect_lens_call", default=None)


class LensAPI(VLLMAPI):
    """Inspect's vLLM provider, with capture, steering and adapters per call.

    ```text
    inspect eval task.py --model vllm-lens/org/model -M capture=10,20
    ```

    ```python
    model = get_model("vllm-lens/org/model")
    output = await model.generate(messages, config=lens_config(capture=[10]))
    output.metadata["activations"]["residual_stream"]  # torch, (1, tokens, hidden)
    ```

    Args:
        model_name: as for `vllm/`, `base` or `base:adapter[@revision]`.
        base_url: of a running server; `/v1` is added where the URL has no path.
        port: of a running server on this machine.
        api_key: that the server asks for.
        config: generation config.
        capture: what calls capture that do not say: layers, `all`, or a CaptureSpec.
        activations: `sidecar` writes a file per call beside the log (the default inside an
            eval), `memory` keeps them up to INSPECT_LENS_MEMORY_BYTES (the default outside),
            `drop` keeps only shapes and hashes.
        activations_dir: folder or fsspec URL for the files, instead of beside the log.
        stream: force streaming on or off; None streams where Inspect asks for it and the call
            does not use the lens.
        **server_args: as for `vllm/`; the rest goes to the vLLM server that is started.

    Raises:
        PrerequisiteError: an argument is wrong.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        port: int | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 Inspect's own signature
        *,
        capture: Any = None,
        activations: Mode | None = None,
        activations_dir: str | None = None,
        stream: bool | None = None,
        lazy_init: bool = True,
        **server_args: Any,
    ) -> None:
        try:
            self._capture = parse_capture(capture)
        except LensError as error:
            raise PrerequisiteError(f"vllm-lens: -M {error}") from None
        try:
            # Said here and not by the hook that reads it: Inspect only warns about errors there.
            environment_capture()
        except LensError as error:
            raise PrerequisiteError(f"vllm-lens: {error}") from None
        if activations is not None and activations not in get_args(Mode):
            raise PrerequisiteError(
                f"vllm-lens: -M activations={activations!r}; allowed are "
                f"{', '.join(get_args(Mode))}; leave it out for files beside the log"
            )
        self._mode = activations
        self._directory = activations_dir
        self._forced_stream = stream
        self._is_peer: bool | None = None
        self._binary: bool | None = None
        base = model_name.partition(":")[0]
        shared = base in _vllm_servers
        super().__init__(model_name, base_url, port, api_key, config, lazy_init=True, **server_args)
        self._server = self._own_server(self._server, shared=shared)
        if not lazy_init:
            self._resolve_server()

    # -- server ----------------------------------------------------------------

    def _own_server(self, theirs: VLLMServer, *, shared: bool) -> VLLMServer:
        endpoint = super().connection_key()
        if endpoint != self.base_model:
            endpoint = self._init_base_url = normalise_url(endpoint)
        server = server_for(self.base_model, endpoint)
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
        super()._resolve_server()
        # Part of the cache key and of logged model roles: an explicit URL, or None for a server
        # of ours, whose port is another one in each run.
        self.base_url = self._init_base_url

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
        return start_server(
            model_path,
            port=port,
            api_key=str(self.api_key),
            server=self._server,
            args=self.server_args,
        )

    @override
    def close(self) -> None:
        children = children_of(self._server.process)
        super().close()
        reap(children)

    @override
    def connection_key(self) -> str:
        # Inspect asks for this in the task of a call, right before the hooks of that call run;
        # hooks are told the model's name only, and two models may share one.
        CALLER.set(self)
        return super().connection_key()

    @override
    def max_connections(self) -> int:
        return MAX_CONNECTIONS

    @override
    def should_retry(self, ex: BaseException) -> bool | RetryDecision:
        if isinstance(ex, APIStatusError) and CaptureError.__name__ in str(ex.body):
            return RetryDecision.no()  # it would be incomplete again, and Inspect never gives up
        return super().should_retry(ex)

    # -- a call ----------------------------------------------------------------

    def typed_body(
        self, config: GenerateConfig, last: CaptureSpec | None = None
    ) -> dict[str, Any] | None:
        """The config's `extra_body` with scopes and the default capture, spelled in one way."""
        return self._read(config, last).extra_body or None

    def _read(self, config: GenerateConfig, last: CaptureSpec | None = None) -> Body:
        scope = scope_of(self)
        inherited = () if scope is None else inherited_requests(self)
        body, request = read_body(config.extra_body, self._capture or last, scope, inherited)
        return Body(Settled(body), request)

    @override
    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput | tuple[ModelOutput | Exception, ModelCall]:
        body, request = self._read(config)
        if not (isinstance(config.extra_body, Settled) and config.extra_body == body):
            config = config.model_copy(update={"extra_body": body})
        await self.load_adapter(body.get("lora_request"))
        place = place_for(self._directory)
        if request is not None and request.steer:
            kept = place if self._mode in (None, "sidecar") else None
            await anyio.to_thread.run_sync(save_vectors, request.steer, kept)
        call = _Call(request, Keep(self._mode, place))
        token = _call.set(call)
        try:
            result = await super().generate(input, tools, tool_choice, config)
        finally:
            _call.reset(token)
        output = result[0] if isinstance(result, tuple) else result
        if isinstance(output, ModelOutput) and call.fields is not None and call.fields.choices:
            await self._check_done(request, call.fields)
            source = Source(self._server_root(), self._headers(), FETCH_TIMEOUT_S)
            await attach(
                output, call.fields, request, body, keep=call.keep, fetch=self.fetch, source=source
            )
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
        if "vllm_xargs" in body:
            args = without_refusals(cast("dict[str, Any]", body.pop("vllm_xargs")))
            if wants_transport(args) and await self.offers_binary():
                args = over_binary(args)
                if call is not None:
                    expect(call.keep)
            if args:
                asked = call.request if call is not None else None
                if asked is not None and not (asked.steer or asked.hooks):
                    body["vllm_xargs"] = to_wire_args(args)
                else:
                    # Compressing megabytes of vectors is not for the event loop.
                    body["vllm_xargs"] = await anyio.to_thread.run_sync(to_wire_args, args)
        completion = await super()._generate_completion(request | {"extra_body": body}, config)
        if isinstance(completion, ChatCompletion):
            fields = take_fields(completion)
            if call is not None:
                call.fields = fields
        return completion

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

    # -- what else the server has to say -------------------------------------------

    async def load_adapter(self, lora_request: Any) -> None:
        """See that the server has the adapter of a call; None is none."""
        adapter = adapter_of(lora_request)
        if adapter is not None:
            if self._init_base_url is None:
                await anyio.to_thread.run_sync(announce, adapter, self._server)
            await self._ensure_server_started()
            await anyio.to_thread.run_sync(ensure_adapter_loaded, self._server, adapter)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    async def _get(self, path: str) -> Any:
        return await self.http_client.get(
            f"{self._server_root()}{path}", headers=self._headers(), timeout=FETCH_TIMEOUT_S
        )

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send JSON to the server, which is started where needed; returns its JSON.

        Raises:
            CaptureError: the server answered with an error, or closed the connection repeatedly.
        """
        await self._ensure_server_started()
        for attempt in range(POST_ATTEMPTS):
            try:
                response = await self.http_client.post(
                    f"{self._server_root()}{path}",
                    json={"model": self.service_model_name(), **body},
                    headers=self._headers(),
                    timeout=FETCH_TIMEOUT_S,
                )
                break
            except (httpx.ReadError, httpx.RemoteProtocolError, httpx.WriteError) as error:
                # The server closed an idle connection as we took it; nothing posted here changes
                # anything, so it may be posted again.
                if attempt + 1 == POST_ATTEMPTS:
                    raise CaptureError(f"{path}: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise CaptureError(
                f"{path} answered HTTP {response.status_code}: {response.text[:500]}"
            )
        return response.json()

    def fetch(self, handle: str) -> bytes:
        """Bytes behind a handle, in a worker thread of the event loop."""
        source = Source(self._server_root(), self._headers(), FETCH_TIMEOUT_S)
        try:
            return fetch_from(source, handle)
        except HTTPError:
            # What the caller's own `http_client` knows of the way there, it alone knows.
            path = f"/v1/activations/{quote(handle, safe='')}"
            response = anyio.from_thread.run(self._get, path)
            return fetched(handle, response.status_code, response.content)

    async def offers_binary(self) -> bool:
        """Whether the server has the routes of the binary transport, and they are in reach."""
        if self._binary is None:
            await self._ensure_server_started()
            try:
                self._binary = (await self._get("/v1/inspect_lens")).status_code == 200
            except httpx.HTTPError:
                return False
        return self._binary

    async def _check_done(self, request: LensRequest | None, fields: LensFields) -> None:
        """Refuse an answer that a server gave without steering it, or without running probes."""
        receipt = fields.choices[0].receipt
        missing = not_done(request, receipt)
        if missing is None or request is None:
            return
        if receipt is None and not needs_receipt(request):
            if self._is_peer is None:
                routes = await self._get("/openapi.json")
                self._is_peer = gives_no_receipts(routes.status_code, routes.text)
            if self._is_peer:
                return
        raise CaptureError(missing)
