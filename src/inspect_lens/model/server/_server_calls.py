"""What the provider says to its server beside completions: adapters, routes, bytes, receipts."""

from __future__ import annotations

from functools import cached_property
from typing import Any
from urllib.parse import quote

import anyio
import anyio.from_thread
import anyio.to_thread
from typing_extensions import override

from inspect_lens._fetch import HTTPError
from inspect_lens._http import DELAYS_S, is_broken, is_transport_error, no_answer
from inspect_lens._intake import Source, fetch_from, fetched
from inspect_lens._receipts import gives_no_receipts, needs_receipt, not_done
from inspect_lens.client import LensClient
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.model._host import VLLMAPI, ensure_adapter_loaded, role_of
from inspect_lens.model.response._response import LensFields
from inspect_lens.spec import LensRequest

from ._lens_service import LensService
from ._lora import adapter_of, announce
from ._probe_service import ProbeService
from ._startup import while_telling

__all__ = ["FETCH_TIMEOUT_S", "ServerCalls"]

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

        Raises:
            CaptureError: nobody answers; the message has address, model and role.
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

    async def _get(self, path: str) -> Any:
        return await self._request("GET", path)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send JSON to the server, which is started where needed; returns its JSON.

        Raises:
            CaptureError: the server answered with an error, or closed the connection repeatedly.
        """
        response = await self._send(path, {"model": self.service_model_name(), **body})
        if response.status_code != 200:
            raise CaptureError(
                f"{path} of {self._server_root()}{self.told()} answered HTTP "
                f"{response.status_code}: {response.text[:500]}"
            )
        return response.json()

    async def _send(self, path: str, body: dict[str, Any]) -> Any:
        """Post JSON to the server, which is started where needed; the response, whatever it says.

        Raises:
            CaptureError: the server closed the connection repeatedly.
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
