"""Runs of a sweep that the engine answered without what was asked."""

from __future__ import annotations

import asyncio
import itertools
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inspect_lens._vllm.http import sweep_route
from inspect_lens._vllm.http.sweep_route import _check_ran
from inspect_lens.errors import CaptureError
from inspect_lens.spec import CaptureSpec, LensRequest, Receipt, Zero

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


def test_a_sweep_that_nobody_reads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits when as many lines as there is room for are unread, and then gives up its place."""
    made: list[int] = []

    def endless(runs: Any, spec: Any) -> Any:
        for i in itertools.count():
            made.append(i)
            yield i

    lines = SimpleNamespace(line=lambda event: {"event": event}, end=dict)
    monkeypatch.setattr(sweep_route, "sweep", endless)
    monkeypatch.setattr(sweep_route, "EventLines", lambda: lines)
    monkeypatch.setattr(sweep_route, "UNREAD_S", 0.2)

    async def run() -> list[dict[str, Any]]:
        ended = asyncio.Event()
        runs: Any = SimpleNamespace(stop=lambda: None)
        sweep = sweep_route._Sweep(runs, [cast("Any", None)], lambda _: ended.set())
        sweep.start()
        await asyncio.wait_for(ended.wait(), 30)
        first = await sweep.next()
        assert first is not None
        return [json.loads(line) async for line in sweep.lines(first)]

    found = asyncio.run(run())
    assert len(made) == sweep_route.MOST_UNREAD + 1
    assert [line["event"] for line in found[:-1]] == made[:-1]
    assert "nobody has read one" in found[-1]["error"]["message"]
    assert found[-1]["error"]["code"] == 429
