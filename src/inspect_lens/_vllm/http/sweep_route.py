"""The HTTP route that runs a patch sweep in the server and streams its cells."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Final, TypeVar, cast

import numpy as np

from inspect_lens._base.http import json_bytes
from inspect_lens._base.token_texts import TokenTexts
from inspect_lens._engine.protocol.processes import as_exception
from inspect_lens._patching.runs import (
    Prompt,
    Rows,
    Run,
    capture_spec,
    chat_ending,
    is_chat,
    messages_of,
)
from inspect_lens._patching.sweep import EventLines, SweepSpec, specs_of, sweep
from inspect_lens._vllm.compat.api_server import one_token
from inspect_lens._vllm.compat.features import require
from inspect_lens._vllm.telemetry import CALLER
from inspect_lens.errors import CapacityError, CaptureError, SpecError, UnsupportedError
from inspect_lens.spec import (
    NATIVE_KEY,
    EngineFacts,
    LensRequest,
    Receipt,
    Replace,
    Site,
    judging,
    result_name,
    shown,
)

from .refusals import json_body, refusal

T = TypeVar("T")

Ask = Callable[[str, str, Any], Awaitable[tuple[int, Any]]]
"""Method, path and body to this server's own routes; status and JSON back."""


class ServerRuns:
    """Runs of one sweep; its methods are called in a thread that is not the event loop's."""

    def __init__(self, engine: Any, ask: Ask, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._ask, self._loop = engine, ask, loop
        self._texts = TokenTexts.from_tokenizer(engine.input_processor.tokenizer)
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()
        self.is_stopped = False

    def stop(self) -> None:
        """Abort what runs, and start nothing more: the thread gets `CancelledError`."""
        with self._lock:
            self.is_stopped = True
            running = list(self._open)
        for future in running:
            future.cancel()

    def tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            body: dict[str, Any] = {"prompt": prompt}
        elif is_chat(prompt):
            body = {"messages": messages_of(prompt), **chat_ending(prompt)}
        else:
            return list(cast("Sequence[int]", prompt))
        with judging("prompt"):
            status, answer = self._wait(self._ask_once("POST", "/tokenize", body))
            if status >= 400:
                error = answer.get("error", answer)
                reason = str(error.get("message") if isinstance(error, dict) else error)
                raise SpecError(f"prompt: the server cannot turn it into tokens: {reason[:1000]}")
            return list(answer["tokens"])

    def texts(self, ids: Sequence[int]) -> list[str]:
        return self._texts.texts(ids)

    def capture(self, ids: Sequence[int], layers: Sequence[int] | None, site: Site) -> Rows:
        request = LensRequest(capture=capture_spec(layers, site))
        completion = self._wait(self._run(Run(ids), (), request))
        values = completion.inspect_lens_tensors[result_name(site)].to_float32()
        return Rows(tuple(completion.inspect_lens.capture.layers), values)

    def logprobs(
        self, runs: Sequence[Run], tokens: Sequence[int], in_flight: int
    ) -> Iterator[tuple[int, tuple[float, ...]]]:
        done: queue.SimpleQueue[tuple[int, Future[Any]]] = queue.SimpleQueue()
        waiting, started, n = iter(range(len(runs))), set[Future[Any]](), 0

        def start_next() -> None:
            # An edit is made here, in the thread, and not on the loop that serves everybody.
            if (i := next(waiting, None)) is not None:
                run = runs[i]
                lens = LensRequest(edits=run.edits) if run.edits else None
                future = self._start(self._run(run, tokens, lens))
                started.add(future)
                future.add_done_callback(lambda found: done.put((i, found)))

        try:
            for _ in range(min(in_flight, len(runs))):
                start_next()
            while n < len(runs):
                i, future = done.get()
                started.discard(future)
                completion, n = future.result(), n + 1
                start_next()
                found = completion.logprobs[0]
                yield i, tuple(float(found[token].logprob) for token in tokens)
        finally:
            for future in started:
                future.cancel()

    async def _run(self, run: Run, tokens: Sequence[int], lens: LensRequest | None) -> Any:
        """The one choice of a request of one token."""
        params = one_token(tokens, None if lens is None else {NATIVE_KEY: lens})
        name, last = f"inspect-lens-sweep-{uuid.uuid4().hex}", None
        # As vLLM renders it: a raw one is prepared in a thread, which does not know the tenant.
        prompt = {"type": "token", "prompt_token_ids": list(run.ids)}
        stream = self._engine.generate(prompt, params, name)
        # Closed at once where the sweep ends, so that the engine aborts the request.
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                last = output
        if last is None:
            raise CaptureError("patch sweep: the engine ended a request without an answer")
        completion = last.outputs[0]
        if lens is not None:
            _check_ran(lens, getattr(completion, "inspect_lens", None))
        return completion

    async def _ask_once(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        return await self._ask(method, path, body)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._start(work).result()

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self.is_stopped:
                work.close()
                raise CancelledError
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._open.add(future)
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._open.discard(future)


def _check_ran(asked: LensRequest, receipt: Receipt | None) -> None:
    """Refuse an answer that the engine made without what was asked."""
    done = receipt is not None and (
        (not asked.edits or receipt.steer is not None)
        and (asked.capture is None or receipt.capture is not None)
    )
    if not done:
        raise CaptureError(
            "patch sweep: the engine answered a run without its edit or capture; look into the "
            "server's log, and ask again"
        )


SWEEP_PATH: Final = "/v1/inspect_lens/patch_sweep"
MOST_SWEEPS: Final = 4
"""At once: each holds the rows of its prompts, and has a thread."""
MOST_OF_CLIENT: Final = 2
"""Of them, of one address and key."""
UNREAD_S: Final = 30.0
"""How long a line may wait for its client; then the sweep ends, and its place is free."""


class Sweeps:
    """`POST /v1/inspect_lens/patch_sweep`: a line for each event, made when it is read."""

    def __init__(self, front_end: Callable[[], Any]) -> None:
        self._front_end = front_end
        self._running: dict[ServerRuns, str] = {}
        """Whose each of them is."""

    async def run(self, request: Any) -> Any:
        from fastapi.responses import JSONResponse, StreamingResponse

        client = CALLER.get().client  # requests to the server's own routes have another
        try:
            require("http")
            require("sweeps")
            # It may have many rows, and the event loop is everybody's.
            model, specs = await asyncio.to_thread(specs_of, await json_body(request))
            ask = _asks(request)
            await _check_model(model, ask)
            _judge(specs, self._front_end())
            self._admit(client)
            runs = ServerRuns(request.app.state.engine_client, ask, asyncio.get_running_loop())
            lines = self._lines(runs, specs, client)
            first = await anext(lines)
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises is an answer, too
            body = refusal(error)
            return JSONResponse(body, status_code=body["error"]["code"])

        async def answer() -> AsyncGenerator[bytes, None]:
            async with contextlib.aclosing(lines):
                yield first
                async for line in lines:
                    yield line

        return StreamingResponse(answer(), media_type="application/x-ndjson")

    def _admit(self, client: str) -> None:
        n, own = len(self._running), list(self._running.values()).count(client)
        if n >= MOST_SWEEPS or own >= MOST_OF_CLIENT:
            raise CapacityError(
                f"patch sweeps: {n} run in this server, {own} of them yours; the "
                f"most at once are {MOST_SWEEPS}, and {MOST_OF_CLIENT} of one client; try again "
                "when one has ended"
            )

    async def _lines(
        self, runs: ServerRuns, specs: Sequence[SweepSpec], client: str
    ) -> AsyncGenerator[bytes, None]:
        """All lines as JSON; whoever closes it ends the sweep. The first one may raise."""
        found, n = _found(runs, specs), 0
        loop = asyncio.get_running_loop()
        self._running[runs] = client

        def end() -> None:
            runs.stop()
            self._running.pop(runs, None)

        try:
            while (line := await asyncio.to_thread(_next, found)) is not None:
                unread = loop.call_later(UNREAD_S, end)
                yield json_bytes(line) + b"\n"
                unread.cancel()
                n += 1
                if runs.is_stopped:
                    raise CapacityError(
                        f"patch sweep: nobody has read a line for {UNREAD_S:g} s, so it has ended; "
                        "read the answer as it comes, or sweep fewer cells"
                    )
        except Exception as error:
            if not n:
                raise
            yield json_bytes(refusal(error)) + b"\n"  # the status is sent
        finally:
            end()


def _found(runs: ServerRuns, specs: Sequence[SweepSpec]) -> Iterator[dict[str, Any]]:
    lines = EventLines()
    for spec in specs:
        for event in sweep(runs, spec):
            yield lines.line(event)
        yield lines.end()


def _next(found: Iterator[dict[str, Any]]) -> dict[str, Any] | None:
    try:
        return next(found, None)
    except BaseException as error:  # noqa: BLE001 - a SystemExit in a task ends the loop
        raise as_exception(error) from None


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
        front.compile(LensRequest(capture=capture_spec(spec.layers, spec.site)), facts)
        layer = facts.layers[0] if spec.layers is None else min(spec.layers)
        row = np.zeros(facts.width_of(spec.site).width, dtype=np.float32)
        edit = Replace(rows=row, layers=(layer,), site=spec.site, alpha=spec.alpha)
        front.compile(LensRequest(edits=(edit,)), facts)
