"""Edits of many latents at once: the definition in plain torch, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inspect_lens.errors import SpecError
from inspect_lens.spec import (
    MOST_LATENTS,
    Add,
    Gate,
    Latents,
    LensRequest,
    Reconstruct,
    check_request,
    parse_edits,
)
from tests.kit.edit_cases import WIDTH, random_rows
from tests.kit.edit_table import N_FED, admitted, configs_of, facts, make_state, run, streams


def _latents(seed: int, n: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "encoder": random_rows(seed, n) / np.sqrt(WIDTH),
        "decoder": random_rows(seed + 1, n) / np.sqrt(WIDTH),
        "bias": rng.standard_normal(n) * 0.5,
        "threshold": rng.uniform(0.0, 1.0, n),
    }


def _activations(h: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    parts = [torch.as_tensor(np.asarray(given[name], np.float32)).double() for name in given]
    encoder, _, bias, threshold = parts
    z = h @ encoder.T + bias
    return torch.where(z > threshold, z, torch.zeros_like(z))


def _edited(edit: Latents | Reconstruct, x: list[torch.Tensor]) -> torch.Tensor:
    state = make_state()
    _, steering = admitted(LensRequest(edits=[edit]), state)
    return run(state, configs_of(steering), x)[1]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**20), st.integers(1, MOST_LATENTS))
def test_the_stream_gets_what_chosen_latents_are_to_be_and_keeps_the_rest(
    seed: int, n: int
) -> None:
    given, x = _latents(seed, n), streams(seed + 2)
    value = np.random.default_rng(seed + 3).uniform(0.0, 3.0, n).astype(np.float32)
    out = _edited(Latents(value=value, layers=[1], **given), x)
    h, decoder = x[1].double(), torch.from_numpy(given["decoder"]).double()
    old, new = _activations(h, given), torch.from_numpy(value).double().expand(N_FED, n)
    assert n < 8 or 0 < int((old > 0).sum()) < old.numel()
    wanted = h - old @ decoder + new @ decoder
    torch.testing.assert_close(out.double(), wanted, rtol=2e-4, atol=2e-4)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**20), st.integers(1, MOST_LATENTS), st.sampled_from([1.0, 0.25]))
def test_a_reconstruction_takes_the_place_of_the_stream(seed: int, n: int, strength: float) -> None:
    given, x = _latents(seed, n), streams(seed + 2)
    base = random_rows(seed + 4, 1)[0]
    edit = Reconstruct(decoder_bias=base, strength=strength, layers=[1], **given)
    h, decoder = x[1].double(), torch.from_numpy(given["decoder"]).double()
    made = _activations(h, given) @ decoder + torch.from_numpy(base).double()
    wanted = (1 - strength) * h + strength * made
    torch.testing.assert_close(_edited(edit, x).double(), wanted, rtol=2e-4, atol=2e-4)


def test_latents_of_one_edit_do_not_see_each_other() -> None:
    given = _latents(5, 2) | {"bias": np.ones(2), "threshold": np.zeros(2)}
    # What the first writes is what the second reads.
    given["decoder"] = given["encoder"][::-1].copy()
    x, value = streams(6), np.array([9.0, 9.0])
    both = _edited(Latents(value=value, layers=[1], **given), x)
    swapped = {name: part[::-1].copy() for name, part in given.items()}
    again = _edited(Latents(value=value, layers=[1], **swapped), x)
    torch.testing.assert_close(both, again, rtol=1e-5, atol=1e-5)


def test_the_most_latents_fit_beside_a_gate_and_no_more() -> None:
    given = _latents(7, MOST_LATENTS)
    gate = Gate(direction=random_rows(8, 1)[0], layer=1)
    some = Latents(value=np.zeros(MOST_LATENTS), layers=[1], when=gate, **given)
    check_request(LensRequest(edits=[some]), facts())
    check_request(LensRequest(edits=[Reconstruct(layers=[1], **given)]), facts())
    more = Add(vector=random_rows(9, 1)[0], layers=[1])
    with pytest.raises(SpecError, match="65 instructions"):
        check_request(LensRequest(edits=[some, more]), facts())
    with pytest.raises(SpecError, match="encoder has 64 latents; 63 at most"):
        parse_edits(_form(_latents(7, 64), value=[0.0] * 64))


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"value": [1.0, 2.0]}, "value has 2 latents and encoder 3"),
        ({"bias": [1.0]}, "bias has 1 latents and encoder 3"),
        ({"threshold": [0.0, -1.0, 0.0]}, "threshold: one is below 0"),
        ({"decoder": np.ones((2, WIDTH)).tolist()}, "decoder has 2 latents and encoder 3"),
        ({"decoder": np.ones((3, 5)).tolist()}, "wide"),
        ({"encoder": np.zeros((3, WIDTH)).tolist()}, "encoder needs a direction"),
        ({"value": None}, "value"),
    ],
)
def test_latents_that_do_not_fit_are_refused_by_name(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        parse_edits(_form(_latents(10, 3), value=[1.0, 2.0, 3.0]) | wrong)


def test_values_of_their_own_for_each_layer() -> None:
    given = _latents(11, 2)
    edit = Latents(value=[[1.0, 2.0], [3.0, 4.0]], layers=[0, 2], **given)
    assert [one.params[2] for at in (0, 1) for one in edit.program(at)] == [1.0, 2.0, 3.0, 4.0]
    (again,) = parse_edits(edit.model_dump(mode="json"))
    assert again.model_dump(mode="json") == edit.model_dump(mode="json")
    assert [one.params for one in again.program(1)] == [one.params for one in edit.program(1)]


def _form(given: dict[str, Any], value: list[float]) -> dict[str, Any]:
    lists = {name: np.asarray(part).tolist() for name, part in given.items()}
    return {"op": "latents", "layers": [1], "value": value, **lists}
