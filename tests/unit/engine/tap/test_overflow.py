"""A steered row that would be too large is not written, and its request fails by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens import CaptureSpec, LensRequest, SteeringVector
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.export.transport import Copier
from inspect_lens._engine.protocol.messages import ROWS, SCORES
from inspect_lens._engine.tap.buffers import TapState
from inspect_lens._engine.tap.edit_table import largest_norm
from inspect_lens._engine.tap.op import edit_rows
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.spec import TapPoint
from tests.kit.edit_table import add_entries
from tests.kit.steps import HIDDEN, LAYERS, Worker, begin, exporter, sealed

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_fused", [False, True])
def test_finite_rows_have_the_bits_of_the_definition_and_the_others_stay(
    dtype: torch.dtype, is_fused: bool
) -> None:
    torch.manual_seed(1)
    n, largest = 40, largest_norm(dtype)
    state = TapState(
        taps=(TapPoint("resid_post", 0),),
        hidden=HIDDEN,
        dtype=dtype,
        max_tokens=n,
        max_groups=1,
        ring_rows=1,
        bank_rows=5,
        device=torch.device("cpu"),
    )
    bank = state.bank
    bank.vectors[1] = torch.randn(HIDDEN)
    bank.vectors[2] = torch.randn(HIDDEN)
    add_entries(bank, by_norm=[2, 4], links={1: 2})
    bank.vectors[3, 0], bank.vectors[4, 0] = 1.5 * largest, 3e38
    bank.vectors[5, 0] = 0.9 * largest
    hidden = torch.randn(n, HIDDEN).to(dtype)
    residual = torch.randn(n, HIDDEN).to(dtype) if is_fused else None
    hidden[7, 2] = float("nan")
    which = torch.arange(n, dtype=torch.int32) % 6
    before = hidden.clone()
    left = edit_rows(hidden, residual, which, bank)
    bad = sorted({i for i in range(n) if i % 6 in (3, 4)} | {7})
    assert left.tolist() == bad
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    assert torch.equal(hidden[bad].view(bits), before[bad].view(bits))
    assert torch.isfinite(hidden[[i for i in range(n) if i != 7]]).all()
    # As it was defined before: the sum in float32, rounded once.
    other = 0 if residual is None else residual.float()
    norm = (before.float() + other).norm(dim=-1, keepdim=True)
    plain = (before.float() + (bank.vectors[1] + bank.vectors[2] * norm)).to(dtype)
    fine = [i for i in range(n) if i % 6 == 1 and i != 7]
    assert torch.equal(hidden[fine], plain[fine])


def overflowing(**fields: Any) -> LensRequest:
    """More than is written; nothing judges requests here."""
    v = np.zeros((1, HIDDEN), np.float32)
    v[0, 3] = 3e38
    vector = SteeringVector(activations=v, layer_indices=[2], **fields)
    return LensRequest(edits=(vector,), capture=CaptureSpec(layers=LAYERS))


def test_the_note_alone_fails_a_request_of_which_no_worker_has_told(
    worker: Worker, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the worker hears of it some steps later, perhaps when the request is over."""
    monkeypatch.setattr(worker.stepper, "_fail_overflown", lambda: None)
    late = overflowing(position_indices=[5])
    begin(worker, collector, "late", sealed(collector, late, 4, 6))
    worker.step([("late", 1, 0, 4)])
    for position in range(4, 7):
        worker.step([("late", 1, position, 1)])
    with pytest.raises(SpecError, match="lower the scale"):
        collector.take("late", counts={ROWS: 7, SCORES: 0}, n_fed=7, timeout_s=5)
    worker.stepper.remove("late")


def test_a_twin_does_not_begin_behind_blocks_that_hold_its_unsteered_rows(
    worker: Worker, collector: Collector
) -> None:
    request = LensRequest(edits=overflowing(position_indices=[1]).edits)
    begin(worker, collector, "first", sealed(collector, request, 4, 6))
    worker.step([("first", 1, 0, 4)])
    begin(worker, collector, "twin", sealed(collector, request, 4, 6))
    worker.step([("twin", 1, 3, 1)])
    with pytest.raises(CaptureError, match="prefix cache holds blocks of a failed request"):
        collector.take("twin", counts={ROWS: 0, SCORES: 0}, n_fed=4, timeout_s=5)
    collector.discard("first")
    for key in ("first", "twin"):
        worker.stepper.remove(key)


def test_requests_that_fail_without_end_take_no_memory_without_end(
    worker: Worker, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inspect_lens._engine.step.stepper._POISONED_MOST", 2)
    salts = []
    for position in range(4):
        key = f"fails-{position}"
        envelope = sealed(collector, overflowing(position_indices=[position]), 4, 6)
        salts.append(envelope.steer_hash)
        begin(worker, collector, key, envelope)
        worker.step([(key, 1, 0, 4)])
        worker.stepper.remove(key)
        collector.discard(key)
    assert list(worker.stepper._poisoned) == salts[-2:]


def test_where_the_device_cannot_write_to_the_host_the_note_is_fetched(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where shared memory could not be pinned: slow, and still right."""
    monkeypatch.setattr(Copier, "reachable", lambda self, values: None)
    worker = Worker(exporter())
    try:
        begin(worker, collector, "apart", sealed(collector, overflowing(), 4, 6))
        worker.step([("apart", 1, 0, 4)])
        with pytest.raises(SpecError, match="lower the scale"):
            collector.take("apart", counts={ROWS: 4, SCORES: 0}, n_fed=4, timeout_s=5)
        assert not worker.state.faults.any(), "a note that was taken is not taken again"
    finally:
        worker.stepper.close()
