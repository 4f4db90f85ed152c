"""`collect_stream`: batches of rows while a model answers, without a store."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Literal, TypeAlias

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from inspect_ai.model import Model

from inspect_lens._base.concurrency import first_error
from inspect_lens.data import Captured, ProbeSample
from inspect_lens.spec import Layers

from ._collect import Request, capture_or_skip, opened, reached, request_of

__all__ = ["collect_stream"]

Samples: TypeAlias = Iterable[ProbeSample] | AsyncIterable[ProbeSample]


@asynccontextmanager
async def collect_stream(
    model: str | Model,
    samples: Samples,
    *,
    layers: Layers | list[int] = "all",
    positions: str | list[int] = "completion",
    max_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    batch: int = 64,
    concurrency: int = 64,
    on_error: Literal["raise", "skip"] = "raise",
    model_args: dict[str, Any] | None = None,
) -> AsyncIterator[AsyncIterator[list[Captured]]]:
    """Capture activations of samples as they come, and hand them out in batches.

    For whatever learns while a model answers: reinforcement learning, a draft model, a probe that
    is updated. Samples are taken from their source one at a time, so it may be endless and may
    depend on what came before. While nobody takes a batch, at most `concurrency` samples beside
    one batch are under way or waiting, and no further ones are taken. Leaving the context ends the
    requests that are under way.

    Args:
        model: `vllm-lens/…` or `lens/…`, or a model of one of these.
        samples: what to capture; those without a completion are answered by the model.
        layers: `all`, or layer numbers.
        positions: tokens to keep: `completion`, `prompt`, `all`, `last_prompt` or numbers.
        max_tokens: longest answer.
        temperature: of sampling.
        seed: of sampling; that of a sample is `seed` plus its number.
        batch: samples in a batch; the last one has what is left.
        concurrency: requests at once.
        on_error: `raise` ends the stream; `skip` gives the sample without rows, with the reason,
            as long as the server is there.
        model_args: for `get_model`, such as `base_url`.

    Yields:
        Batches of samples in the order in which they are done; `record.index` is the number of the
        sample, and `acts` (layers, rows, hidden) has its rows.

    Raises:
        SpecError: a setting is wrong.
        CaptureError: the server does not start or answer, or a sample failed.

    Example:
        <!-- test: server -->
        ```python
        import anyio

        from inspect_lens.collect import collect_stream
        from inspect_lens.data import load_dataset


        async def main() -> None:
            data = load_dataset("organism", path="organism/data/probe_train.jsonl", limit=6)
            model = "vllm-lens/organism/checkpoint"
            async with collect_stream(
                model, data.samples, layers=[4], max_tokens=8, batch=4
            ) as batches:
                sizes = [len(batch) async for batch in batches]
            assert sizes == [4, 2]


        anyio.run(main)
        ```
    """
    how = request_of(
        "collect_stream", layers, positions, on_error,
        {"concurrency": concurrency, "batch": batch},
        max_tokens=max_tokens, temperature=temperature, seed=seed,
    )  # fmt: skip
    send, receive = anyio.create_memory_object_stream[Captured](0)
    try:
        async with (
            opened(model, concurrency, model_args) as live,
            receive,
            anyio.create_task_group() as tasks,
        ):
            await reached(live)
            tasks.start_soon(_feed, live, samples, how, send, concurrency, on_error)
            yield _batches(receive, batch)
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise first_error(group) from None


async def _feed(
    model: Model,
    samples: Samples,
    how: Request,
    send: MemoryObjectSendStream[Captured],
    concurrency: int,
    on_error: str,
) -> None:
    """Send what each sample gives; a place is free again when somebody has taken its rows."""
    places = anyio.Semaphore(concurrency)

    async def one(index: int, sample: ProbeSample) -> None:
        try:
            await send.send(await capture_or_skip(model, index, sample, how, on_error))
        finally:
            places.release()

    async with send, anyio.create_task_group() as tasks:
        source = _each(samples)
        for index in count():
            await places.acquire()
            if (sample := await anext(source, None)) is None:
                return
            tasks.start_soon(one, index, sample)


async def _each(samples: Samples) -> AsyncIterator[ProbeSample]:
    if isinstance(samples, AsyncIterable):
        async for sample in samples:
            yield sample
    else:
        for sample in samples:
            yield sample


async def _batches(
    receive: MemoryObjectReceiveStream[Captured], size: int
) -> AsyncIterator[list[Captured]]:
    held: list[Captured] = []
    async for captured in receive:
        held.append(captured)
        if len(held) == size:
            yield held
            held = []
    if held:
        yield held
