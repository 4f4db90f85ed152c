"""`collect_stream`: batches while a model answers, from a source that is read as it is needed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest

from inspect_lens.collect import _collect, collect_stream
from inspect_lens.data import Captured, Message, ProbeSample
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.probe import CaptureFacts
from tests.kit.fake_server import FakeLensServer, residual

pytestmark = pytest.mark.usefixtures("elsewhere")


def sample(i: int, **more: Any) -> ProbeSample:
    messages = (Message("user", f"tell me about {i}"),)
    return ProbeSample(id=f"s{i}", messages=messages, label=None, group=f"g{i}", **more)


def options(server: FakeLensServer, **more: Any) -> dict[str, Any]:
    return {"layers": [1, 2], "max_tokens": 3, "model_args": {"base_url": server.url}} | more


async def taken(server: FakeLensServer, samples: Any, **more: Any) -> list[list[Captured]]:
    async with collect_stream(
        f"lens/{server.model}", samples, **options(server, **more)
    ) as batches:
        return [batch async for batch in batches]


def test_every_sample_comes_once_with_its_rows(server: FakeLensServer) -> None:
    batches = anyio.run(partial(taken, server, [sample(i) for i in range(7)], batch=3))
    assert [len(batch) for batch in batches] == [3, 3, 1]
    found = {c.record.index: c for batch in batches for c in batch}
    assert sorted(found) == list(range(7))
    for index, captured in found.items():
        assert (captured.record.id, captured.layers) == (f"s{index}", (1, 2))
        assert captured.acts is not None
        wanted = residual(list(captured.token_ids), (1, 2), list(captured.positions))
        np.testing.assert_array_equal(captured.acts.to_float32(), wanted.to_float32())


def test_an_endless_source_is_read_as_it_is_needed(server: FakeLensServer) -> None:
    """What a learner does with a batch decides what is asked next, and nothing runs ahead of it."""
    asked: list[int] = []

    async def endless() -> AsyncIterator[ProbeSample]:
        while True:
            asked.append(len(asked))
            yield sample(asked[-1])

    async def main() -> None:
        async with collect_stream(
            f"lens/{server.model}", endless(), **options(server, batch=4, concurrency=3)
        ) as batches:
            first = await anext(batches)
            await anyio.sleep(0.3)
            assert len(first) == 4
            # Those of the batch, and as many as there are requests at once.
            assert len(asked) <= 4 + 3

    anyio.run(main)


def test_a_failure_ends_the_stream_or_is_told_in_its_place(server: FakeLensServer) -> None:
    def source() -> Iterator[ProbeSample]:
        yield sample(0)
        yield sample(1, completion="said", raw=False)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        anyio.run(partial(taken, server, source()))
    lone = {"model_args": {"base_url": "http://127.0.0.1:9/v1"}}
    for on_error in ("raise", "skip"):
        with pytest.raises(CaptureError, match=r"no server answers at http://127\.0\.0\.1:9"):
            anyio.run(partial(taken, server, [sample(0)], on_error=on_error, **lone))
    wrong_layer = {"layers": [9], "on_error": "skip"}
    ((skipped,),) = anyio.run(partial(taken, server, [sample(0)], **wrong_layer))
    assert skipped.acts is None
    assert skipped.record.error
    for wrong in ({"batch": 0}, {"concurrency": 0}, {"on_error": "ignore"}):
        with pytest.raises(SpecError, match="allowed are 1 or more, and 'raise' or 'skip'"):
            anyio.run(partial(taken, server, [], **wrong))


def test_a_sample_is_skipped_only_while_the_server_is_there(
    server: FakeLensServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    async def facts(model: Any) -> CaptureFacts:
        asked.append(model)
        if len(asked) > 1:
            raise CaptureError("it went away")
        return CaptureFacts()

    monkeypatch.setattr(_collect, "computing_facts", facts)
    with pytest.raises(CaptureError, match="it went away"):
        anyio.run(partial(taken, server, [sample(0)], layers=[9], on_error="skip"))
