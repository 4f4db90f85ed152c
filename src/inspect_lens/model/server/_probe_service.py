"""Probes at one server: registered when a call first asks for them, captured where it has none."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import anyio
from inspect_ai.log import transcript

from inspect_lens.errors import CaptureError
from inspect_lens.model.scores._engine_probes import KNOWN, Known, widened
from inspect_lens.spec import LensRequest, ProbeUse

__all__ = ["ProbeService", "Served"]

PATH = "/v1/inspect_lens/registry"
UNKNOWN = "no probe is registered as"
"""What a server says of a name that it does not know, as after a restart."""

logger = logging.getLogger(__name__)

Send = Callable[[str, dict[str, Any]], Awaitable[Any]]


class Served(NamedTuple):
    """A request as the server can take it."""

    request: LensRequest
    refused: dict[str, str]
    """By name of the probe, why its rows are captured instead."""


class ProbeService:
    """Registers what calls ask for, once for each server and content.

    Args:
        send: posts JSON to a path of the server and gives the response.
        server: name of the server for messages.
    """

    def __init__(self, send: Send, server: str) -> None:
        self._send, self._server = send, server
        self._states: dict[str, str | None] = {}
        """By name: why the server does not run it; None where it does."""
        self._under_way: dict[str, anyio.Event] = {}

    def forget(self) -> None:
        """The server that was there is not there any more."""
        self._states.clear()

    async def serve(self, request: LensRequest) -> Served:
        """See that the server knows the probes of a request.

        Args:
            request: of a call. Names that this package did not make are the caller's own.

        Returns:
            The request; in place of probes that the server does not run it captures what they
            read, and says why.

        Raises:
            CaptureError: the server answered with an error of its own.
        """
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
