"""What is put in: the closed form, and controls that differ from it in one thing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.protocol.messages import ROWS, SCORES
from inspect_lens.errors import SpecError
from inspect_lens.oracle import CONTROLS, OracleConfig
from inspect_lens.oracle._send import injection, parse_controls, random_rows, shuffled_rows
from inspect_lens.spec import parse_extra_args, to_extra_args, to_wire_args
from tests.kit.steps import HIDDEN, Worker, begin, exporter, rows, sealed

RNG = np.random.default_rng(0)
SHOWN = RNG.standard_normal((5, 16)).astype(np.float32) * np.float32([[1], [9], [0.1], [40], [3]])
PLACES = (7, 8, 9, 10, 11)


def config(coefficient: float = 1.0, hook: int = 1) -> OracleConfig:
    return OracleConfig(
        hook_onto_layer=hook,
        special_token=" ?",
        prefix_template="Layer: {layer}\\n{special_token} * {num_positions} \\n",
        steering_coefficient=coefficient,
        act_layer_combinations=((1,),),
    )


@pytest.mark.parametrize("coefficient", [1.0, 2.0])
def test_the_engine_makes_the_closed_form_of_what_is_sent(coefficient: float) -> None:
    """Over the wire, into the engine's table, through its tap, and back as captured rows."""
    places, n_prompt, n_fed = (3, 4, 5, 6), 9, 11
    vectors = RNG.standard_normal((4, HIDDEN)).astype(np.float32) * np.float32(7.0)
    sent = injection(config(coefficient, hook=2), vectors, places)
    wanted = LensRequest(edits=(sent,), capture=CaptureSpec(layers=(2,)))
    request = parse_extra_args(to_wire_args(to_extra_args(wanted)))
    assert request is not None
    collector, worker = Collector(), Worker(exporter())
    try:
        begin(worker, collector, "a", sealed(collector, request, n_prompt, 3))
        worker.step([("a", 1, 0, 5)])  # a chunk that ends inside the placeholders
        worker.step([("a", 1, 5, 4)])
        worker.step([("a", 1, 9, 1)])
        worker.step([("a", 1, 10, 1)])
        got = collector.take("a", counts={ROWS: n_fed, SCORES: 0}, n_fed=n_fed, timeout_s=5)
    finally:
        worker.stepper.close()
        collector.close()
    h = rows(1, 2, 0, n_fed)
    expected = h.clone()
    for place, row in zip(places, vectors, strict=True):
        v = torch.tensor(row)
        # The formula of the paper, for one token.
        expected[place] = h[place] + coefficient * h[place].norm() * v / v.norm()
    # Everything else is as it was: the prompt around the placeholders, and all that is decoded.
    np.testing.assert_allclose(got.tensors[ROWS].to_float32()[0], expected.numpy(), rtol=1e-5)


def test_rows_and_places_have_to_fit() -> None:
    with pytest.raises(SpecError, match="4 placeholders"):
        injection(config(), SHOWN, PLACES[:4])
    broken = SHOWN.copy()
    broken[3] = 0
    with pytest.raises(SpecError, match="row 3"):
        injection(config(), broken, PLACES)
    broken[2, 5] = np.nan
    with pytest.raises(SpecError, match="row 2"):
        injection(config(), broken, PLACES)


def test_shuffled_rows_keep_norms_values_and_angles_and_lose_directions() -> None:
    made = shuffled_rows(SHOWN, seed=3)
    np.testing.assert_array_equal(np.sort(made, axis=1), np.sort(SHOWN, axis=1))
    np.testing.assert_allclose(made @ made.T, SHOWN @ SHOWN.T, rtol=1e-5)
    assert not np.allclose(made, SHOWN)
    np.testing.assert_array_equal(made, shuffled_rows(SHOWN, seed=3))
    assert not np.array_equal(made, shuffled_rows(SHOWN, seed=4))


def test_random_rows_have_the_norms_and_nothing_else() -> None:
    wide = np.repeat(SHOWN, 64, axis=1)
    made = random_rows(wide, seed=3)
    np.testing.assert_allclose(
        np.linalg.norm(made, axis=1), np.linalg.norm(wide, axis=1), rtol=1e-5
    )
    cosines = (made * wide).sum(1) / (np.linalg.norm(made, axis=1) * np.linalg.norm(wide, axis=1))
    # Of 5 independent directions in 1024 dimensions none is near: 5 standard deviations are 0.16.
    assert np.abs(cosines).max() < 0.16
    np.testing.assert_array_equal(made, random_rows(wide, seed=3))
    assert not np.array_equal(made, random_rows(wide, seed=(3, 1)))


def test_controls_are_named_or_all_or_none() -> None:
    assert parse_controls(True) == CONTROLS == ("text_only", "shuffled", "random")
    assert parse_controls(False) == ()
    assert parse_controls(["random", "text_only"]) == ("text_only", "random")
    with pytest.raises(SpecError, match="placebo"):
        parse_controls(["placebo"])
