"""The engine of an API server, as patching uses it: a thread asks, the event loop runs."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar, cast

from inspect_lens._patching import (
    Prompt,
    Rows,
    Run,
    capture_spec,
    chat_ending,
    is_chat,
    messages_of,
)
from inspect_lens._token_texts import TokenTexts
from inspect_lens._vllm.compat.one_token import one_token
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.spec import NATIVE_KEY, LensRequest, Receipt, Site, judging, result_name

__all__ = ["Ask", "ServerRuns"]

T = TypeVar("T")

Ask = Callable[[str, str, Any], Awaitable[tuple[int, Any]]]
"""Method, path and body to this server's own routes; status and JSON back."""


class ServerRuns:
    """Runs of one sweep; its methods are called in a thread that is not the event loop's.

    Args:
        engine: vLLM's client of the engine.
        ask: the server's own routes, which know its chat template.
        loop: on which the engine's outputs come.
    """

    def __init__(self, engine: Any, ask: Ask, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._ask, self._loop = engine, ask, loop
        self._texts = TokenTexts.from_tokenizer(engine.input_processor.tokenizer)
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()
        self._is_stopped = False

    def stop(self) -> None:
        """Abort what runs, and start nothing more: the thread gets `CancelledError`."""
        with self._lock:
            self._is_stopped = True
            running = list(self._open)
        for future in running:
            future.cancel()

    def tokens(self, prompt: Prompt) -> list[int]:
        """See `Runs.tokens`."""
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
        """See `Runs.texts`."""
        return self._texts.texts(ids)

    def capture(self, ids: Sequence[int], layers: Sequence[int] | None, site: Site) -> Rows:
        """See `Runs.capture`."""
        request = LensRequest(capture=capture_spec(layers, site))
        completion = self._wait(self._run(Run(ids), (), request))
        values = completion.inspect_lens_tensors[result_name(site)].to_float32()
        return Rows(tuple(completion.inspect_lens.capture.layers), values)

    def logprobs(
        self, runs: Sequence[Run], tokens: Sequence[int], in_flight: int
    ) -> Iterator[tuple[int, tuple[float, ...]]]:
        """See `Runs.logprobs`."""
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
        prompt = {"prompt_token_ids": list(run.ids)}
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
            if self._is_stopped:
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
