"""Order of the arms, statistics and schema of the file, and the loads that they are measured on."""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import phases as phases_module
from benchmarks.arms import ARMS, ENGINES, Vector
from benchmarks.host_clock import host_summary, start_host_clock, stop_host_clock
from benchmarks.loads import LOADS, requests
from benchmarks.phases import GarbageClock, Phases
from benchmarks.results_file import WAITS, Results
from benchmarks.run import Bench, order, parse, plan
from benchmarks.shapes import SHAPES
from benchmarks.step_clock import start_clock, stop_clock, summary
from tests.kit.child import ChildError
from tests.kit.files import write_json

NAMES = (
    "default", "eager", "vllm-lens", "hf", "idle", "idle-4", "capture-1", "capture-all", "steer",
    "probes-16x4", "steer-256", "ablate-all", "program", "programs-256", "gate", "mixed",
    "swap", "rotate", "latent", "low-rank", "replace", "renormalise", "logit-lens", "qk-1",
    "idle-router", "router-1",
)  # fmt: skip


def test_arms_have_their_names_and_an_engine_each() -> None:
    assert tuple(ARMS) == NAMES
    assert {arm.engine for arm in ARMS.values()} == set(ENGINES)


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
            run = {"seconds": seconds, "tokens": 100, "preemptions": 2}
            results.add(("m", "8x256", arm), {**run, "garbage_ms": 1.26, "waited_ms": 0.0})
    results.skipped["m", "8x256", "hf"] = "not finished after 5 s"
    write_json(tmp_path / "r.json", results.to_json())
    read = json.loads((tmp_path / "r.json").read_text())
    runs = {run["arm"]: run for run in read["runs"]}
    assert list(runs["idle"]) == [
        "model", "load", "arm", "seconds", "tokens_per_second", "ratio_to_default",
        "ratio_to_vllm_lens", "preemptions",
    ]  # fmt: skip
    assert runs["idle"]["ratio_to_default"] == pytest.approx(1.05)
    assert runs["idle"]["ratio_to_vllm_lens"] == pytest.approx(2.1 / 8)
    assert runs["idle"]["tokens_per_second"] == pytest.approx(100 / 2.1)
    assert runs["idle"]["preemptions"] == 6
    assert runs["default"]["seconds"] == [1.0, 9.0, 2.0]
    assert read["skipped"] == [
        {"model": "m", "load": "8x256", "arm": "hf", "reason": "not finished after 5 s"}
    ]
    assert read["waits"][1] == {
        "model": "m", "load": "8x256", "arm": "vllm-lens", "garbage_ms": [1.3], "waited_ms": [0.0],
    }  # fmt: skip
    assert "1.050" in results.table()


def test_without_a_reference_there_is_no_ratio() -> None:
    results = Results({})
    results.add(("m", "l", "idle"), {"seconds": 1.0, "tokens": 1, "preemptions": 0})
    (run,) = results.to_json()["runs"]
    assert run["ratio_to_default"] is None
    assert run["ratio_to_vllm_lens"] is None


@pytest.mark.parametrize("name", list(LOADS))
def test_requests_are_fixed_by_their_seed(name: str) -> None:
    drawn = requests(LOADS[name], vocab=500, seed=3)
    assert drawn == requests(LOADS[name], vocab=500, seed=3)
    assert drawn != requests(LOADS[name], vocab=500, seed=4)
    assert len(drawn) == LOADS[name].n
    assert all(min(p) >= 3 and max(p) < 500 for p, _ in drawn)


def test_alpaca_lengths_have_the_stated_means_and_bounds() -> None:
    pairs = [
        (len(p), m) for seed in range(5) for p, m in requests(LOADS["alpaca"], vocab=9, seed=seed)
    ]
    prompts, answers = np.array(pairs).T
    assert prompts.mean() == pytest.approx(13, abs=0.5)
    assert answers.mean() == pytest.approx(315, rel=0.03)
    assert (prompts.min(), answers.min()) >= (4, 8)
    assert prompts.max() <= 60
    assert answers.max() <= 1024


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


def test_shapes_have_the_sizes_of_their_models() -> None:
    llama, opt = SHAPES["llama-8b"].config, SHAPES["opt-30b"].config
    per_layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    n_llama = llama["num_hidden_layers"] * per_layer + 2 * llama["vocab_size"] * 4096
    assert n_llama == pytest.approx(8.03e9, rel=0.002)
    d = opt["hidden_size"]
    n_opt = opt["num_hidden_layers"] * (4 * d * d + 2 * d * opt["ffn_dim"]) + opt["vocab_size"] * d
    assert n_opt == pytest.approx(30e9, rel=0.01)
    moe = SHAPES["qwen3-moe-12"].config
    of_experts = 3 * 2048 * moe["moe_intermediate_size"]
    attention = 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128
    layer = moe["num_experts"] * of_experts + attention + 2048 * moe["num_experts"]
    # All 48 layers, and of each the experts of one token.
    ends = 2 * 2048 * moe["vocab_size"]
    assert 48 * layer + ends == pytest.approx(30.5e9, rel=0.01)
    of_a_token = layer - (moe["num_experts"] - moe["num_experts_per_tok"]) * of_experts
    assert 48 * of_a_token + ends == pytest.approx(3.3e9, rel=0.03)


def test_the_step_clock_takes_the_decode_steps_of_the_fullest_batch() -> None:
    steps = [
        (8, 300, 50.0, 60.0, 9.0),
        (8, 8, 3.0, 4.0, 0.6),
        (8, 8, 1.0, 5.0, 0.4),
        (8, 8, 2.0, 6.0, 0.5),
        (4, 4, 0.1, 0.2, 0.1),
    ]
    assert summary(steps) == {
        "sequences": 8,
        "steps": 3,
        "ms_median": 2.0,
        "ms_p90": 3.0,
        "ms_to_next_median": 5.0,
        "ms_to_next_mean": 5.0,
        "call_ms_median": 0.5,
        "first": [[8, 300, 50.0, 60.0, 9.0]],
    }
    assert summary([(1, 9, 1.0, 1.0, 1.0)]) is None


def test_the_step_clock_times_a_step_and_the_way_to_the_next() -> None:
    def execute_model(scheduler_output: Any) -> str:
        time.sleep(0.02)
        return "done"

    runner = SimpleNamespace(execute_model=execute_model)
    worker: Any = SimpleNamespace(model_runner=runner, device=SimpleNamespace(type="cpu"))
    start_clock(worker)
    for n in (2, 0, 3, 3):  # a step without tokens is none
        counts = {str(i): 1 for i in range(n)}
        assert runner.execute_model(SimpleNamespace(num_scheduled_tokens=counts)) == "done"
        time.sleep(0.01)
    timed = stop_clock(worker)
    assert runner.execute_model is execute_model
    assert [step[:2] for step in timed] == [(2, 2), (3, 3)]
    for (_, _, ms, to_next, call), least in zip(timed, (60, 30), strict=True):
        assert 20 <= call <= ms < to_next
        assert to_next >= least, "the empty step lies between"


def test_the_host_clock_times_the_parts_of_a_step_and_leaves_nothing_behind() -> None:
    class Copier:
        def apply(self) -> None:
            time.sleep(0.01)

        def copy(self) -> None:
            time.sleep(0.005)

    copier = Copier()
    arena = SimpleNamespace(place=lambda: None)
    exporter = SimpleNamespace(copier=copier, arena=arena, _send=lambda: None)
    stepper = SimpleNamespace(begin=lambda: time.sleep(0.002), _exporter=exporter)
    stepper.add = lambda: time.sleep(0.003)
    stepper.take_up = lambda: time.sleep(0.001)
    stepper.end_step = lambda: (copier.apply(), copier.copy(), copier.copy(), exporter._send())

    def execute_model(scheduler_output: Any) -> str:
        if scheduler_output.num_scheduled_tokens:
            if len(scheduler_output.num_scheduled_tokens) == 1:
                stepper.add()
                stepper.take_up()
            stepper.begin()
            stepper.end_step()
        return "done"

    runner = SimpleNamespace(execute_model=execute_model, inspect_lens=stepper)
    worker: Any = SimpleNamespace(model_runner=runner, device=SimpleNamespace(type="cpu"))
    before = dict(vars(stepper)), dict(vars(arena)), dict(vars(exporter))
    start_host_clock(worker)
    for n in (1, 2, 0, 2):
        counts = {str(i): 1 for i in range(n)}
        assert runner.execute_model(SimpleNamespace(num_scheduled_tokens=counts)) == "done"
    found = host_summary(stop_host_clock(worker))
    assert runner.execute_model is execute_model
    assert (dict(vars(stepper)), dict(vars(arena)), dict(vars(exporter))) == before
    assert not vars(copier), "its class has the methods"
    assert found is not None
    assert (found["sequences"], found["steps"], found["end_on_device_ms"]) == (2, 2, 0.0)
    wall = found["wall_ms"]
    assert wall["begin"] >= 2
    assert wall["add"] == 0, "nobody is new there"
    ((sequences, tokens, first),) = found["first"]
    assert (sequences, tokens) == (1, 1)
    assert first["step"] >= first["add"] + first["begin"] + first["end"]
    assert first["add"] >= 3
    assert first["take_up"] >= 1
    assert wall["readout"] >= 10
    assert wall["copy"] >= 10, "both copies of the step"
    assert wall["step"] >= wall["begin"] + wall["end"] >= wall["readout"] + wall["copy"]
    assert all(found["thread_ms"][name] <= wall[name] + 0.5 for name in wall)
    assert host_summary([(1, 9, {}, 0.0)]) is None


def test_means_tell_of_what_is_done_for_some_steps_together() -> None:
    steps = [(2, 2, {"end": (8.0 * (i % 4 == 3), 0.0)}, 1.0 * (i % 4 == 3)) for i in range(8)]
    found = host_summary(steps)
    assert found is not None
    assert (found["wall_ms"]["end"], found["wall_ms_mean"]["end"]) == (0, 2)
    assert (found["end_on_device_ms"], found["end_on_device_ms_mean"]) == (0, 0.25)


def test_phases_are_those_that_a_client_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(phases_module.time, "perf_counter", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    class Core:
        def get_output(self) -> None:
            passes(0.005)

    class Engine:
        engine_core = Core()

        def add_request(self) -> str:
            passes(0.01)
            return "id"

    llm = SimpleNamespace(llm_engine=Engine())
    with Phases(llm) as phases:
        assert [llm.llm_engine.add_request() for _ in range(3)] == ["id"] * 3
        for _ in range(20):
            llm.llm_engine.engine_core.get_output()
        passes(0.03)
        worked = time.thread_time()
        while time.thread_time() < worked + 0.02:
            pass
    found = phases.report()
    assert set(found) <= set(WAITS)
    for name, ms in {"add_ms": 30, "first_steps_ms": 80, "steps_ms": 100, "end_ms": 30}.items():
        assert found[name] == pytest.approx(ms)
    assert found["busy_ms"] >= 0
    assert 0 <= found["add_own_ms"] < 15, "nothing but the clock was at work"
    assert 20 <= found["end_own_ms"] < 35
    assert not vars(llm.llm_engine)
    assert not vars(Engine.engine_core), "nothing is left behind"


class FakeChild:
    """Answers what it is told to."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.closed = False
        self.at_work: list[str] = []

    def pause(self) -> None:
        self.at_work.append("pause")

    def resume(self) -> None:
        self.at_work.append("resume")

    def ask(self, _timeout_s: float, **message: Any) -> dict[str, Any]:
        self.asked.append(message)
        self.at_work.append("ask")
        answer = self.answers.pop(0) if self.answers else {"seconds": 1.0}
        if isinstance(answer, Exception):
            raise answer
        return {"tokens": 48, "preemptions": 0, "shared_bytes": 5, **answer}

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


def test_a_run_warms_up_interleaves_and_writes(tmp_path: Path) -> None:
    plain, lens = FakeChild(), FakeChild({"seconds": 9.0}, {"seconds": 3.0}, {"seconds": 5.0})
    made = bench(tmp_path, ["default", "idle"], plain=plain, lens=lens)
    made.run(["default", "idle"])
    runs = {r["arm"]: r for r in json.loads((tmp_path / "r.json").read_text())["runs"]}
    assert runs["idle"]["seconds"] == [3.0, 5.0]
    assert runs["idle"]["ratio_to_default"] == 4.0
    assert [m["seed"] for m in plain.asked] == [0, 0, 1]
    assert made.results.engines["tiny/lens"]["peak_shared_bytes"] == 5


@pytest.mark.parametrize("is_paused", [False, True])
def test_engines_rest_between_their_turns_where_that_is_asked_for(
    tmp_path: Path, is_paused: bool
) -> None:
    plain, lens = FakeChild(), FakeChild(ChildError("SpecError: no"))
    made = bench(tmp_path, ["default", "idle"], plain=plain, lens=lens)
    made.options.pause_waiting = is_paused
    made.run(["default", "idle"])
    assert plain.at_work == (["resume", "ask", "pause"] if is_paused else ["ask"]) * 3
    assert lens.at_work == (["resume", "ask", "pause"] if is_paused else ["ask"])


def test_an_arm_whose_request_is_refused_is_skipped_with_the_reason(tmp_path: Path) -> None:
    made = bench(tmp_path, ["steer"], lens=FakeChild(ChildError("SpecError: no")))
    made.run(["steer"])
    assert made.results.skipped == {("tiny", "smoke", "steer"): "SpecError: no"}
    assert json.loads((tmp_path / "r.json").read_text())["runs"] == []


def test_an_arm_that_does_not_finish_loses_its_engine(tmp_path: Path) -> None:
    slow = FakeChild(ChildError("no answer"))
    made = bench(tmp_path, ["vllm-lens"], **{"vllm-lens": slow})
    made.options.run_limit = 0.5
    made.run(["vllm-lens"])
    assert made.results.skipped["tiny", "smoke", "vllm-lens"] == "not finished after 0 s"
    assert slow.closed


def test_an_arm_that_cannot_run_says_why(tmp_path: Path) -> None:
    made = bench(tmp_path, ["vllm-lens"])
    assert made.start() == []
    assert "--peer-path" in made.results.skipped["tiny", "smoke", "vllm-lens"]


def test_the_garbage_clock_counts_what_is_collected_while_it_is_entered() -> None:
    with GarbageClock() as clock:
        before = clock.seconds
        gc.collect()
    assert clock.seconds > before
    after = clock.seconds
    gc.collect()
    assert clock.seconds == after


def test_the_runs_of_another_command_are_added_to_a_file() -> None:
    run = {"seconds": 2.0, "tokens": 100, "preemptions": 1, "add_ms": 3.0}
    one = Results({"command": "a", "arms": {"default": "x"}, "gpu": "H"})
    one.add(("m", "8x256", "default"), run)
    one.add(("m", "8x256", "default"), run | {"seconds": 4.0})
    one.skipped["m", "8x256", "idle"] = "why"
    one.engines["m/plain"] = {"options": {}}
    same = Results.kept(one.to_json(), {"command": "b", "arms": {"idle": "y"}})
    assert same.environment == {
        "command": "a && b", "arms": {"default": "x", "idle": "y"}, "gpu": "H",
    }  # fmt: skip
    assert same.to_json() | {"environment": 0} == one.to_json() | {"environment": 0}
    same.add(("n", "8x256", "default"), run)
    assert [r["model"] for r in same.to_json()["runs"]] == ["m", "n"]
