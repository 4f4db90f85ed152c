"""What the provider says to its server beside completions: adapters, routes, bytes, receipts."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import quote

import anyio
import anyio.from_thread
import anyio.to_thread
from inspect_ai.log import transcript
from typing_extensions import override

from inspect_lens._base.fetch import HTTPError, fetch_bytes
from inspect_lens._base.http import DELAYS_S, is_broken, is_transport_error, no_answer
from inspect_lens._base.receipts import gives_no_receipts, needs_receipt, not_done
from inspect_lens._intake import Source, fetch_from, fetched
from inspect_lens.client import LensClient
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.model._host import (
    VLLMAPI,
    LoRAAdapter,
    VLLMServer,
    ensure_adapter_loaded,
    get_adapter_rank,
    role_of,
)
from inspect_lens.model.response._response import LensFields
from inspect_lens.model.scores._engine_probes import KNOWN, Known, widened
from inspect_lens.spec import LensRequest, ProbeUse

from ._lens_service import PATH, LensService, Send
from ._server import while_telling

__all__ = [
    "FETCH_TIMEOUT_S",
    "NamedAdapter",
    "ProbeService",
    "Served",
    "ServerCalls",
    "adapter_of",
    "announce",
]

UNKNOWN = "no probe is registered as"
"""What a server says of a name that it does not know, as after a restart."""

logger = logging.getLogger(__name__)


class Served(NamedTuple):
    """A request as the server can take it."""

    request: LensRequest
    refused: dict[str, str]
    """By name of the probe, why its rows are captured instead."""


class ProbeService:
    """Registers what calls ask for, once for each server and content."""

    def __init__(self, send: Send, server: str) -> None:
        self._send, self._server = send, server
        self._states: dict[str, str | None] = {}
        """By name: why the server does not run it; None where it does."""
        self._under_way: dict[str, anyio.Event] = {}

    def forget(self) -> None:
        """The server that was there is not there any more."""
        self._states.clear()

    async def serve(self, request: LensRequest) -> Served:
        """See that the server knows the probes of a request."""
        if all(self._states.get(use.name, "") is None for use in request.probes):
            return Served(request, {})
        kept: list[ProbeUse] = []
        refused: dict[str, str] = {}
        capture = request.capture
        for use in request.probes:
            known = KNOWN.get(use.name)
            reason = None if known is None else await self._state(use.name, known)
            if known is None or reason is None:
                kept.append(use)
                continue
            refused[known.probe] = reason
            engine = known.engine
            capture = widened(capture, engine.layers, engine.site, use.positions)
        if not refused:
            return Served(request, {})
        changes = {"probes": tuple(kept), "capture": capture}
        return Served(request.model_copy(update=changes), refused)

    async def _state(self, name: str, known: Known) -> str | None:
        while name not in self._states:
            under_way = self._under_way.get(name)
            if under_way is not None:
                await under_way.wait()
                continue
            done = self._under_way[name] = anyio.Event()
            try:
                self._states[name] = await self._register(name, known)
            finally:
                del self._under_way[name]
                done.set()
        return self._states[name]

    async def _register(self, name: str, known: Known) -> str | None:
        body = {"name": name, "probe": known.engine.model_dump(mode="json")}
        response = await self._send(PATH, body)
        if response.status_code == 200:
            return None
        if response.status_code in (400, 422):
            try:
                reason = str(response.json()["error"]["message"])
            except (KeyError, TypeError, ValueError):
                reason = response.text[:500]
        elif response.status_code in (404, 405):
            reason = "the server has no route to register probes; it runs without inspect-lens"
        else:
            raise CaptureError(
                f"{PATH} answered HTTP {response.status_code}: {response.text[:500]}"
            )
        text = f"{self._server} does not run probe {known.probe!r}: {reason}"
        logger.warning("%s; its rows are captured and scored instead", text)
        note: dict[str, Any] = {
            "probe": known.probe,
            "not in the engine": reason,
            "instead": "rows are captured",
        }
        transcript().info(note, source="inspect_lens")
        return reason


@dataclass(frozen=True)
class NamedAdapter(LoRAAdapter):
    """An adapter that the server knows by a name of the user's choice."""

    lora_name: str = ""

    @property
    def name(self) -> str:
        """Name on the server, which a request gives as its model."""
        return self.lora_name


def adapter_of(lora_request: Any) -> NamedAdapter | None:
    """Read `extra_body["lora_request"]`."""
    if lora_request is None:
        return None
    name = lora_request.get("lora_name") if isinstance(lora_request, Mapping) else None
    if not isinstance(name, str) or not name:
        raise SpecError(
            f"extra_body.lora_request={lora_request!r}; it has to be a mapping such as "
            '{"lora_name": "oracle", "lora_int_id": 1, "lora_path": "org/adapter"}'
        )
    path = lora_request.get("lora_path")
    return NamedAdapter(path=str(path or name), is_preloaded=not path, lora_name=name)


def announce(adapter: NamedAdapter, server: VLLMServer) -> None:
    """Tell a server that is not started yet that it will be asked for this adapter."""
    if server.base_url is None and not adapter.is_preloaded:
        server.enable_lora = True
        rank = get_adapter_rank(adapter)
        if rank is not None:
            server.max_lora_rank = max(server.max_lora_rank or 0, rank)


FETCH_TIMEOUT_S = 600.0


class ServerCalls(VLLMAPI):
    """Inspect's vLLM provider with the routes of a lens server."""

    _is_peer: bool | None = None
    _binary: bool | None = None
    _init_base_url: str | None

    @override
    async def _ensure_server_started(self) -> None:
        start = super()._ensure_server_started
        if self._init_base_url is not None or self._server.process is not None:
            await start()
        else:
            await while_telling(self._server, start)

    async def plain_client(self) -> LensClient:
        """A client of the server, which is started where needed, for threads of its own."""
        await self._ensure_server_started()
        return LensClient(
            self._server_root(),
            model=self.service_model_name(),
            api_key=str(self.api_key) if self.api_key else None,
            timeout=FETCH_TIMEOUT_S,
        )

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

    def refused_key(self) -> SpecError:
        """What to say where the server answers 401 to a call."""
        return SpecError(
            f"api_key: {self._server_root()} refuses it (HTTP 401); allowed is a key of that "
            "server; set VLLM_API_KEY to one"
        )

    async def _request(self, method: str, path: str, **options: Any) -> Any:
        """Ask the server, again over another connection where one broke; the response.

        What is posted here may be posted twice.
        """
        url = f"{self._server_root()}{path}"
        for delay in (*DELAYS_S, None):
            try:
                return await self.http_client.request(
                    method, url, headers=self._headers(), timeout=FETCH_TIMEOUT_S, **options
                )
            except Exception as error:
                if not is_transport_error(error):
                    raise
                if delay is None or not is_broken(error):
                    raise no_answer(url, error, self.told()) from error
            await anyio.sleep(delay)
        raise AssertionError("unreachable")

    def told(self) -> str:
        """The model and its role, for messages about its server."""
        role = role_of(self)
        return f" (model {self.model_name}{f', role {role}' if role else ''})"

    async def served_path(self) -> str | None:
        """Name or path of what a running server serves under this name; None where it is silent."""
        if self._init_base_url is None:
            return None  # started here, from the very name
        url = f"{self._server_root()}/v1/models"
        try:
            status, data = await anyio.to_thread.run_sync(
                lambda: fetch_bytes(url, self._headers(), timeout_s=5.0)
            )
        except HTTPError:
            return None  # a log is scored without its server, too
        if status != 200:
            return None
        try:
            listed = {one["id"]: one.get("root") for one in json.loads(data)["data"]}
        except (ValueError, KeyError, TypeError, AttributeError):
            return None  # a page of a proxy, and no list of models
        return listed.get(self.service_model_name())

    async def _get(self, path: str) -> Any:
        return await self._request("GET", path)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send JSON to the server, which is started where needed; returns its JSON."""
        response = await self._send(path, {"model": self.service_model_name(), **body})
        if response.status_code != 200:
            raise CaptureError(
                f"{path} of {self._server_root()}{self.told()} answered HTTP "
                f"{response.status_code}: {response.text[:500]}"
            )
        return response.json()

    async def _send(self, path: str, body: dict[str, Any]) -> Any:
        """Post JSON to the server, which is started where needed.

        The response, whatever it says.
        """
        await self._ensure_server_started()
        return await self._request("POST", path, json=body)

    @cached_property
    def _probes(self) -> ProbeService:
        """The probes at this server."""
        return ProbeService(self._send, self.model_name)

    @cached_property
    def lenses(self) -> LensService:
        """The lenses at this server."""
        return LensService(self._send)

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

    async def describe_server(self) -> dict[str, Any]:
        """What the server says of itself; empty where it does not."""
        await self._ensure_server_started()
        response = await self._get("/v1/inspect_lens")
        told: Any = response.json() if response.status_code == 200 else None
        return told if isinstance(told, dict) else {}

    async def offers_binary(self) -> bool:
        """Whether the server has the routes of the binary transport, and they are in reach."""
        if self._binary is None:
            await self._ensure_server_started()
            try:
                self._binary = (await self._get("/v1/inspect_lens")).status_code == 200
            except CaptureError:
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
