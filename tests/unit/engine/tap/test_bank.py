"""Placing steering: rows by what they are made of, written once and together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens import LensRequest, SteeringVector
from inspect_lens._engine.protocol.messages import Envelope, seal
from inspect_lens._engine.tap import edit_table
from inspect_lens._engine.tap.edit_table import SEES_EDITS, Bank, BankTensors
from inspect_lens.errors import CapacityError
from inspect_lens.spec import Kind
from tests.kit.steps import FACTS, HIDDEN, LAYERS, TAPS

ROWS = 40
TAP_INDEX = {tap: i for i, tap in enumerate(TAPS)}


@pytest.fixture
def bank() -> Bank:
    return Bank(BankTensors(ROWS + 1, HIDDEN, len(TAPS), torch.device("cpu")))


def envelope(*vectors: SteeringVector) -> Envelope:
    request = LensRequest(edits=vectors)
    packed = seal(request, FACTS, reply="ipc:///a", n_prompt=16, max_tokens=4).pack()
    return Envelope.unpack(dict(packed))


def vector(*shape: int, seed: int = 0, **fields: Any) -> SteeringVector:
    values = np.random.default_rng(seed).standard_normal((*shape, HIDDEN)).astype(np.float32)
    return SteeringVector(activations=values, **{"layer_indices": LAYERS[: shape[0]], **fields})


def added(bank: Bank, config: int, tap: int, norm: float) -> np.ndarray[Any, Any]:
    """What a token with a stream of some norm gets at a tap."""
    to = bank._tensors
    entry, total = int(to.table[config, tap]), np.zeros(HIDDEN, np.float32)
    while entry:
        code, _, write, link = to.entries[entry].tolist()
        a, b, _, _ = to.params[entry].tolist()
        is_matched = code % SEES_EDITS == Kind.NORM
        total += to.vectors[write].numpy() * np.float32(a * norm if is_matched else b)
        entry = link
    return total


def test_sums_of_all_kinds_are_what_was_asked_for(bank: Bank) -> None:
    everywhere = vector(3, seed=1, scale=2.0)
    named = vector(2, 4, seed=2, scale=-0.5, position_indices=[1, 3, 5, 7])
    matched = vector(3, seed=3, scale=0.3, norm_match=True, position_indices=[3, 9])
    vectors = everywhere, named, matched
    steering = bank.admit(envelope(*vectors), TAP_INDEX)
    bank.flush()
    assert steering.named is not None
    configs = dict(
        zip(steering.named.positions.tolist(), steering.named.configs.tolist(), strict=True)
    )
    values = [v.vector.to_float32() for v in vectors]
    for position in range(12):
        config = configs.get(position, steering.config)
        for tap in range(3):
            expected = 2.0 * values[0][tap]
            if tap < 2 and position in (1, 3, 5, 7):
                expected = expected - 0.5 * values[1][tap, (position - 1) // 2]
            if position in (3, 9):
                unit = values[2][tap] / np.linalg.norm(values[2][tap])
                expected = expected + 0.3 * 11.0 * unit
            np.testing.assert_allclose(
                added(bank, config, tap, 11.0), expected, rtol=2e-6, atol=1e-6
            )
            assert bank.config_taps[config, tap]
    bank.release(steering)
    assert bank.rows_in_use == 0


def test_a_tensor_that_lies_there_is_written_and_looked_at_no_more(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    upload = edit_table._upload

    def counted(target: Any, at: Any, rows: Any) -> None:
        if target is bank._tensors.vectors:
            written.append(len(rows))
        upload(target, at, rows)

    monkeypatch.setattr(edit_table, "_upload", counted)
    shared = vector(3, 8, seed=4, position_indices=range(8))
    first = bank.admit(envelope(shared), TAP_INDEX)
    bank.flush()
    assert written == [24], "all rows of a request leave in one copy"
    # The same tensor at other tokens is another request, and other steering of the prefix cache.
    moved = shared.model_copy(update={"positions": tuple(range(4, 12))})
    asked = envelope(moved)
    monkeypatch.setattr("inspect_lens.spec.TensorData.to_float32", None)
    second = bank.admit(asked, TAP_INDEX)
    bank.flush()
    assert written == [24]
    assert bank.rows_in_use == 24
    for held in (first, second):
        bank.release(held)
    assert bank.rows_in_use == 0


def test_what_does_not_fit_leaves_nothing_behind(bank: Bank) -> None:
    held = bank.admit(envelope(vector(3, 8, seed=4)), TAP_INDEX)
    with pytest.raises(CapacityError, match="INSPECT_LENS_BANK_BYTES"):
        bank.admit(envelope(vector(3, 8, seed=5)), TAP_INDEX)
    assert bank.rows_in_use == 24
    again = bank.admit(envelope(vector(2, 8, seed=5)), TAP_INDEX)
    assert again.named is not None
    bank.flush()
    values = vector(2, 8, seed=5).vector.to_float32()
    for position, config in zip(again.named.positions, again.named.configs, strict=True):
        for tap in (0, 1):
            np.testing.assert_array_equal(added(bank, config, tap, 1.0), values[tap, position])
    bank.release(again)
    bank.release(held)


def test_what_comes_with_a_step_is_written_at_once_and_the_last_content_of_a_row_counts(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    upload = edit_table._upload

    def counted(target: Any, at: Any, rows: Any) -> None:
        written.append(len(rows))
        upload(target, at, rows)

    gone = bank.admit(envelope(vector(3, seed=6)), TAP_INDEX)
    bank.release(gone)  # before its step
    first = bank.admit(envelope(vector(3, seed=7)), TAP_INDEX)
    second = bank.admit(envelope(vector(3, seed=8)), TAP_INDEX)
    assert first.config == gone.config, "a row that was given back is taken again"
    monkeypatch.setattr(edit_table, "_upload", counted)
    bank.flush()
    bank.flush()
    assert written == [6, 6, 2], "vectors, instructions, configurations"
    for steering, seed in ((first, 7), (second, 8)):
        values = vector(3, seed=seed).vector.to_float32()
        for tap in range(3):
            np.testing.assert_array_equal(added(bank, steering.config, tap, 1.0), values[tap])
