"""Layers and tokens that are shown, out of a capture whose every number is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inspect_lens._intake import Payload
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model import Activations
from inspect_lens.oracle import OracleConfig
from inspect_lens.oracle._shown import choose_layers, parse_inputs, select_rows
from inspect_lens.spec import CaptureReceipt, Receipt, TensorData

N_PROMPT, N_COMPLETION, H = 6, 5, 4
FED = N_PROMPT + N_COMPLETION - 1
CONFIG = OracleConfig(
    hook_onto_layer=1,
    special_token=" ?",
    prefix_template="Layer: {layer}\\n{special_token} * {num_positions} \\n",
    steering_coefficient=1.0,
    act_layer_combinations=((9,), (18,), (27,), (9, 18)),
)


def handle(layers: tuple[int, ...] = (9, 18), first: int = 0) -> Activations:
    """Each number says its layer and its position: 100 * layer + position."""
    at = np.arange(first, FED)
    values = np.array([[[100 * n + p] * H for p in at] for n in layers], dtype=np.float32)
    receipt = Receipt(
        n_prompt=N_PROMPT, n_completion=N_COMPLETION, cache_salted=False, paths=(), engine="x",
        version="0", vllm_version="0",
        capture=CaptureReceipt(
            layers=layers, n_positions=len(at), first_position=first, dtype="float32", rows=1
        ),
    )  # fmt: skip
    payload = Payload(
        tensors={"residual_stream": TensorData(values, "float32")},
        layers={"residual_stream": layers},
        prompt_token_ids=tuple(range(N_PROMPT)),
        token_ids=tuple(range(N_COMPLETION)),
        receipt=receipt,
    )
    made = Activations.of(payload)
    made.remember(payload)
    return made


@pytest.mark.parametrize(
    ("inputs", "positions", "last", "expected"),
    [
        ("segment", "completion", None, [(6, 7, 8, 9)]),
        ("segment", "completion", 2, [(8, 9)]),
        ("segment", "completion", 99, [(6, 7, 8, 9)]),
        ("segment", "all", 3, [(7, 8, 9)]),
        ("segment", "prompt", 3, [(3, 4, 5)]),
        ("segment", [2, 3, 4], None, [(2, 3, 4)]),
        ("segment", [-2, -1], None, [(4, 5)]),
        ("tokens", "completion", 3, [(7,), (8,), (9,)]),
        ("full_seq", "completion", 2, [tuple(range(FED))]),
        ("segment", [10], None, []),
    ],
)
def test_tokens_are_those_that_were_asked_for(
    inputs: str, positions: Any, last: int | None, expected: list[tuple[int, ...]]
) -> None:
    kind, read, cut = parse_inputs(inputs, positions, last)
    shown = select_rows(handle(), (18,), inputs=kind, positions=read, last=cut)
    assert [s.positions for s in shown] == expected
    for s in shown:
        np.testing.assert_array_equal(s.rows[:, 0], [1800 + p for p in s.positions])


def test_layers_of_a_set_come_one_after_the_other() -> None:
    (shown,) = select_rows(handle(), (9, 18), inputs="segment", positions=(7, 8))
    np.testing.assert_array_equal(shown.rows[:, 0], [907, 908, 1807, 1808])


def test_rows_are_found_where_only_the_completion_was_captured() -> None:
    (shown,) = select_rows(handle(first=6), (9,), inputs="segment", positions="completion", last=2)
    np.testing.assert_array_equal(shown.rows[:, 0], [908, 909])
    with pytest.raises(ArtifactError, match="position 0 was not captured"):
        select_rows(handle(first=6), (9,), inputs="full_seq", positions="all")
    with pytest.raises(ArtifactError, match="layer 27 was not captured"):
        select_rows(handle(), (27,), inputs="segment", positions="completion")


@pytest.mark.parametrize(
    ("layer", "n_layers", "expected"),
    [
        (18, None, (18,)),
        (0.5, 36, (18,)),
        (0.25, 36, (9,)),
        (0.75, 36, (27,)),
        (0.25, 39, (9,)),
        ([9, 18], None, (9, 18)),
        (None, None, (27,)),
    ],
)
def test_layers_by_number_by_share_and_by_set(
    layer: Any, n_layers: int | None, expected: tuple[int, ...]
) -> None:
    assert choose_layers(CONFIG, layer, n_layers) == expected


@pytest.mark.parametrize("layer", [10, 0.6, [9], [18, 9], 1.5, "9", True])
def test_layers_that_the_oracle_did_not_learn_are_refused(layer: Any) -> None:
    if layer == [9]:
        assert choose_layers(CONFIG, layer, 36) == (9,)
        return
    with pytest.raises(SpecError, match="layer"):
        choose_layers(CONFIG, layer, 36)


@pytest.mark.parametrize(
    ("inputs", "positions", "last"),
    [("words", "all", None), ("segment", "nowhere", None), ("segment", "all", 0)],
)
def test_wrong_inputs_are_refused(inputs: str, positions: Any, last: int | None) -> None:
    with pytest.raises(SpecError):
        parse_inputs(inputs, positions, last)
