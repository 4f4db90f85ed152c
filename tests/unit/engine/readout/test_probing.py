"""Probes in the worker: their numbers equal the formula on the rows, and rows stay rows."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.protocol.messages import ROWS, SCORES, Envelope, seal
from inspect_lens._engine.readout.readers import ProbeReader
from inspect_lens.errors import SpecError
from inspect_lens.spec import EngineProbe, ProbeUse, TapPoint
from tests.kit.steps import FACTS, HIDDEN, LAYERS, Worker, exporter, rows
from tests.kit.waiting import until

RNG = np.random.default_rng(0)


def linear(*layers: int) -> EngineProbe:
    weight = RNG.normal(size=(len(layers), HIDDEN)).astype(np.float32)
    return EngineProbe(layers=layers, tensors={"weight": weight, "bias": np.float32(0.25)})


def mlp(*layers: int) -> EngineProbe:
    shapes = {"w1": (len(layers), 3, HIDDEN), "b1": (3,), "w2": (3,), "b2": ()}
    tensors = {n: np.asarray(RNG.normal(size=s), dtype=np.float32) for n, s in shapes.items()}
    return EngineProbe(kind="mlp", layers=layers, tensors=tensors)


def attention(layer: int) -> EngineProbe:
    tensors = {n: RNG.normal(size=(2, HIDDEN)).astype(np.float32) for n in ("query", "value")}
    return EngineProbe(kind="attention", layers=(layer,), tensors=tensors)


def weights(probe: EngineProbe, name: str) -> Any:
    return probe.tensors[name].to_float32().astype(np.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_readout_is_the_formula_of_each_kind(dtype: torch.dtype) -> None:
    taps = tuple(TapPoint("resid_post", i) for i in LAYERS)
    probes = [linear(0, 5), mlp(2, 5), attention(2), linear(2)]
    x = torch.randn(3, 3000, HIDDEN).to(dtype)
    out = ProbeReader(probes, taps, torch.device("cpu"))(x).numpy().sum(axis=0)
    wide = x.double().numpy()
    expected = weights(probes[0], "weight")
    np.testing.assert_allclose(
        out[:, 0], wide[0] @ expected[0] + wide[2] @ expected[1], rtol=1e-4, atol=1e-4
    )
    w1 = weights(probes[1], "w1")
    units = wide[1] @ w1[0].T + wide[2] @ w1[1].T + weights(probes[1], "b1")
    score = np.maximum(units, 0) @ weights(probes[1], "w2") + weights(probes[1], "b2")
    np.testing.assert_allclose(out[:, 1], score, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        out[:, 2:6],
        wide[1] @ np.concatenate([weights(probes[2], n) for n in ("query", "value")]).T,
        rtol=1e-4,
        atol=1e-4,
    )
    np.testing.assert_allclose(
        out[:, 6], wide[1] @ weights(probes[3], "weight")[0], rtol=1e-4, atol=1e-4
    )


def test_an_mlp_over_two_pipeline_stages_is_read_where_its_last_layer_is() -> None:
    first, last = (TapPoint("resid_post", layer) for layer in (0, 5))
    probes = [mlp(0, 5), linear(0, 5)]
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(2, 7, HIDDEN)).astype(np.float32))
    cpu = torch.device("cpu")
    whole = ProbeReader(probes, [first, last], cpu)(x)
    early = ProbeReader(probes, [first], cpu)(x[:1])
    assert not early[..., 0].any()
    # The rows of the first layer come from the other stage, for the MLP alone.
    late = ProbeReader(probes, [last, first], cpu, n_borrowed=1)(x.flip(0))
    torch.testing.assert_close(early + late, whole)


def begin(
    worker: Worker,
    collector: Collector,
    key: str,
    request: LensRequest,
    probes: dict[str, EngineProbe],
    n_prompt: int = 6,
    is_live: bool = False,
) -> Envelope:
    envelope = seal(
        request, FACTS, reply=collector.address, n_prompt=n_prompt, max_tokens=8, probes=probes,
        is_live=is_live,
    )  # fmt: skip
    for probe in probes.values():
        worker.stepper.probes.add(probe)
    collector.open(key, envelope)
    worker.stepper.add(key, envelope.pack())
    return envelope


def test_scores_and_rows_of_different_positions_come_from_one_pass(
    worker: Worker, collector: Collector
) -> None:
    probe = linear(0, 5)
    both = LensRequest(
        capture=CaptureSpec(layers=(2, 5), positions=(1, 4, 7)),
        probes=(ProbeUse(name="p", positions="all"),),
    )
    only = LensRequest(probes=(ProbeUse(name="p", positions="completion"),))
    begin(worker, collector, "a", both, {"p": probe})
    begin(worker, collector, "b", only, {"p": probe})
    worker.step([("a", 1, 0, 6), ("b", 2, 0, 4)])
    worker.step([("b", 2, 4, 2), ("a", 1, 6, 1)])
    worker.step([("a", 1, 7, 1), ("b", 2, 6, 1)])
    got = collector.take("a", counts={ROWS: 3, SCORES: 8}, n_fed=8, timeout_s=5)
    expected = torch.stack([rows(1, layer, 0, 8) for layer in (2, 5)])[:, [1, 4, 7]]
    np.testing.assert_array_equal(got.tensors[ROWS].storage, expected.numpy())
    truth = sum(
        rows(1, layer, 0, 8).double().numpy() @ w
        for layer, w in zip((0, 5), weights(probe, "weight"), strict=True)
    )
    np.testing.assert_allclose(got.tensors[SCORES].storage.sum(axis=0)[:, 0], truth, rtol=1e-5)
    other = collector.take("b", counts={ROWS: 0, SCORES: 1}, n_fed=7, timeout_s=5)
    truth = sum(
        rows(2, layer, 6, 1).double().numpy() @ w
        for layer, w in zip((0, 5), weights(probe, "weight"), strict=True)
    )
    np.testing.assert_allclose(other.tensors[SCORES].storage.sum(axis=0)[:, 0], truth, rtol=1e-5)
    assert other.tensors.keys() == {SCORES}


def test_positions_that_one_request_named_are_not_those_of_the_next(
    worker: Worker, collector: Collector
) -> None:
    """In its place, whose capture and probes go on for different lengths."""
    for key, positions in (("y", (1, 4)), ("z", "prompt")):
        request = LensRequest(
            capture=CaptureSpec(layers=(2,), positions=positions),
            probes=[{"name": "p", "positions": "all"}],
        )
        begin(worker, collector, key, request, {"p": linear(2)})
        worker.step([(key, 1, 0, 6)])
        worker.step([(key, 1, 6, 1)])
        worker.stepper.leave([key])
        n = 6 if positions == "prompt" else 2
        got = collector.take(key, counts={ROWS: n, SCORES: 7}, n_fed=7, timeout_s=5)
        where = list(range(6)) if positions == "prompt" else [1, 4]
        np.testing.assert_array_equal(
            got.tensors[ROWS].to_float32()[0], rows(1, 2, 0, 6).numpy()[where]
        )
        worker.stepper.remove(key)


def test_shares_of_pipeline_stages_meet_in_the_front_end(collector: Collector) -> None:
    stages = [Worker(exporter(), layers=layers) for layers in ((0, 2), (5,))]
    probes = {"p": linear(0, 2, 5), "q": linear(2), "r": attention(0)}
    request = LensRequest(probes=[{"name": name, "positions": "all"} for name in probes])
    envelope = begin(stages[0], collector, "e", request, probes)
    for probe in probes.values():
        stages[1].stepper.probes.add(probe)
    stages[1].stepper.add("e", dict(envelope.pack()))
    for first, n in ((0, 6), (6, 1), (7, 1)):
        stages[0].step([("e", 4, first, n)])
    time.sleep(0.1)
    assert scores_of(collector, "e", 0).shape[1] == 0, "half of a score is none"
    stages[1].step([("e", 4, 0, 6)])
    # Pre-empted, and computed again from its start.
    for stage in stages:
        stage.stepper.remove("e")
        stage.stepper.add("e", dict(envelope.pack()))
        for first, n in ((0, 6), (6, 1), (7, 1)):
            stage.step([("e", 4, first, n)])
    for stage in stages:
        stage.stepper.leave(["e"])
    got = collector.take("e", counts={ROWS: 0, SCORES: 8}, n_fed=8, timeout_s=5)
    shares = got.tensors[SCORES].storage
    assert shares.shape == (2, 8, 2 + probes["r"].columns)
    wide = {layer: rows(4, layer, 0, 8).double().numpy() for layer in (0, 2, 5)}
    weight = weights(probes["p"], "weight")
    truth = sum(wide[layer] @ w for layer, w in zip((0, 2, 5), weight, strict=True))
    np.testing.assert_allclose(shares.sum(axis=0)[:, 0], truth, rtol=1e-5)
    np.testing.assert_allclose(
        shares.sum(axis=0)[:, 1], wide[2] @ weights(probes["q"], "weight")[0], rtol=1e-5
    )
    assert not shares[1, :, 1:].any(), "the second stage has nothing of these"
    for stage in stages:
        stage.stepper.remove("e")
        stage.stepper.close()


@pytest.mark.parametrize("capture", [None, {}, {"reduce": "mean"}, {"reduce": "last"}])
def test_sealing_takes_no_longer_for_a_request_that_may_be_long(capture: Any) -> None:
    uses = [{"name": f"p{i}", "positions": p} for i, p in enumerate(("all", "completion", "all"))]
    request = LensRequest(capture=capture and CaptureSpec(layers=(0,), **capture), probes=uses)
    probes = {use["name"]: linear(0, 5) for use in uses}
    # Walked, these would take hours.
    envelope = seal(request, FACTS, reply="", n_prompt=6, max_tokens=1 << 40, probes=probes)
    assert envelope.probes is not None
    assert (envelope.probes.lo, envelope.probes.hi) == (0, 6 + (1 << 40) - 1)


@pytest.mark.parametrize(
    ("uses", "lo", "hi"),
    [
        (["completion"], 6, 13),
        (["prompt", "last_prompt"], 0, 6),
        (["last_prompt", "completion"], 5, 13),
        ([(3, 1), (-2, 8)], 1, 9),
        ([(1, 0), (True, False, False, False, True, False)], 0, 5),
    ],
)
def test_a_request_reads_what_any_of_its_probes_reads(uses: list[Any], lo: int, hi: int) -> None:
    probes = {f"p{i}": linear(*layers) for i, layers in zip(range(2), ((5,), (0, 2)), strict=True)}
    request = LensRequest(
        probes=[{"name": f"p{i}", "positions": p} for i, p in enumerate(uses)],
    )
    sealed = seal(request, FACTS, reply="", n_prompt=6, max_tokens=8, probes=probes).probes
    assert sealed is not None
    assert (sealed.lo, sealed.hi) == (lo, hi)
    assert sealed.taps == tuple(
        TapPoint("resid_post", i) for i in ((5,) if len(uses) == 1 else (0, 2, 5))
    )
    assert sealed.columns == len(uses)


def test_a_mask_and_positions_that_python_calls_equal_are_told_apart() -> None:
    probes = {"p": linear(0), "q": linear(0)}
    request = LensRequest(
        probes=[{"name": "p", "positions": (1, 0)}, {"name": "q", "positions": (True, False)}]
    )
    with pytest.raises(SpecError, match="the mask has 2 booleans"):
        seal(request, FACTS, reply="", n_prompt=6, max_tokens=8, probes=probes)


def test_a_probe_that_was_removed_on_the_way_is_named() -> None:
    request = LensRequest(probes=["p", "q"])
    with pytest.raises(SpecError, match="probes: q removed or replaced while the request was on"):
        seal(request, FACTS, reply="", n_prompt=6, max_tokens=8, probes={"p": linear(0)})


def test_scores_of_a_running_request_come_in_order(worker: Worker, collector: Collector) -> None:
    probe = linear(2)
    request = LensRequest(probes=(ProbeUse(name="p", positions="all"),))
    begin(worker, collector, "c", request, {"p": probe}, is_live=True)
    seen = 0
    for first in (0, *range(6, 13)):
        worker.step([("c", 3, first, 6 if not first else 1)])
        assert until(lambda: scores_of(collector, "c", seen).shape[1])  # noqa: B023 - asked here
        part = scores_of(collector, "c", seen)
        assert part.shape[1] == (6 if not first else 1)
        seen += part.shape[1]
    assert collector.further("unknown", {SCORES: 0}, n_fed=99, settled=None) is None


def scores_of(collector: Collector, key: str, since: int) -> NDArray[Any]:
    """What has come of probes behind so many positions."""
    found = collector.further(key, {SCORES: since}, n_fed=99, settled=None)
    assert found is not None
    return found.rows[SCORES]


def test_a_probe_that_the_worker_does_not_know_fails_its_request(
    worker: Worker, collector: Collector
) -> None:
    probe = linear(2)
    request = LensRequest(probes=(ProbeUse(name="p"),))
    envelope = seal(
        request, FACTS, reply=collector.address, n_prompt=4, max_tokens=4, probes={"p": probe}
    )
    collector.open("d", envelope)
    worker.stepper.add("d", envelope.pack())
    worker.stepper.take_up()
    with pytest.raises(SpecError, match="removed or replaced"):
        collector.take("d", counts={ROWS: 0, SCORES: 3}, n_fed=7, timeout_s=5)
