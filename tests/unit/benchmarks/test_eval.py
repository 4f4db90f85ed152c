"""The benchmark of whole evals: its plan, its limits, and its arms on a server of formulas."""

from __future__ import annotations

import gc
import json
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import eval as driver
from benchmarks import eval_arms
from inspect_lens.probe import Probe, ProbeCard
from inspect_lens.spec import parse_extra_args
from tests.kit.fake_server import FakeLensServer

ARMS = driver.ARMS


def test_over_rounds_each_arm_stands_in_each_place_and_after_each_other_arm() -> None:
    names = ("a", "b")
    rounds = [driver.plan(ARMS, names, i) for i in range(len(ARMS))]
    for one in rounds:
        assert Counter(one) == Counter((load, arm) for load in names for arm in ARMS)
    for place in range(len(ARMS)):
        assert {one[place][1] for one in rounds} == set(ARMS)
    pairs = Counter(
        (before[1], after[1])
        for one in rounds
        for before, after in pairwise(one)
        if before[0] == after[0]
    )
    assert set(pairs.values()) == {len(names)}
    assert len(pairs) == len(ARMS) * (len(ARMS) - 1)


def run(arm: str, seconds: float, *, load: str = "x", number: int = 0) -> dict[str, Any]:
    used = {"loop_cpu_s": 1.0, "cpu_s": {"API server": seconds / 2}}
    return {"arm": arm, "load": load, "round": number, "seconds": seconds, **used}


def test_ratios_are_of_medians_and_a_limit_that_is_missed_is_said() -> None:
    runs = [run("plain", s, number=i) for i, s in enumerate((10.0, 99.0, 9.0))]
    runs += [run(arm, 10.0 * limit, number=0) for arm, limit in driver.LIMITS.items()]
    summary = driver.summarise(runs)
    assert summary["x"]["plain"]["seconds"] == 10.0
    assert summary["x"]["capture"]["ratio"] == pytest.approx(1.03)
    assert summary["x"]["plain"]["cpu_s"] == {"API server": 5.0}
    assert driver.limits_missed(driver.summarise([*runs])) == []
    runs.append(run("capture", 11.0))
    (missed,) = driver.limits_missed(driver.summarise(runs))
    assert missed.startswith("x: capture: 1.065")
    # A scorer of any kind takes time: what ours takes beyond that stands beside.
    beside = driver.summarise([*runs, run("plain-scored", 10.2)])["x"]
    assert beside["probe-scored"]["ratio_to_scored"] == pytest.approx(10.3 / 10.2)
    assert "ratio_to_scored" not in beside["capture"]
    # What was not measured does not hold.
    assert len(driver.limits_missed(driver.summarise(runs[:3]))) == len(driver.LIMITS)
    assert "| x | plain | 10.00 (9.00 to 99.00) | 1.000 | - |" in driver.table(summary)


@pytest.mark.slow
def test_every_arm_runs_and_gets_what_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLLM_BASE_URL", raising=False)
    # It collects before each run, which takes a second in a process of many tests.
    monkeypatch.setattr(gc, "collect", lambda: 0)
    card = ProbeCard(name="benchmark/direction", layers=(2,), hidden=8)
    probe = Probe.from_direction(np.ones(8), card=card).save(tmp_path / "probe")
    loads = {
        "few": {"connections": 2, "samples": 3, "turns": 1},
        "agent": {"connections": 2, "samples": 2, "turns": 3},
    }
    plan = driver.plan(ARMS, list(loads), 0)
    with (
        FakeLensServer(model="model") as lens,
        FakeLensServer(model="model", dialect="plain") as bare,
    ):
        servers = {"plain": {"url": bare.url, "pid": os.getppid()}}
        servers["lens"] = servers["plain"] | {"url": lens.url}
        asked = {
            "folder": str(tmp_path), "served": "model", "warm": 2, "layer": 2, "vocab": 100,
            "longest": 64, "prompts": None, "probe": str(probe), "loads": loads, "round": 0,
            "servers": servers, "plan": plan,
        }  # fmt: skip
        assert eval_arms.main(json.dumps(asked)) == 0
        posted, plain = lens.requests, bare.requests
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if '"round"' in line]
    assert [(line["load"], line["arm"]) for line in lines] == asked["plan"]
    assert all(line["seconds"] > 0 and line["log_bytes"] > 0 for line in lines)
    assert all(line["cpu_s"]["client"] > 0 for line in lines)
    # Warm-up of two, then three samples, then two agents of three turns; on one server each.
    assert len(plain) == 2 * (2 + 3 + 6)  # without a scorer, and with one
    assert len(posted) == 6 * (2 + 3 + 6)
    requests = [parse_extra_args(body.get("vllm_xargs")) for body in posted]
    kinds = Counter(
        "nothing" if r is None else "probes" if r.probes else r.capture.reduce if r.capture else "?"
        for r in requests
    )
    assert kinds == {"nothing": 22, "probes": 11, "none": 22, "mean": 11}
    longest = max(plain, key=lambda body: len(body["messages"]))
    roles = [message["role"] for message in longest["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "tool"]


def test_an_arm_that_does_not_get_what_it_asks_for_ends_the_round(tmp_path: Path) -> None:
    class Made:
        status, error = "success", None
        samples = ()

    with pytest.raises(RuntimeError, match="capture"):
        eval_arms._check(Made(), "capture", 1)
