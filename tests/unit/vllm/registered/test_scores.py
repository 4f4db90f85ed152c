"""Readings of probes: the same whether numbers come at once or in pieces."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inspect_lens._vllm.registered.contents import start_items
from inspect_lens._vllm.registered.probe_scores import Reading, Reads
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.probe import Probe, load_probe, pool_scores
from inspect_lens.spec import EngineProbe, LensRequest

WIDTH = 4
LINEAR = EngineProbe(
    layers=(0,),
    tensors={"weight": np.ones((1, WIDTH)), "bias": np.float32(0.5)},
    aggregate="max",
    threshold=2.0,
)
HEADS = EngineProbe(
    kind="attention",
    layers=(0,),
    tensors={"query": np.ones((2, WIDTH)), "value": np.ones((2, WIDTH)), "bias": np.float32(1)},
)
NUMBERS = st.lists(
    st.lists(st.floats(-4, 4, width=32), min_size=5, max_size=5), min_size=1, max_size=12
)


def reading(uses: list[Any], n_prompt: int = 3) -> Reading:
    probes = {"lin": LINEAR, "att": HEADS}
    request = LensRequest(probes=uses)
    reads = Reads(request.probes, probes)
    return Reading(reads, lo=0, n_prompt=n_prompt, n_max=40)


@settings(max_examples=60, deadline=None)
@given(NUMBERS, st.lists(st.integers(1, 4), max_size=6))
def test_pieces_give_what_the_whole_gives(numbers: list[list[float]], cuts: list[int]) -> None:
    uses: list[Any] = [
        {"name": "lin", "positions": "all", "tokens": True, "alarm": "flag"},
        {"name": "att", "positions": "all", "tokens": True},
    ]
    values = np.asarray(numbers, dtype=np.float32)[None]
    whole, parts = reading(uses), reading(uses)
    whole.feed(values)
    at = 0
    for cut in [*cuts, values.shape[1]]:
        parts.feed(values[:, at : at + cut])
        at = min(at + cut, values.shape[1])
    assert parts.receipts() == whole.receipts()
    lin, att = whole.receipts()
    scores = values[0, :, 0].astype(np.float64) + 0.5
    assert lin.tokens == tuple(scores)
    assert lin.score == scores.max()
    above = np.flatnonzero(scores > 2.0)
    assert lin.alarm_position == (int(above[0]) if len(above) else None)
    logits, shares = values[0, :, 1:3].astype(np.float64), values[0, :, 3:5].astype(np.float64)
    weight = np.exp(logits - logits.max(axis=0))
    expected = (weight * shares).sum(axis=0) / weight.sum(axis=0)
    assert att.score == pytest.approx(expected.sum() + 1.0, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("aggregate", ["mean", "last", "max", "top_k_mean:2", "ema:0.3"])
def test_an_aggregate_is_that_of_the_probe_library(aggregate: str) -> None:
    values = np.random.default_rng(0).normal(size=(2, 9, 1)).astype(np.float32)
    found = reading([{"name": "lin", "positions": "completion", "aggregate": aggregate}])
    found.feed(values)
    scores = values.sum(axis=0, dtype=np.float64)[3:, 0] + 0.5
    receipt = found.receipts()[0]
    assert receipt.score == pool_scores(scores, aggregate)
    assert (receipt.n_tokens, receipt.first_position, receipt.tokens) == (6, 3, None)


def test_an_alarm_stops_once_and_where_it_was_raised() -> None:
    found = reading([{"name": "lin", "positions": "all", "alarm": "stop", "threshold": 1.0}])
    found.feed(np.zeros((1, 4, 1), dtype=np.float32))
    assert found.alarm() is None
    found.feed(np.full((1, 2, 1), 3.0, dtype=np.float32))
    assert found.alarm() == "lin"
    receipt = found.receipts()[0]
    assert (receipt.alarm_position, receipt.stopped, receipt.threshold) == (4, True, 1.0)


def test_a_score_that_is_no_number_hides_no_alarm() -> None:
    use = {"name": "lin", "positions": "all", "alarm": "flag", "threshold": 1.0}
    found = reading([use])
    assert found.raised() == []
    found.feed(np.asarray([0.0, 5.0, np.nan], dtype=np.float32).reshape(1, 3, 1))
    ((i, raised),) = found.raised()
    assert (i, raised.alarm_position, raised.score) == (0, 1, None)
    with pytest.raises(CaptureError, match="lin"):
        found.receipts()


@pytest.mark.parametrize("aggregate", ["mean", "last", "max", "top_k_mean:2", "ema:0.3"])
@pytest.mark.parametrize("alarm", [None, "flag"])
def test_the_state_of_an_aggregate_does_not_grow_with_the_tokens(
    aggregate: str, alarm: str | None
) -> None:
    use = {"name": "lin", "positions": "all", "aggregate": aggregate, "alarm": alarm}
    use |= {} if alarm is None else {"threshold": 2.0}
    found, whole = reading([use]), reading([use])
    values = np.random.default_rng(1).normal(size=(1, 30, 1)).astype(np.float32)
    sizes = []
    for i in range(30):
        found.feed(values[:, i : i + 1])
        sizes.append(len(pickle.dumps(found._uses or found._plain)))
    # Pickled numbers take some bytes more where they are larger, and no more than that.
    assert sizes[-1] - sizes[3] <= 8
    whole.feed(values)
    assert found.receipts() == whole.receipts()


@pytest.mark.parametrize(
    "use", [{"aggregate": "max", "alarm": "stop"}, {"aggregate": "mean"}, {"tokens": True}]
)
def test_a_score_that_is_no_number_fails_its_request_and_nothing_before(use: Any) -> None:
    found = reading([{"name": "lin", "positions": "all", **use}])
    found.feed(np.full((1, 2, 1), np.nan, dtype=np.float32))
    assert found.alarm() is None
    with pytest.raises(CaptureError, match="'lin' gave NaN"):
        found.receipts()


def test_tokens_that_nothing_reads_leave_no_score() -> None:
    found = reading([{"name": "lin", "positions": [1, 2], "tokens": True}])
    assert found.feed(np.ones((1, 1, 1), dtype=np.float32)) == {}
    assert found.receipts()[0].score is None
    assert found.feed(np.ones((1, 5, 1), dtype=np.float32)) == {"lin": [1.5, 1.5]}


def test_the_shipped_probe_scores_in_the_engine_as_it_does_offline(tmp_path: Any) -> None:
    trained = load_probe("probes/organism/deception-lr")
    assert isinstance(trained, Probe)
    items = start_items("d=probes/organism/deception-lr")
    probe = items["d"]
    assert isinstance(probe, EngineProbe)
    rows = np.random.default_rng(1).normal(size=(len(trained.layers), 7, trained.hidden))
    found = sum(
        x @ w
        for x, w in zip(rows, probe.tensors["weight"].to_float32().astype(np.float64), strict=True)
    ) + probe.bias("bias")
    np.testing.assert_allclose(found, trained.score_tokens(rows.astype(np.float32)), rtol=1e-3)
    with pytest.raises(SpecError, match="name=path"):
        start_items("justapath")
    with pytest.raises(SpecError, match="INSPECT_LENS_REGISTER: x: "):
        start_items(f"x={tmp_path}/nowhere")
