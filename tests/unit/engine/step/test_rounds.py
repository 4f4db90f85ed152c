"""Rounds: steps that repeat send what they leave together, and all of it before it is missed."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.export.transport import Exporter
from inspect_lens._engine.protocol.messages import ROWS, SCORES, ArenaWriter, Block, seal
from inspect_lens._engine.step import exporter
from inspect_lens.spec import EngineProbe
from tests.kit.steps import FACTS, HIDDEN, Worker, begin, rows
from tests.unit.engine.export.test_ring import LateCopier, cuda_maps

PROBES = {
    "p": EngineProbe(layers=(0, 5), tensors={"weight": np.arange(16.0).reshape(2, 8) / 8 - 1}),
    "q": EngineProbe(layers=(2,), tensors={"weight": np.arange(8.0)[None] / 4 - 1}),
}
N_PROMPT, MOST = 5, 60
NUMBERS = itertools.count(100)

CAPTURES: list[dict[str, Any] | None] = [
    {"layers": (0, 5)},
    {"layers": (2,), "positions": "completion"},
    {"layers": (0, 2, 5), "dtype": "float16"},
    {"layers": (0, 2), "reduce": "norm"},
    {"layers": (5,), "reduce": "mean", "positions": "prompt"},
    None,
]
READS = [(), ("p",), ("p", "q"), ("q",)]


class Sent:
    """What a worker told its front-end of."""

    def __init__(self, patch: pytest.MonkeyPatch, worker: Worker) -> None:
        self.blocks: list[Block] = []
        exporter = worker.stepper._exporter
        original = exporter._send

        def send(reply: str, message: Any) -> bool:
            if isinstance(message, Block):
                self.blocks.append(message)
            return original(reply, message)

        patch.setattr(exporter, "_send", send)

    def tokens(self) -> list[int]:
        """Tokens of each message since the last call."""
        found = [block.shape[1] for block in self.blocks]
        self.blocks.clear()
        return found


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch, worker: Worker) -> Sent:
    return Sent(monkeypatch, worker)


def ask(
    worker: Worker,
    collector: Collector,
    key: str,
    capture: dict[str, Any] | None,
    names: tuple[str, ...] = (),
    *,
    most: int = MOST,
    **manner: bool,
) -> None:
    request = LensRequest(
        capture=None if capture is None else CaptureSpec(**capture),
        probes=[{"name": name, "positions": "all"} for name in names],
    )
    for name in names:
        worker.stepper.probes.add(PROBES[name])
    envelope = seal(
        request, FACTS, reply=collector.address, n_prompt=N_PROMPT, max_tokens=most, probes=PROBES,
        **manner,
    )  # fmt: skip
    begin(worker, collector, key, envelope)


def decode(worker: Worker, keys: list[str], fed: dict[str, int], steps: int = 1) -> None:
    for _ in range(steps):
        worker.step([(key, int(key[1:]), fed[key], 1) for key in keys])
        for key in keys:
            fed[key] += 1


def check(
    collector: Collector,
    key: str,
    capture: dict[str, Any] | None,
    names: tuple[str, ...],
    n_fed: int,
) -> None:
    """Compare all results of a request with the truth."""
    lo, hi = 0, n_fed
    if capture is not None and capture.get("positions") == "completion":
        lo = N_PROMPT
    if capture is not None and capture.get("positions") == "prompt":
        hi = N_PROMPT
    counts = {ROWS: 0 if capture is None else hi - lo, SCORES: n_fed if names else 0}
    taken = collector.take(key, counts=counts, n_fed=n_fed, timeout_s=5)
    number = int(key[1:])
    if capture is not None:
        found = taken.tensors[ROWS].to_float32()
        for rank, layer in enumerate(capture["layers"]):
            truth = rows(number, layer, lo, hi - lo)
            if capture.get("reduce") == "norm":
                truth = truth.norm(dim=1, keepdim=True)
            if capture.get("reduce") == "mean":
                truth = truth.mean(dim=0, keepdim=True)
            np.testing.assert_allclose(found[rank], truth.numpy(), rtol=1e-6)
    if names:
        found = taken.tensors[SCORES].to_float32()[0]
        for column, name in enumerate(names):
            probe = PROBES[name]
            weight = probe.tensors["weight"].to_float32()
            wide = [rows(number, layer, 0, n_fed).numpy() for layer in probe.layers]
            score = sum(w @ v for w, v in zip(wide, weight, strict=True))
            np.testing.assert_allclose(found[:, column], score, rtol=1e-5, atol=1e-4)


def test_steps_that_repeat_are_told_of_together_and_the_last_ones_soon(
    worker: Worker, collector: Collector, sent: Sent
) -> None:
    fed = {"r1": N_PROMPT, "r2": N_PROMPT}
    for key in fed:
        ask(worker, collector, key, CAPTURES[0], most=41)
    worker.step([("r1", 1, 0, N_PROMPT), ("r2", 2, 0, N_PROMPT)])
    assert sent.tokens() == [2 * N_PROMPT]
    decode(worker, ["r1", "r2"], fed, 40)
    # The first is planned anew; of those that are left a round takes half at most.
    assert sent.tokens() == [2 * n for n in (1, 8, 8, 8, 8, 4, 2, 1)]
    for key in fed:
        check(collector, key, CAPTURES[0], (), fed[key])
        worker.stepper.remove(key)
    assert sent.tokens() == []


@pytest.mark.parametrize("leave", ["leave", "flush", "remove", "add", "prefill"])
def test_what_waits_is_sent_before_anything_changes(
    worker: Worker, collector: Collector, sent: Sent, leave: str
) -> None:
    fed = {"r1": N_PROMPT}
    ask(worker, collector, "r1", CAPTURES[2], ("p",))
    worker.step([("r1", 1, 0, N_PROMPT)])
    decode(worker, ["r1"], fed, 4)
    assert sent.tokens() == 2 * [N_PROMPT] + 2 * [1], "rows and scores; three steps wait"
    if leave in ("leave", "flush"):
        getattr(worker.stepper, leave)(["r1"])
    elif leave == "remove":
        worker.stepper.remove("r1")
    else:
        ask(worker, collector, "r2", CAPTURES[1])
        if leave == "prefill":
            worker.step([("r2", 2, 0, N_PROMPT)])
    assert sent.tokens()[:2] == [3, 3]
    check(collector, "r1", CAPTURES[2], ("p",), fed["r1"])


def test_nobody_is_asked_to_send_for_a_request_that_is_not_known(
    worker: Worker, collector: Collector, sent: Sent
) -> None:
    fed = {"r1": N_PROMPT}
    ask(worker, collector, "r1", CAPTURES[0])
    worker.step([("r1", 1, 0, N_PROMPT)])
    decode(worker, ["r1"], fed, 4)
    sent.tokens()
    worker.stepper.leave(["a", "b"])
    worker.stepper.remove("c")
    assert sent.tokens() == []
    worker.stepper.disarm()
    assert sent.tokens() == [3], "an engine that is idle keeps nothing"
    check(collector, "r1", CAPTURES[0], (), fed["r1"])


def test_rows_of_steps_that_ran_in_another_way_are_told_of_apart(
    worker: Worker, collector: Collector, sent: Sent
) -> None:
    ask(worker, collector, "r1", CAPTURES[0])
    worker.step([("r1", 1, 0, N_PROMPT)])
    stepper, fed = worker.stepper, N_PROMPT
    original = stepper.end_step
    paths = iter(["eager", "graph", "graph", "graph", "eager", "eager", "graph", "graph", "graph"])
    stepper.end_step = lambda path: original(next(paths))  # type: ignore[method-assign, assignment]
    for _ in range(9):
        decode(worker, ["r1"], {"r1": fed})
        fed += 1
    told = [(block.shape[1], block.path) for block in sent.blocks]
    assert told == [(5, "eager"), (1, "eager"), (3, "graph"), (2, "eager"), (3, "graph")]
    check(collector, "r1", CAPTURES[0], (), fed)


@pytest.mark.parametrize("kind", ["live", "sum", "bytes", "ring"])
def test_what_cannot_wait_is_sent_with_its_step(
    monkeypatch: pytest.MonkeyPatch, worker: Worker, collector: Collector, kind: str
) -> None:
    """Scores that are looked at, sums of prompts, many bytes, and where there is no room."""
    sent = Sent(monkeypatch, worker)
    keys = [f"r{i}" for i in range(24)] if kind == "ring" else ["r1"]
    for key in keys:
        if kind == "live":
            ask(worker, collector, key, None, ("p",), is_live=True)
        elif kind == "sum":
            ask(worker, collector, key, {"layers": (0,), "reduce": "mean"}, may_overrun=True)
        else:
            ask(worker, collector, key, CAPTURES[2])
    if kind == "bytes":
        monkeypatch.setattr(exporter, "_MOST_BYTES", 2 * 3 * HIDDEN * 4)
    fed = dict.fromkeys(keys, N_PROMPT)
    for key in keys:
        worker.step([(key, int(key[1:]), 0, N_PROMPT)])
    sent.tokens()
    decode(worker, keys, fed, 5)
    told = [n // len(keys) for n in sent.tokens()]
    # Two steps of three rows have as many bytes as may wait; one fills three quarters of the ring.
    assert told == ([1, 2, 2] if kind == "bytes" else [1, 1, 1, 1, 1])


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_whoever_comes_and_goes_gets_what_is_true(
    collector: Collector, data: st.DataObject
) -> None:
    arena = ArenaWriter(4 << 20)
    copier = LateCopier(arena)
    worker = Worker(Exporter(arena, copier), parts=data.draw(st.sampled_from([1, 2, 6, 32])))
    if data.draw(st.booleans()):
        worker.stepper._maps = cuda_maps(worker.state)
    fed: dict[str, int] = {}
    asked: dict[str, tuple[dict[str, Any] | None, tuple[str, ...]]] = {}
    try:
        for _ in range(data.draw(st.integers(1, 12))):
            what = data.draw(st.sampled_from(["come", "come", "go", "run", "run", "some"]))
            if what == "come" and len(fed) < 3:
                key = f"r{next(NUMBERS)}"
                capture, names = (
                    data.draw(st.sampled_from(CAPTURES)),
                    data.draw(st.sampled_from(READS)),
                )
                if capture is None and not names:
                    continue
                asked[key] = capture, names
                ask(worker, collector, key, capture, names, is_live=data.draw(st.booleans()))
                worker.step([(key, int(key[1:]), 0, N_PROMPT)])
                fed[key] = N_PROMPT
            elif what == "go" and fed:
                key = data.draw(st.sampled_from(sorted(fed)))
                if data.draw(st.booleans()):
                    worker.stepper.leave([key])
                worker.stepper.remove(key)
                copier.run()
                check(collector, key, *asked[key], fed.pop(key))
            elif fed:
                keys = sorted(fed)
                if what == "some":
                    keys = keys[: data.draw(st.integers(1, len(keys)))]
                room = N_PROMPT + MOST - 1 - max(fed[key] for key in keys)
                decode(worker, keys, fed, min(room, data.draw(st.integers(1, 20))))
        for key in list(fed):
            worker.stepper.remove(key)
        copier.run()
        for key, n_fed in fed.items():
            check(collector, key, *asked[key], n_fed)
    finally:
        copier.run()
        for key in asked:
            collector.discard(key)
        worker.stepper.close()
