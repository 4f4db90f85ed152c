"""Each operation against its closed form in float64, and what edits refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inspect_lens.errors import SpecError
from inspect_lens.spec import (
    EDITS,
    Ablate,
    Add,
    Gate,
    Instruction,
    Kind,
    Renormalise,
    Replace,
    Rotate,
    Swap,
    parse_edits,
    run_program,
)
from tests.kit.edit_cases import WIDTH, edit_cases, random_rows, unit


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31))
def test_each_operation_is_its_closed_form(seed: int) -> None:
    stream = np.random.default_rng(seed).standard_normal(WIDTH) * 3
    for edit, closed_form in edit_cases(seed):
        found = run_program(stream, edit.program(0))
        assert np.allclose(found, closed_form(stream), rtol=1e-5, atol=1e-5), edit.op  # type: ignore[attr-defined]


def test_every_operation_has_a_closed_form_here() -> None:
    # The weights of an autoencoder are no part of an edit: see `unit/engine/tap/test_splice.py`.
    elsewhere = {"renormalise", "splice"}
    assert {edit.op for edit, _ in edit_cases(0)} | elsewhere == set(EDITS)  # type: ignore[attr-defined]


def test_ablation_leaves_nothing_of_the_direction() -> None:
    v, h = random_rows(3, 2)
    found = run_program(h, Ablate(direction=v, layers=[0]).program(0))
    assert abs(found @ unit(v)) <= 1e-5 * np.linalg.norm(h)


def test_a_rotation_keeps_the_norm_and_a_full_turn_changes_nothing() -> None:
    plane, (h,) = random_rows(4, 2), random_rows(5, 1)
    turned = run_program(h, Rotate(plane=plane, degrees=90, layers=[0]).program(0))
    assert np.isclose(np.linalg.norm(turned), np.linalg.norm(h), rtol=1e-6)
    assert not np.allclose(turned, h)
    full = run_program(h, Rotate(plane=plane, degrees=360, layers=[0]).program(0))
    assert np.allclose(full, h, atol=1e-6)


def test_edits_act_in_order_and_each_sees_the_one_before() -> None:
    v, h = random_rows(6, 2)
    add, ablate = Add(vector=v, layers=[0]), Ablate(direction=v, layers=[0])
    after = run_program(h, add.program(0) + ablate.program(0))
    before = run_program(h, ablate.program(0) + add.program(0))
    assert abs(after @ unit(v)) < 1e-5
    assert np.isclose(before @ unit(v), np.linalg.norm(v), rtol=1e-5)


def test_renormalise_gives_the_norm_back() -> None:
    v, h = random_rows(7, 2)
    program = Add(vector=v, scale=9.0, layers=[0]).program(0) + Renormalise(layers=[0]).program(0)
    found = run_program(h, program)
    assert np.isclose(np.linalg.norm(found), np.linalg.norm(h), rtol=1e-6)
    assert np.allclose(unit(found), unit(h + 9.0 * v.astype(np.float64)), atol=1e-6)


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("sharpness", [None, 2.0])
def test_a_gate_is_a_factor_of_the_edits_that_name_it(
    cosine: bool, sharpness: float | None
) -> None:
    v, probe, h = random_rows(8, 3)
    gate = Gate(
        direction=probe,
        layer=0,
        threshold=0.1,
        sharpness=sharpness,
        similarity="cosine" if cosine else "dot",
    )
    x = float(h.astype(np.float64) @ (unit(probe) if cosine else probe))
    x /= float(np.linalg.norm(h)) if cosine else 1.0
    factor = float(x > 0.1) if sharpness is None else 1 / (1 + math.exp(-2.0 * (x - 0.1)))
    gated = Instruction(Kind.LINEAR, None, v, (0.0, 1.0, 0.0, 0.0), gate=3)
    found = run_program(h, [gate.instruction(3), gated])
    assert np.allclose(found, h + factor * v.astype(np.float64), rtol=1e-5, atol=1e-5)


def test_a_gate_that_stays_open_says_what_it_cannot_be() -> None:
    v, probe = random_rows(8, 2)
    with pytest.raises(ValueError, match="leave sharpness out"):
        Gate(direction=probe, layer=0, scope="rest", sharpness=2.0)
    with pytest.raises(ValueError, match="reads beside scope='token'"):
        Gate(direction=probe, layer=0, reads="last_prompt")
    with pytest.raises(ValueError, match="shadow beside scope='token'"):
        Gate(direction=probe, layer=0, shadow=True)
    gate = Gate(direction=probe, layer=3, scope="rest", reads="last_prompt")
    with pytest.raises(ValueError, match="positions='completion'"):
        Add(vector=v, layers=[1], when=gate)
    edit = Add(vector=v, layers=[1], when=gate, positions="completion")
    (back,) = parse_edits([edit.model_dump()])
    assert back.when is not None
    assert back.when.content == gate.content
    assert "scope" not in Gate(direction=probe, layer=0).model_dump()


def test_a_running_gate_says_what_it_cannot_be() -> None:
    v, probe = random_rows(8, 2)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"scope": "next", "reads": "completion"}, "reads beside scope='next'"),
        ({"scope": "rest", "closes_below": -1.0}, "gates stay open"),
        ({"scope": "rest", "reads": "last_prompt", "ema": 0.5}, "that is read once"),
        ({"closes_below": 0.0}, "closes_below=0 is not below threshold=0"),
        ({"closes_below": -1.0, "sharpness": 2.0}, "closes_below beside sharpness"),
        ({"ema": 0.0}, "ema=0.0; allowed are numbers above 0"),
        ({"ema": 1.5}, "ema=1.5; allowed are numbers up to 1"),
    ]
    for options, says in refused:
        with pytest.raises(ValueError, match=says):
            Gate(direction=probe, layer=0, **options)
    for options in ({"scope": "next"}, {"ema": 0.5}, {"closes_below": -1.0, "shadow": True}):
        gate = Gate(direction=probe, layer=0, **options)
        with pytest.raises(ValueError, match=f"when.{gate.lasts_by} decides on sampled tokens"):
            Add(vector=v, layers=[1], when=gate)
        edit = Add(vector=v, layers=[1], when=gate, positions=[-1, 9], phase="decode")
        (back,) = parse_edits([edit.model_dump()])
        assert back.when is not None
        assert (back.when.content, back.when.shadow) == (gate.content, gate.shadow)
    late = Gate(direction=probe, layer=3, scope="next")
    Add(vector=v, layers=[1], when=late, positions="completion")
    with pytest.raises(ValueError, match="at or before its edit"):
        Add(vector=v, layers=[1], when=Gate(direction=probe, layer=3, ema=0.5), phase="decode")
    assert "ema" not in Gate(direction=probe, layer=0, scope="rest").model_dump()


def test_an_edit_survives_its_wire_form_and_its_log_form_has_no_tensor() -> None:
    v = random_rows(9, 1)[0]
    gate = Gate(direction=v, layer=1, threshold=0.5)
    edit = Ablate(direction=v, layers=[1, 2], positions=[-1, 3], when=gate)
    (back,) = parse_edits([edit.model_dump()])
    assert isinstance(back, Ablate)
    assert back.when is not None
    assert (back.layers, back.positions, back.direction.sha256) == (
        (1, 2), (-1, 3), edit.direction.sha256,
    )  # fmt: skip
    assert back.when.content == gate.content
    assert "data" not in str(edit.model_dump(context={"inspect_lens_wire": False}))


def test_rows_of_their_own_for_each_layer_and_position() -> None:
    rows = np.random.default_rng(1).standard_normal((2, 3, WIDTH)).astype(np.float32)
    edit = Replace(rows=rows, layers=[4, 7], positions=[5, 6, 9])
    assert edit.n_listed == 3
    (one,) = edit.program(1, 2)
    assert one.write is not None
    assert np.array_equal(one.write, rows[1, 2])


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"op": "abl", "layers": [1]}, "allowed are ablate, add"),
        ({"layers": [1]}, "has no op, which says what it does; allowed are ablate"),
        ({"activations": [[1.0]], "layer_indices": [1]}, "belongs under 'apply_steering_vectors'"),
        ("ablate", "its JSON form with op"),
        ({"op": "ablate", "layers": [1], "direction": [0.0, 0.0]}, "is zero"),
        ({"op": "ablate", "layers": [1], "direction": [math.nan, 1.0]}, "finite"),
        ({"op": "ablate", "layers": [], "direction": [1.0]}, "at least one, such as"),
        ({"op": "ablate", "layers": [1, 1], "direction": [1.0]}, "each once"),
        ({"op": "ablate", "layers": [True], "direction": [1.0]}, "not an integer"),
        ({"op": "ablate", "layers": [1], "direction": [[1.0], [2.0]]}, "one entry per layer"),
        ({"op": "ablate", "layers": [1], "direction": [1.0], "positions": "last"}, "last_prompt"),
        ({"op": "clamp", "layers": [1], "direction": [1.0]}, "min, max"),
        ({"op": "clamp", "layers": [1], "direction": [1.0], "min": 2, "max": 1}, "larger than max"),
        ({"op": "project_out", "layers": [1], "directions": [[1.0, 0], [2.0, 0]]}, "sum of others"),
        ({"op": "rotate", "layers": [1], "plane": [[1.0, 0]], "degrees": 9}, "a plane has 2"),
        ({"op": "insert", "layers": [1], "concept": [1.0], "instead_of": [0.0]}, "is zero"),
        ({"op": "insert", "layers": [1], "concept": [1.0], "instead_of": [1.0, 2.0]}, "wide"),
        ({"op": "replace", "layers": [1], "rows": [[[1.0], [2.0]]]}, "list as many numbers"),
        ({"op": "zero", "layers": [1], "site": "nowhere"}, "site"),
        ({"op": "zero", "layers": [1], "colour": "red"}, "colour"),
        (
            {"op": "zero", "layers": [1], "when": {"direction": [1.0], "layer": 2}},
            "comes after layer 1",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_field(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=r"edits\[0\]") as caught:
        parse_edits([asked])
    assert says in str(caught.value)


def test_a_frozen_swap_adds_what_the_clean_run_says_in_every_layer() -> None:
    """Through two layers that leave the stream alone, live swaps undo each other."""
    rng = np.random.default_rng(3)
    first, second = rng.standard_normal((2, 2, WIDTH))  # (layers, width)
    second[1], first[1] = second[0], first[0]
    clean = np.repeat(rng.standard_normal((1, 3, WIDTH)), 2, axis=0)
    swap = Swap(first=first, second=second, layers=[2, 5], strength=0.75, site="attn_out")
    steering = swap.frozen(clean, positions=[0, 4, 7])
    assert steering.layers == (2, 5)
    assert steering.positions == (0, 4, 7)
    assert steering.site == "attn_out"
    both = np.stack([first[0], second[0]])
    for at, row in enumerate(clean[0]):
        (c1, c2), *_ = np.linalg.lstsq(both.T, row, rcond=None)
        once = 0.75 * ((c2 - c1) * first[0] + (c1 - c2) * second[0])
        added = steering.vector.to_float32()[:, at]
        np.testing.assert_allclose(added, np.stack([once, once]), rtol=1e-4, atol=1e-5)
        # Of one layer it is what the edit itself does.
        np.testing.assert_allclose(run_program(row, swap.program(0)) - row, once, atol=1e-5)
    live = Swap(first=first, second=second, layers=[2, 5])
    row = clean[0, 0]
    twice = run_program(run_program(row, live.program(0)), live.program(1))
    np.testing.assert_allclose(twice, row, atol=1e-4)


def test_a_frozen_swap_refuses_what_a_vector_cannot_be() -> None:
    pair: dict[str, Any] = {"first": np.eye(WIDTH)[0], "second": np.eye(WIDTH)[1], "layers": [2]}
    rows = np.ones((1, 2, WIDTH))
    gate = Gate(direction=np.ones(WIDTH), layer=1, threshold=0.0)
    for options in ({"when": gate}, {"phase": "prefill"}):
        with pytest.raises(SpecError, match="leave them out"):
            Swap(**pair, **options).frozen(rows, positions=[0, 1])
    with pytest.raises(SpecError, match="rows: shape"):
        Swap(**pair).frozen(rows, positions=[0])
    with pytest.raises(SpecError, match="NaN"):
        Swap(**pair).frozen(rows * np.nan, positions=[0, 1])
