"""Runs of a sweep that the engine answered without what was asked."""

from __future__ import annotations

import asyncio
import itertools
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inspect_lens._patching.runs import Run
from inspect_lens._vllm.http import sweep_route
from inspect_lens._vllm.http.sweep_route import _check_ran
from inspect_lens._vllm.telemetry import CALLER, Caller
from inspect_lens.errors import CaptureError
from inspect_lens.spec import CaptureSpec, LensRequest, Receipt, Zero
from tests.kit.waiting import soon

ASKED = (
    LensRequest(edits=(Zero(layers=(1,), site="attn_out"),)),
    LensRequest(capture=CaptureSpec(layers=(1,))),
)
BARE = Receipt(
    n_prompt=3, n_completion=1, cache_salted=False, paths=(), engine="inspect_lens",
    version="0", vllm_version="0",
)  # fmt: skip


@pytest.mark.parametrize("asked", ASKED, ids=["edit", "capture"])
@pytest.mark.parametrize("receipt", [None, BARE], ids=["none", "bare"])
def test_a_run_without_what_was_asked_is_refused(
    asked: LensRequest, receipt: Receipt | None
) -> None:
    with pytest.raises(CaptureError, match="without its edit or capture"):
        _check_ran(asked, receipt)


def test_runs_are_those_of_the_tenant_who_sweeps() -> None:
    """vLLM prepares a prompt of a raw form in a thread, which does not know whose it is."""
    pytest.importorskip("vllm")
    tenants: list[str] = []
    mine = Caller({"headers": [(b"authorization", b"Bearer mine")]})

    async def generate(prompt: Any, params: Any, name: str) -> Any:
        loop = asyncio.get_running_loop()
        is_raw = "type" not in prompt
        caller = await loop.run_in_executor(None, CALLER.get) if is_raw else CALLER.get()
        tenants.append(caller.tenant)
        found = SimpleNamespace(logprobs=[{5: SimpleNamespace(logprob=-1.0)}])
        yield SimpleNamespace(outputs=[found])

    async def run() -> Any:
        CALLER.set(mine)
        processor = SimpleNamespace(tokenizer=None)
        engine: Any = SimpleNamespace(input_processor=processor, generate=generate)
        runs = sweep_route.ServerRuns(engine, cast("Any", None), asyncio.get_running_loop())
        return await asyncio.to_thread(lambda: list(runs.logprobs([Run((1, 2))], (5,), 1)))

    assert asyncio.run(run()) == [(0, (-1.0,))]
    assert tenants == [mine.tenant]


def test_a_sweep_that_nobody_reads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes a line when one is read, and gives up its place when nobody reads for a while."""
    made: list[int] = []

    def endless(runs: Any, spec: Any) -> Any:
        for i in itertools.count():
            made.append(i)
            yield i

    lines = SimpleNamespace(line=lambda event: {"event": event}, end=dict)
    monkeypatch.setattr(sweep_route, "sweep", endless)
    monkeypatch.setattr(sweep_route, "EventLines", lambda: lines)
    monkeypatch.setattr(sweep_route, "UNREAD_S", 1.0)

    async def run() -> list[dict[str, Any]]:
        sweeps = sweep_route.Sweeps(lambda: None)
        engine: Any = SimpleNamespace(input_processor=SimpleNamespace(tokenizer=None))
        runs = sweep_route.ServerRuns(engine, cast("Any", None), asyncio.get_running_loop())
        found = sweeps._lines(runs, [cast("Any", None)], "me")
        read = [json.loads(await anext(found)) for _ in range(3)]
        assert list(sweeps._running.values()) == ["me"]
        assert await soon(lambda: not sweeps._running)
        return [*read, *[json.loads(line) async for line in found]]

    found = asyncio.run(run())
    assert [line["event"] for line in found[:-1]] == made == [0, 1, 2]
    assert "nobody has read a line" in found[-1]["error"]["message"]
    assert found[-1]["error"]["code"] == 429
