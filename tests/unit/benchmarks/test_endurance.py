"""The soak over HTTP: its load, its growth, what it calls wrong, and clients on a fake server."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.endurance_judge import GPU_MIB, SETTLE_S, growth, judge
from benchmarks.endurance_load import GONE, SHARES, Load, Target, draw, outcomes
from benchmarks.shapes import SHAPES
from tests.kit.fake_server import FakeLensServer

TINY = SHAPES["tiny"]


def samples(life: int, level: float, slope: float) -> list[dict[str, Any]]:
    """One life: anything while it settles, then a line, then some processes are gone."""
    at = [0.0, SETTLE_S - 1, *(SETTLE_S + 10 * i for i in range(40)), SETTLE_S + 400]
    held: list[dict[str, Any]] = [
        {"life": life, "s": s, "processes": 4, "own_mib": level + slope * s / 3600} for s in at
    ]
    for i, changes in {0: 9e9, 1: 9e9, -1: 0.0}.items():
        held[i]["own_mib"] = changes
    held[-1]["processes"] = 2
    return held


@given(slope=st.floats(-1e3, 1e3), levels=st.lists(st.floats(0, 1e4), min_size=1, max_size=4))
def test_growth_is_of_a_life_and_not_of_its_level(slope: float, levels: list[float]) -> None:
    each = itertools.chain(*(samples(i, level, slope) for i, level in enumerate(levels)))
    found = growth(list(each), "own_mib")
    assert found == pytest.approx(slope, abs=1e-3)


def part(**changes: Any) -> dict[str, Any]:
    calm = {
        "outcomes": {"plain": {"done": 9}, "left": {"left": 2}, "steer": {"server down": 1}},
        "growth_per_hour": {"own_mib": 10.0, "descriptors": 0.0, "shared_mib": 0.0},
    }
    event = {"kind": "rolled", "outcomes": {"done": 3, "left": 1, GONE: 1}, "processes_left": 0}
    return {"seconds": 3600.0, "plain": calm, "lens": calm, "events": [event], **changes}


def test_a_calm_part_has_no_problem() -> None:
    assert judge(part(), []) == []


def test_what_is_wrong_is_said() -> None:
    lens = part()["lens"]
    grown = lens | {"growth_per_hour": {"own_mib": 200.0, "descriptors": 30.0, "shared_mib": 0.0}}
    assert judge(part(lens=grown), []) == [
        "memory grew by 190 MiB per hour more than without", "30 descriptors more",
    ]  # fmt: skip
    broken = lens | {"outcomes": {"plain": {"HTTP 500: x": 2}}}
    assert judge(part(lens=broken), []) == ["lens: 2 plain: HTTP 500: x"]
    device = {"device_mib_before": 5.0, "device_mib_after": 5.0 + GPU_MIB}
    assert judge(part(**device), []) == []
    more = device | {"device_mib_after": 900.0}
    assert judge(part(**more), []) == ["895 MiB left on the device"]
    assert judge(part(), ["psm_1"]) == ["left in shared memory: psm_1"]
    rolled = {"kind": "rolled", "outcomes": {"ClientPayloadError": 2}, "processes_left": 1}
    assert judge(part(events=[rolled]), []) == [
        "rolled: 1 processes left", "rolled: 2 requests: ClientPayloadError",
    ]  # fmt: skip
    # Of a killed engine, requests have to end, in whatever way.
    killed = {"kind": "killed", "outcomes": {"ClientPayloadError": 2}, "processes_left": 0}
    assert judge(part(events=[killed]), []) == []
    waiting = killed | {"outcomes": {"open": 1}}
    assert judge(part(events=[waiting]), []) == ["killed: 1 requests: open"]


def test_both_servers_are_asked_the_same_at_the_same_times() -> None:
    one, two = (list(itertools.islice(draw(3, 4.0, TINY.vocab), 4000)) for _ in range(2))
    assert one == two
    assert sum(ask.wait_s for ask in one) == pytest.approx(4000 / 4.0, rel=0.1)
    for kind, share in SHARES.items():
        assert sum(ask.kind == kind for ask in one) / 4000 == pytest.approx(share, abs=0.03)
    longest = max(len(ask.prompt) + ask.sampled for ask in one)
    assert longest <= TINY.max_model_len


def test_an_answer_without_what_was_asked_for_is_no_success() -> None:
    with FakeLensServer(model="model", dialect="plain") as server:
        load = Load(Target(server.url, with_lens=True), TINY)
        asyncio.run(load.run(draw(0, 50.0, TINY.vocab), time.monotonic() + 0.6))
    found = outcomes(load.seen)
    assert "done" not in found.get("steer", {})
    assert "done" not in found.get("capture-1", {})
