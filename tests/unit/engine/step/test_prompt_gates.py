"""Gates that read the prompt: the same decision however its tokens come to a worker."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.protocol.messages import LENS, QK, ROWS, SCORES
from inspect_lens.spec import Add, Gate, Rule
from inspect_lens.train import similarity
from tests.kit.steps import HIDDEN, Worker, begin, exporter, rows, sealed

PROMPT, N = 10, 14
RNG = np.random.default_rng(0)
READ = RNG.standard_normal((N, HIDDEN)).astype(np.float32)
"""What layer 5 has at each position; the edit is at layer 2, in front of it."""
DIRECTION = RNG.standard_normal(HIDDEN).astype(np.float32)
OTHER = np.eye(HIDDEN, dtype=np.float32)[7]


def make(number: int, layer: int, first: int, count: int) -> torch.Tensor:
    if layer == 5:
        return torch.from_numpy(READ[first : first + count]) * (1 if number == 1 else -1)
    return rows(number, layer, first, count)


def score(options: dict[str, Any]) -> float:
    """What a gate reads of the prompt, in numpy."""
    prompt, u = READ[:PROMPT].astype(np.float64), DIRECTION.astype(np.float64)
    is_mean, kind = options["reads"] == "prompt_mean", options.get("similarity", "dot")
    if "active_above" in options:
        z = prompt @ u + options["bias"]
        acts = np.where(z > options["active_above"], z, 0.0)
        return float(acts.mean() if is_mean else acts[-1])
    row = prompt.mean(0) if is_mean else prompt[-1]
    if kind == "cast":
        return float(similarity(row, u))
    by = np.linalg.norm(row) * np.linalg.norm(u) if kind == "cosine" else 1.0
    return float(row @ u / by)


def asked(options: dict[str, Any], *, above: bool, captures: bool = True) -> LensRequest:
    """An edit whose gate holds, or does not, by a hair's breadth."""
    threshold = score(options) + (-1e-3 if above else 1e-3)
    gate = Gate(direction=DIRECTION, layer=5, scope="rest", threshold=threshold, **options)
    edit = Add(vector=OTHER, layers=[2], when=gate, positions="completion")
    return LensRequest(capture=CaptureSpec(layers=(2,)) if captures else None, edits=[edit])


def wanted(*, is_open: bool, n: int = N) -> np.ndarray[Any, Any]:
    made = rows(1, 2, 0, n).numpy()
    made[PROMPT:, 7] += is_open
    return made


def taken(collector: Collector, n: int = N) -> Any:
    return collector.take("a", counts={ROWS: n, SCORES: 0, QK: 0, LENS: 0}, n_fed=n, timeout_s=5)


OPTIONS: list[dict[str, Any]] = [
    {"reads": "prompt_mean"},
    {"reads": "prompt_mean", "similarity": "cosine"},
    {"reads": "prompt_mean", "similarity": "cast"},
    {"reads": "prompt_mean", "bias": 0.5, "active_above": 0.25},
    {"reads": "last_prompt", "similarity": "cast"},
    {"reads": "last_prompt", "bias": 5.0, "active_above": 0.0},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("above", [False, True])
@pytest.mark.parametrize("chunks", [[10], [4, 6], [1, 1, 7, 1]])
def test_the_prompt_decides_in_any_chunks(
    collector: Collector, options: dict[str, Any], above: bool, chunks: list[int]
) -> None:
    worker = Worker(exporter(), make=make)
    begin(worker, collector, "a", sealed(collector, asked(options, above=above), PROMPT, 5))
    # Beside it one whose prompt decides the other way, one that asks for nothing else, and a
    # plain one, with other chunks.
    begin(worker, collector, "b", sealed(collector, asked(options, above=above), PROMPT, 5))
    quiet = asked(options, above=above, captures=False)
    begin(worker, collector, "c", sealed(collector, quiet, PROMPT, 5))
    first = 0
    for i, n in enumerate(chunks):
        beside = [("b", 2, 0, PROMPT), ("plain", 3, 0, 2), ("c", 1, 0, PROMPT)] if not i else []
        worker.step([*beside, ("a", 1, first, n)])
        first += n
    for p in range(PROMPT, N):
        worker.step([("plain", 3, 2 + p - PROMPT, 1), ("a", 1, p, 1)])
    got = taken(collector)
    np.testing.assert_array_equal(got.tensors[ROWS].storage[0], wanted(is_open=above))
    assert got.fired == ({0: PROMPT - 1} if above else {})
    assert not worker.stepper._live.prompts, "nothing is read of sampled tokens"
    for key in "abc":
        worker.stepper.finish([key])
        worker.stepper.remove(key)
    assert worker.stepper.rows_in_use == 0
    worker.stepper.close()


@pytest.mark.parametrize("away_at", [3, PROMPT, 12])
def test_a_position_counts_once_where_a_request_is_pre_empted(
    collector: Collector, away_at: int
) -> None:
    options = {"reads": "prompt_mean", "similarity": "cosine"}
    worker = Worker(exporter(), make=make)
    envelope = sealed(collector, asked(options, above=True), PROMPT, 5)
    begin(worker, collector, "a", envelope)
    worker.step([("a", 1, 0, min(away_at, PROMPT))])
    for p in range(PROMPT, away_at):
        worker.step([("a", 1, p, 1)])
    worker.stepper.remove("a")
    worker.stepper.add("a", dict(envelope.pack()))
    # All over again, in other chunks; the last of them may go behind where it was.
    worker.step([("a", 1, 0, 2)])
    worker.step([("a", 1, 2, max(PROMPT, away_at) - 2)])
    for p in range(max(PROMPT, away_at), N):
        worker.step([("a", 1, p, 1)])
    got = taken(collector)
    np.testing.assert_array_equal(got.tensors[ROWS].storage[0], wanted(is_open=True))
    assert got.fired == {0: PROMPT - 1}
    worker.stepper.close()


def test_a_prompt_whose_beginning_was_not_computed_fails_its_request_alone(
    collector: Collector,
) -> None:
    worker = Worker(exporter(), make=make)
    request = asked({"reads": "prompt_mean"}, above=True)
    for key in "ab":
        begin(worker, collector, key, sealed(collector, request, PROMPT, 5))
    worker.step([("a", 1, 0, PROMPT), ("b", 1, 4, 6)])
    for p in range(PROMPT, N):
        worker.step([("a", 1, p, 1)])
    np.testing.assert_array_equal(taken(collector).tensors[ROWS].storage[0], wanted(is_open=True))
    with pytest.raises(Exception, match="reads the prompt from position 0"):
        collector.take("b", counts={ROWS: PROMPT, SCORES: 0}, n_fed=PROMPT, timeout_s=5)
    worker.stepper.close()


def test_prompt_gates_are_joined_with_others(collector: Collector) -> None:
    worker = Worker(exporter(), make=make)
    mean = score({"reads": "prompt_mean"})
    about, other = (
        Gate(direction=d, layer=5, scope="rest", threshold=mean - 1e-3, reads="prompt_mean")
        for d in (DIRECTION, -DIRECTION)
    )
    # Layer 2 shows the position in its third number.
    late = Gate(direction=np.eye(HIDDEN)[2], layer=2, threshold=11.5)
    rule = Rule(all=[about, late], none=[other] if mean > 0 else [])
    edit = Add(vector=OTHER, layers=[2], when=rule, positions="completion")
    request = LensRequest(capture=CaptureSpec(layers=(2,)), edits=[edit])
    begin(worker, collector, "a", sealed(collector, request, PROMPT, 5))
    worker.step([("a", 1, 0, PROMPT)])
    for p in range(PROMPT, N):
        worker.step([("a", 1, p, 1)])
    expected = rows(1, 2, 0, N).numpy()
    expected[12:, 7] += 1
    np.testing.assert_array_equal(taken(collector).tensors[ROWS].storage[0], expected)
    assert not math.isnan(mean)
    worker.stepper.close()
