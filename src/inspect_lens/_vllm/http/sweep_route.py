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
from inspect_lens._vllm.compat.features import require
from inspect_lens._vllm.compat.one_token import status_of
from inspect_lens._vllm.metrics import refused_as
from inspect_lens.errors import CapacityError, SpecError, UnsupportedError
from inspect_lens.spec import EngineFacts, LensRequest, Replace

from .sweep_runs import Ask, ServerRuns

__all__ = ["SWEEP_PATH", "add_sweep_route"]

SWEEP_PATH: Final = "/v1/inspect_lens/patch_sweep"
MOST_SWEEPS: Final = 4
"""At once: each holds the rows of its prompts, and has a thread."""


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
            model, specs = await _asked(request)
            ask = _asks(request)
            await _check_model(model, ask)
            _judge(specs, front_end())
            if len(running) >= MOST_SWEEPS:
                raise CapacityError(
                    f"patch sweeps: {len(running)} run in this server, which is the most at once; "
                    "try again when one has ended"
                )
            runs = ServerRuns(request.app.state.engine_client, ask, asyncio.get_running_loop())
            made = _Sweep(runs, specs, running.discard)
            running.add(made)
            made.start()
            first = await _first(made, request)
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises is an answer, too
            if made is not None:
                made.stop()
            return JSONResponse(_refusal(error), status_code=_refusal(error)["error"]["code"])
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

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._work, name="inspect-lens-sweep", daemon=True).start()

    def stop(self) -> None:
        """Abort what runs; the thread ends soon."""
        self._runs.stop()

    async def next(self) -> dict[str, Any] | None:
        """The next line; None behind the last.

        Raises:
            Exception: what the sweep ended with.
        """
        item = await self._queue.get()
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
            yield json.dumps(_refusal(error)) + "\n"
        finally:
            self.stop()

    def _work(self) -> None:
        lines = EventLines()
        try:
            for spec in self._specs:
                for event in sweep(self._runs, spec):
                    self._put(lines.line(event))
                self._put(lines.end())
            self._put(None)
        except BaseException as error:  # noqa: BLE001 - raised again where it can be answered
            # A SystemExit in a task ends the event loop, and with it the server.
            self._put(as_exception(error))
        finally:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._on_end, self)

    def _put(self, item: dict[str, Any] | Exception | None) -> None:
        with contextlib.suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)


async def _asked(request: Any) -> tuple[str | None, list[SweepSpec]]:
    require("http")
    require("sweeps")
    try:
        body = await request.json()
    except (ValueError, RecursionError) as error:
        raise SpecError(f"the body cannot be read: {error}") from None
    # It may have many rows, and the event loop is everybody's.
    return await asyncio.to_thread(specs_of, body)


def _asks(request: Any) -> Ask:
    """Requests to this server's own routes, with the caller's key."""
    import httpx

    keys = {k: v for k, v in request.headers.items() if k == "authorization"}

    async def ask(method: str, path: str, body: Any) -> tuple[int, Any]:
        transport = httpx.ASGITransport(app=request.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://lens") as client:
            answer = await client.request(method, path, json=body, headers=keys)
            return answer.status_code, answer.json()

    return ask


async def _check_model(model: str | None, ask: Ask) -> None:
    if model is None:
        return
    _, answer = await ask("GET", "/v1/models", None)
    known = {item["id"]: item.get("parent") for item in answer["data"]}
    bases = [name for name, parent in known.items() if parent is None]
    if model not in known:
        raise SpecError(f"model={model!r}: is not served here; allowed are {', '.join(bases)}")
    if model not in bases:
        raise UnsupportedError(
            f"model={model!r}: is an adapter, and a sweep in the server runs the model without it; "
            "have each cell sent by itself: patch_sweep(client, ..., over='requests')"
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


def _refusal(error: BaseException) -> dict[str, Any]:
    code = status_of(error)
    refused_as(code, type(error).__name__)
    return {"error": {"message": str(error), "type": type(error).__name__, "code": code}}
