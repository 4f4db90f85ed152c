"""Order of the arms, statistics and schema of the file, and the loads that they are measured on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import timeline
from benchmarks.arms import ARMS, ENGINES, Vector
from benchmarks.loads import LOADS, requests
from benchmarks.results_file import Results
from benchmarks.run import Bench, order, parse, plan
from benchmarks.shapes import SHAPES
from tests.kit.child import ChildError
from tests.kit.files import write_json


def test_the_order_is_reversed_every_other_repetition_after_a_warm_up() -> None:
    turns = list(plan(["x"], ["a", "b", "c"], 3))
    assert [repetition for _, repetition, _ in turns] == [-1, 0, 1, 2]
    assert [turn for _, _, turn in turns[1:]] == [["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"]]
    assert order(["a"], 1) == ["a"]
    assert [n for _, n, _ in plan(["x"], ["a"], 1, 3)] == [-3, -2, -1, 0]


def test_ratios_are_of_medians_and_the_file_has_the_agreed_keys(tmp_path: Path) -> None:
    results = Results({"gpu": "x"})
    for arm, values in {
        "default": [1.0, 9.0, 2.0],
        "vllm-lens": [8.0],
        "idle": [2.0, 2.2, 2.1],
    }.items():
        for seconds in values:
            cpu_s = {"API server": seconds / 2} | ({"client": 3.0} if seconds > 2 else {})
            run = {"seconds": seconds, "tokens": 100, "preemptions": 2, "cpu_s": cpu_s}
            results.add(("m", "8x256", arm), run)
    results.skipped["m", "8x256", "hf"] = "not finished after 5 s"
    write_json(tmp_path / "r.json", results.to_json())
    read = json.loads((tmp_path / "r.json").read_text())
    runs = {run["arm"]: run for run in read["runs"]}
    assert list(runs["idle"]) == [
        "model", "load", "arm", "seconds", "tokens_per_second", "ratio_to_default",
        "ratio_to_vllm_lens", "preemptions", "cpu_s",
    ]  # fmt: skip
    assert runs["idle"]["ratio_to_default"] == pytest.approx(1.05)
    assert runs["idle"]["ratio_to_vllm_lens"] == pytest.approx(2.1 / 8)
    assert runs["idle"]["tokens_per_second"] == pytest.approx(100 / 2.1)
    assert runs["idle"]["preemptions"] == 6
    assert runs["default"]["seconds"] == [1.0, 9.0, 2.0]
    assert read["skipped"] == [
        {"model": "m", "load": "8x256", "arm": "hf", "reason": "not finished after 5 s"}
    ]
    assert runs["idle"]["cpu_s"] == {"API server": 1.05, "client": 3.0}
    assert runs["default"]["cpu_s"] == {"API server": 1.0, "client": 0.0}
    results.add(("m", "1", "idle"), run | {"phases": {"decode": 2.0}})
    assert results.to_json()["runs"][-1]["phases"] == {"decode": 2.0}
    assert "1.050" in results.table()


def test_a_timeline_counts_what_is_within_once_and_steps_that_read_prompts_apart() -> None:
    def event(cat: str, name: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
        at = {"ts": ts, "dur": dur, "pid": 1, "tid": tid}
        return {"ph": "X", "cat": cat, "name": name, **at}

    events = [
        event("user_annotation", "execute_context_8(64)_generation_0(0)", -90_000, 50),
        event("gpu_user_annotation", "execute_context_8(64)_generation_0(0)", -60_000, 50_000, 7),
        event("cpu_op", "aten::linear", -80_000, 10),
        event("kernel", "gemm", -50_000, 40_000, 7),
        event("user_annotation", "execute_context_0(0)_generation_8(8)", 0, 50),
        event("user_annotation", "execute_context_0(0)_generation_8(8)", 100, 50),
        event("gpu_user_annotation", "execute_context_0(0)_generation_8(8)", 3, 50, 7),
        event("cpu_op", "aten::linear", 10, 40),
        event("cpu_op", "aten::mm", 20, 20),
        event("cuda_runtime", "cudaLaunchKernel", 30, 8),
        event("cpu_op", "aten::topk", 60, 6),
        event("cpu_op", "aten::mm", 20, 2, 2),
        event("kernel", "gemm", 40, 30, 7),
        event("gpu_memcpy", "Memcpy DtoH", 60, 30, 8),
        {"ph": "i", "name": "a mark", "ts": 5},
    ]
    assert timeline.table([]) == "the trace names no step\n"
    lines = timeline.table(events).splitlines()
    # From -50,000 to -10,000, and from 40 to 90, the latter over two steps.
    assert lines[:2] == [
        "3 steps, 90.1 ms from the first to the last; "
        "device busy 40.0 ms, 40.0 ms of it with prompts",
        "2 steps only decode, 100 us from one to the next in the median; "
        "device busy 25 us of a step",
    ]
    micros = {line.split("  ")[-1]: float(line.split()[0]) for line in lines if line[:1] == " "
              and "/step" not in line}  # fmt: skip
    assert micros["aten::linear"] == (40 - 20) / 2
    assert micros["aten::mm"] == (20 - 8 + 2) / 2
    assert micros["cudaLaunchKernel"] == 8 / 2
    assert micros["gemm"] == micros["Memcpy DtoH"] == 15


@pytest.mark.parametrize("name", list(LOADS))
def test_requests_are_fixed_by_their_seed(name: str) -> None:
    drawn = requests(LOADS[name], vocab=500, seed=3)
    assert drawn == requests(LOADS[name], vocab=500, seed=3)
    assert drawn != requests(LOADS[name], vocab=500, seed=4)
    assert len(drawn) == LOADS[name].n
    assert all(min(p) >= 3 and max(p) < 500 for p, _ in drawn)


def test_each_request_of_an_arm_asks_for_what_the_arm_is_called() -> None:
    shape = SHAPES["llama-8b"]
    vectors: list[Vector] = []
    for i in range(512):
        request: Any = ARMS["steer-256"].request(shape, i)
        vectors += request["apply_steering_vectors"]
    assert len({v.values.tobytes() for v in vectors}) == 256
    assert {v.values.shape for v in vectors} == {(4096,)}
    mixed = [ARMS["mixed"].request(shape, i) for i in range(8)]
    assert [bool(r) for r in mixed] == [False, True] * 4
    assert sum("apply_steering_vectors" in (r or {}) for r in mixed) == 2
    assert ENGINES["lens-4"].environment(shape) == {"INSPECT_LENS_LAYERS": "0,10,20,31"}
    assert all(
        ARMS[name].request(shape, 0) is None for name in ("default", "eager", "idle", "idle-4")
    )


class FakeChild:
    """Answers what it is told to."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.closed = False

    def ask(self, _timeout_s: float, **message: Any) -> dict[str, Any]:
        self.asked.append(message)
        answer = self.answers.pop(0) if self.answers else {"seconds": 1.0}
        if isinstance(answer, Exception):
            raise answer
        return {"tokens": 48, "preemptions": 0, "shared_bytes": 5, "cpu_s": {}, **answer}

    def stop(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def bench(tmp_path: Path, arms: list[str], **children: FakeChild) -> Bench:
    out = ["--out", str(tmp_path / "r.json"), "--models", "tiny", "--loads", "smoke"]
    options = parse([*out, "--arms", *arms, "--repetitions", "2"])
    options.work, options.deadline = str(tmp_path), float("inf")
    made = Bench(options, "tiny", Results({}))
    for kind, child in children.items():
        made.children[kind] = child  # type: ignore[assignment]
        made.results.engines[f"tiny/{kind}"] = {"peak_shared_bytes": 0}
    return made


@pytest.mark.parametrize("arm", ["capture-1-tcp", "rows-1", "scores-16x4", "text"])
def test_what_only_a_server_can_do_is_not_run_offline(tmp_path: Path, arm: str) -> None:
    made = bench(tmp_path, [arm], lens=FakeChild())
    assert made.start() == []
    assert "--served" in made.results.skipped["tiny", "smoke", arm]
    made.options.served = True
    assert made.start() == [arm]


def test_a_run_warms_up_interleaves_and_writes(tmp_path: Path) -> None:
    plain, lens = FakeChild(), FakeChild({"seconds": 9.0}, {"seconds": 3.0}, {"seconds": 5.0})
    made = bench(tmp_path, ["default", "idle"], plain=plain, lens=lens)
    made.run(["default", "idle"])
    runs = {r["arm"]: r for r in json.loads((tmp_path / "r.json").read_text())["runs"]}
    assert runs["idle"]["seconds"] == [3.0, 5.0]
    assert runs["idle"]["ratio_to_default"] == 4.0
    assert [m["seed"] for m in plain.asked] == [0, 0, 1]
    assert made.results.engines["tiny/lens"]["peak_shared_bytes"] == 5


def test_an_arm_that_does_not_finish_loses_its_engine(tmp_path: Path) -> None:
    slow = FakeChild(ChildError("no answer"))
    made = bench(tmp_path, ["vllm-lens"], **{"vllm-lens": slow})
    made.options.run_limit = 0.5
    made.run(["vllm-lens"])
    assert made.results.skipped["tiny", "smoke", "vllm-lens"] == "not finished after 0 s"
    assert slow.closed
