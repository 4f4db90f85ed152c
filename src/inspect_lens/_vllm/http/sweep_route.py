"""The HTTP route that runs a patch sweep in the server and streams its cells."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final

import numpy as np

from inspect_lens._engine.protocol.exceptions import as_exception
from inspect_lens._patching import EventLines, SweepSpec, capture_spec, specs_of, sweep
from inspect_lens._vllm.clients import CLIENT
from inspect_lens._vllm.compat.features import require
from inspect_lens.errors import CapacityError, SpecError, UnsupportedError
from inspect_lens.spec import EngineFacts, LensRequest, Replace, shown

from .refusals import json_body, refusal
from .sweep_runs import Ask, ServerRuns

__all__ = ["SWEEP_PATH", "add_sweep_route"]

SWEEP_PATH: Final = "/v1/inspect_lens/patch_sweep"
MOST_SWEEPS: Final = 4
"""At once: each holds the rows of its prompts, and has a thread."""
MOST_OF_CLIENT: Final = 2
"""Of them, of one address and key."""
MOST_UNREAD: Final = 1024
"""Lines that wait for a client; then the sweep waits, too."""
UNREAD_S: Final = 30.0
"""How long; then it ends, and its place is free."""


def add_sweep_route(app: Any, front_end: Callable[[], Any]) -> None:
    """Add `POST /v1/inspect_lens/patch_sweep` to a server.

    Args:
        app: the FastAPI application.
        front_end: gives the front-end of this process.
    """
    from fastapi import Request, Response
    from fastapi.responses import JSONResponse, StreamingResponse

    running: set[_Sweep] = set()

    async def patch_sweep(request: Request) -> Any:
        made: _Sweep | None = None
        try:
            require("http")
            require("sweeps")
            # It may have many rows, and the event loop is everybody's.
            model, specs = await asyncio.to_thread(specs_of, await json_body(request))
            ask = _asks(request)
            await _check_model(model, ask)
            _judge(specs, front_end())
            _admit([sweep.client for sweep in running])
            runs = ServerRuns(request.app.state.engine_client, ask, asyncio.get_running_loop())
            made = _Sweep(runs, specs, running.discard)
            running.add(made)
            made.start()
            first = await _first(made, request)
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises is an answer, too
            if made is not None:
                made.stop()
            body = refusal(error)
            return JSONResponse(body, status_code=body["error"]["code"])
        except BaseException:
            if made is not None:
                made.stop()
            raise
        if first is None:
            return Response(status_code=499)  # nobody is there to read it
        return StreamingResponse(made.lines(first), media_type="application/x-ndjson")

    # FastAPI reads annotations at run time, and those of this module are text.
    patch_sweep.__annotations__["request"] = Request
    app.post(SWEEP_PATH)(patch_sweep)


class _Sweep:
    """A thread that runs sweeps, and the lines that it has made."""

    def __init__(
        self, runs: ServerRuns, specs: Sequence[SweepSpec], on_end: Callable[[_Sweep], None]
    ) -> None:
        self._runs, self._specs, self._on_end = runs, specs, on_end
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue()
        self._room = threading.Semaphore(MOST_UNREAD)
        self.client = CLIENT.get()
        """Whose it is."""

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._work, name="inspect-lens-sweep", daemon=True).start()

    def stop(self) -> None:
        """Abort what runs; the thread ends soon."""
        self._runs.stop()
        self._room.release()

    async def next(self) -> dict[str, Any] | None:
        """The next line; None behind the last.

        Raises:
            Exception: what the sweep ended with.
        """
        item = await self._queue.get()
        self._room.release()
        if isinstance(item, Exception):
            raise item
        return item

    async def lines(self, first: dict[str, Any]) -> AsyncGenerator[str, None]:
        """All lines as text; whoever closes it ends the sweep."""
        line: dict[str, Any] | None = first
        try:
            while line is not None:
                yield json.dumps(line, allow_nan=False) + "\n"
                line = await self.next()
        except Exception as error:  # noqa: BLE001 - the status is sent; the stream has to say it
            yield json.dumps(refusal(error)) + "\n"
        finally:
            self.stop()

    def _work(self) -> None:
        lines = EventLines()
        try:
            for spec in self._specs:
                for event in sweep(self._runs, spec):
                    self._put_line(lines.line(event))
                self._put_line(lines.end())
            self._put(None)
        except BaseException as error:  # noqa: BLE001 - raised again where it can be answered
            # A SystemExit in a task ends the event loop, and with it the server.
            self._put(as_exception(error))
        finally:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._on_end, self)

    def _put_line(self, line: dict[str, Any]) -> None:
        if not self._room.acquire(timeout=UNREAD_S):
            raise CapacityError(
                f"patch sweep: {MOST_UNREAD} lines wait, and nobody has read one for "
                f"{UNREAD_S:g} s, so it has ended; read the answer as it comes, or sweep fewer "
                "cells"
            )
        self._put(line)

    def _put(self, item: dict[str, Any] | Exception | None) -> None:
        with contextlib.suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)


def _admit(clients: Sequence[str]) -> None:
    own = clients.count(CLIENT.get())
    if len(clients) >= MOST_SWEEPS or own >= MOST_OF_CLIENT:
        raise CapacityError(
            f"patch sweeps: {len(clients)} run in this server, {own} of them yours; the most at "
            f"once are {MOST_SWEEPS}, and {MOST_OF_CLIENT} of one client; try again when one has "
            "ended"
        )


def _asks(request: Any) -> Ask:
    """Requests to this server's own routes, with the caller's key."""
    import httpx

    keys = {k: v for k, v in request.headers.items() if k == "authorization"}

    async def ask(method: str, path: str, body: Any) -> tuple[int, Any]:
        transport = httpx.ASGITransport(app=request.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://lens") as client:
            answer = await client.request(method, path, json=body, headers=keys)
            try:
                return answer.status_code, answer.json()
            except ValueError:  # a fault of vLLM's
                return answer.status_code, {"error": answer.text[:200]}

    return ask


async def _check_model(model: str | None, ask: Ask) -> None:
    if model is None:
        return
    status, answer = await ask("GET", "/v1/models", None)
    if status != 200:
        raise SpecError(f"model={shown(model)}: this server does not list its models; leave it out")
    known = {item["id"]: item.get("parent") for item in answer["data"]}
    bases = [name for name, parent in known.items() if parent is None]
    if model not in known:
        raise SpecError(f"model={shown(model)}: is not served here; allowed are {', '.join(bases)}")
    if model not in bases:
        raise UnsupportedError(
            f"model={shown(model)}: is an adapter, and a sweep in the server runs the model "
            "without it; have each cell sent by itself: patch_sweep(client, ..., over='requests')"
        )


def _judge(specs: Sequence[SweepSpec], front: Any) -> None:
    """Refuse what the engine cannot do at any of the sites, before the first has begun."""
    facts = front.facts
    if not isinstance(facts, EngineFacts):
        reason = next((e for e in front.engines if isinstance(e, str)), "it is not known")
        raise UnsupportedError(f"the lens does not serve this engine: {reason}")
    for spec in specs:
        front.judged(LensRequest(capture=capture_spec(spec.layers, spec.site)), facts)
        layer = facts.layers[0] if spec.layers is None else min(spec.layers)
        row = np.zeros(facts.width_of(spec.site).width, dtype=np.float32)
        edit = Replace(rows=row, layers=(layer,), site=spec.site, alpha=spec.alpha)
        front.judged(LensRequest(edits=(edit,)), facts)


async def _first(made: _Sweep, request: Any) -> dict[str, Any] | None:
    """The first line; None where the client has gone before."""
    first = asyncio.ensure_future(made.next())
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({first, gone}, return_when=asyncio.FIRST_COMPLETED)
        if first.done():
            return first.result()
        made.stop()
        return None
    finally:
        for task in (first, gone):
            task.cancel()


async def _gone(request: Any) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
