"""Autoencoders in a tap: the definition in float64, neighbours to the bit, faults, and capacity."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inspect_lens._engine.readout.logit_lens import LensStore
from inspect_lens._engine.tap.buffers import TapState
from inspect_lens._engine.tap.edit_table import Bank
from inspect_lens._engine.tap.splice import Autoencoder
from inspect_lens._engine.tap.splice import Splice as DeviceSplice
from inspect_lens.errors import CapacityError, SpecError
from inspect_lens.sae import SparseAutoencoder
from inspect_lens.spec import Add, EditBase, Gate, LensRequest, Scale, Splice
from tests.kit.edit_cases import WIDTH, random_rows
from tests.kit.edit_table import N_FED, N_PROMPT, configs_of, make_state, run, sealed, streams

N = 50
MODES = ("set", "add", "scale", "at_least", "at_most")


def _sae(seed: int, kind: str) -> SparseAutoencoder:
    rng = np.random.default_rng(seed)
    return SparseAutoencoder(
        weight=random_rows(seed, N) / np.float32(np.sqrt(WIDTH)),
        bias=rng.standard_normal(N).astype(np.float32) * np.float32(0.3),
        threshold=rng.uniform(0, 1, N).astype(np.float32) if kind == "jumprelu" else None,
        top_k=7 if kind == "topk" else 0,
        decoder=random_rows(seed + 1, N) / np.float32(np.sqrt(WIDTH)),
        decoder_bias=random_rows(seed + 2, 1)[0],
    )


def _defined(sae: SparseAutoencoder, edit: Splice, x: torch.Tensor) -> torch.Tensor:
    """In float64 numpy, by the words of `Splice`."""
    rows = x.numpy()
    before = sae.activations(rows)
    after = before.copy()
    for latent, value in edit.latents:
        old = before[:, latent]
        new = {
            "set": np.full_like(old, value),
            "add": old + value,
            "scale": old * value,
            "at_least": np.maximum(old, value),
            "at_most": np.minimum(old, value),
        }[edit.mode]
        after[:, latent] = np.where(old > 0, new, old) if edit.only_if_active else new
    out = after @ sae.decoder.astype(np.float64) + sae.decoder_bias
    if edit.error_term:
        out += rows - sae.reconstruct(rows)
    return torch.from_numpy(out)


def _spliced(
    state: TapState, sae: SparseAutoencoder, edits: list[EditBase]
) -> tuple[Bank, list[int]]:
    """A table with the edits, and the configurations of the tokens; the work is planned."""
    form = sae.for_engine()
    known = [e.resolved(form.entry) if isinstance(e, Splice) else e for e in edits]
    bank = Bank(state.bank)
    bank.splices.find = {form.sha256: Autoencoder(form, torch.device("cpu"))}.__getitem__
    index = {point: i for i, point in enumerate(state.taps)}
    steering = bank.admit(sealed(LensRequest(edits=known)), index)
    bank.flush()
    return bank, configs_of(steering)


def _run(
    sae: SparseAutoencoder, edits: list[EditBase], x: list[torch.Tensor], **more: Any
) -> list[torch.Tensor]:
    state = make_state()
    bank, configs = _spliced(state, sae, edits)
    state.splices = bank.splices.work(np.asarray(configs, dtype=np.int32))
    found = run(state, configs, x, **more)
    assert state.splice_error is None
    assert state.spliced == state.splices.keys()
    return found


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**20),
    st.sampled_from(["relu", "jumprelu", "topk"]),
    st.sampled_from(MODES),
    st.booleans(),
    st.booleans(),
    st.dictionaries(st.integers(0, N - 1), st.floats(-3, 3, width=32), max_size=4),
)
def test_the_stream_becomes_what_the_definition_says(
    seed: int, kind: str, mode: Any, error_term: bool, active: bool, latents: dict[int, float]
) -> None:
    sae, x = _sae(seed, kind), streams(seed + 3)
    how = {"mode": mode, "only_if_active": active} if latents else {}
    edit = Splice(sae="s", layers=[1], latents=latents, error_term=error_term, **how)
    out = _run(sae, [edit], x)
    torch.testing.assert_close(out[1].double(), _defined(sae, edit, x[1]), rtol=2e-4, atol=2e-4)
    assert torch.equal(out[0], x[0])
    assert torch.equal(out[2], x[2])
    if error_term and not latents:
        assert torch.equal(out[1], x[1])


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from([None, "prompt", "completion", [2, -1]]))
def test_edits_in_front_and_behind_act_in_their_order_on_the_chosen_tokens(
    seed: int, positions: Any
) -> None:
    sae, x = _sae(seed, "jumprelu"), streams(seed + 3)
    v, w = random_rows(seed + 4, 2)
    splice = Splice(sae="s", layers=[1], positions=positions or "all")
    out = _run(
        sae, [Add(vector=v, layers=[1]), splice, Scale(direction=w, factor=3, layers=[1])], x
    )
    chosen = {
        "prompt": range(N_PROMPT),
        "completion": range(N_PROMPT, N_FED),
        None: range(N_FED),
    }.get(positions if isinstance(positions, str) else None, range(N_FED))
    if isinstance(positions, list):
        chosen = [2, N_PROMPT - 1]
    before = x[1] + torch.from_numpy(v)
    wanted = before.double()
    wanted[list(chosen)] = _defined(sae, splice, before[list(chosen)])
    u = torch.from_numpy(w).double()
    u = u / u.norm()
    wanted = wanted + 2 * (wanted @ u)[:, None] * u
    torch.testing.assert_close(out[1].double(), wanted, rtol=2e-4, atol=5e-4)


def test_tokens_of_others_keep_their_bits_and_a_shut_gate_those_of_its_own() -> None:
    sae, x = _sae(1, "relu"), streams(2)
    direction = random_rows(3, 1)[0]
    scores = x[0] @ torch.from_numpy(direction)
    middle = float(scores[1::2].sort().values[2:4].mean())
    gate = Gate(direction=direction, layer=0, threshold=middle)
    state = make_state()
    bank, configs = _spliced(state, sae, [Splice(sae="s", layers=[1], when=gate)])
    configs = [config if p % 2 else 0 for p, config in enumerate(configs)]
    state.splices = bank.splices.work(np.asarray(configs, dtype=np.int32))
    out = run(state, configs, x)
    acts = (scores > middle) & (torch.arange(N_FED) % 2 == 1)
    assert int(acts.sum()) == 2
    assert torch.equal(out[1][~acts], x[1][~acts])
    assert (out[1][acts] != x[1][acts]).any(dim=-1).all()


def test_both_halves_of_a_stream_are_read_and_the_second_stays() -> None:
    sae, x = _sae(5, "relu"), streams(6)
    other = torch.from_numpy(random_rows(7, N_FED))
    edit = Splice(sae="s", layers=[1])
    kept = other.clone()
    out = _run(sae, [edit], x, residual=other)
    wanted = _defined(sae, edit, x[1] + other)
    torch.testing.assert_close((out[1] + other).double(), wanted, rtol=2e-4, atol=5e-4)
    assert torch.equal(other, kept)


def test_a_row_too_large_to_be_written_stays_and_its_request_is_noted() -> None:
    sae, x = _sae(8, "relu"), streams(9)
    edit = Splice(sae="s", layers=[1], latents={3: 3e38}, positions=[4])
    state = make_state()
    bank, configs = _spliced(state, sae, [edit])
    state.splices = bank.splices.work(np.asarray(configs, dtype=np.int32))
    out = run(state, configs, x)
    assert torch.equal(out[1], x[1])
    assert state.faults.nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("error_term", [False, True])
def test_a_row_that_float16_cannot_hold_is_no_row_to_read(error_term: bool) -> None:
    form = _sae(8, "relu").for_engine("float16")
    rows, own = streams(9)[1][:3].clone(), Autoencoder(form, torch.device("cpu"))
    rows[1, 5] = 7e4
    for latent in range(N):
        edit = Splice(sae="s", layers=[1], latents={latent: 0.0}, error_term=error_term)
        (one,) = edit.resolved(form.entry).program(0)
        step = DeviceSplice.of(one, own).step(rows)
        assert step.isfinite().all(dim=-1).tolist() == [True, False, True]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**20), st.integers(1, 2 * WIDTH))
def test_of_latents_that_tie_those_with_lower_numbers_count(seed: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    # Products of small integers are exact, and most have several equals.
    eye = np.eye(WIDTH, dtype=np.float32)[rng.integers(0, WIDTH, 2 * WIDTH)]
    zeros = np.zeros(len(eye), dtype=np.float32)
    sae = SparseAutoencoder(
        weight=eye, bias=zeros, decoder=eye, decoder_bias=zeros[:WIDTH], top_k=k
    )
    rows = rng.integers(-2, 4, (5, WIDTH)).astype(np.float32)
    wanted = np.zeros((5, len(eye)))
    for i, row in enumerate(rows):
        inner = eye @ row
        largest = sorted(range(len(eye)), key=lambda n: (-inner[n], n))[:k]
        wanted[i, largest] = np.maximum(inner[largest], 0)
    own = Autoencoder(sae.for_engine(), torch.device("cpu"))
    assert np.array_equal(own.activations(torch.from_numpy(rows)).numpy(), wanted)
    assert np.array_equal(sae.activations(rows), wanted)
    some = rng.permutation(len(eye))[:9]
    assert np.array_equal(sae.activations(rows, some), wanted[:, some])


def test_thresholds_beside_top_k_are_refused() -> None:
    both = replace(_sae(0, "jumprelu"), top_k=3)
    with pytest.raises(SpecError, match="top_k=3"):
        both.for_engine()


def test_a_configuration_that_is_given_back_leaves_nothing_behind() -> None:
    state, sae = make_state(), _sae(10, "relu")
    edits = [Splice(sae="s", layers=[1]), Add(vector=random_rows(11, 1)[0], layers=[1])]
    form = sae.for_engine()
    bank, _ = _spliced(state, sae, edits)
    assert state.bank.rest.any()
    known = [edits[0].resolved(form.entry), edits[1]]  # type: ignore[attr-defined]
    index = {point: i for i, point in enumerate(state.taps)}
    steering = bank.admit(sealed(LensRequest(edits=known)), index)
    bank.release(steering)
    bank.release(steering)
    again = bank.admit(sealed(LensRequest(edits=edits[1:])), index)
    assert again.config == steering.config, "a number that was given back is taken again"
    bank.flush()
    assert not state.bank.rest[again.config].any()
    bank.release(again)
    assert not bank.splices.work(np.arange(len(state.bank.rest), dtype=np.int32))
    assert bank.rows_in_use == 0


def test_lenses_and_autoencoders_share_one_bound() -> None:
    form = _sae(12, "topk").for_engine()
    store = LensStore(torch.device("cpu"), most_bytes=form.nbytes)
    store.add(form)
    store.add(form)
    assert store.autoencoder(form.sha256).top_k == 7
    with pytest.raises(SpecError, match=r"lens: \w+ removed or replaced while"):
        store.get(form.sha256)
    other = _sae(13, "relu").for_engine()
    with pytest.raises(CapacityError, match="the autoencoder has"):
        store.add(other)
    store.remove(form.sha256)
    store.add(other)
    assert other.sha256 != _sae(13, "relu").for_engine("float16").sha256


def test_what_an_edit_cannot_mean_is_refused() -> None:
    assert Splice.model_validate({"sae": "s", "layers": [1], "latents": {"7": 1}}).latents == (
        (7, 1.0),
    )
    for fields, words in (
        ({"latents": {-1: 1.0}}, "from 0 to"),
        ({"latents": [[1, 2.0], [1, 3.0]]}, "each once"),
        ({"latents": {1: float("inf")}}, "finite"),
        ({"latents": {"x": 1.0}}, "integer"),
        ({"latents": {1: True}}, "give a number"),
        ({"site": "z", "heads": [0]}, "whole rows"),
        ({"mode": "clamp"}, "mode"),
        ({"latents": {1: 10**400}}, "finite"),
        ({"latents": {1: 1e39}}, "finite"),
        ({"latents": [[10**4000, 1.0]]}, r"(?s)^.{0,400}from 0 to"),
        ({"latents": {1 << 24: 1.0}}, "from 0 to"),
        ({"mode": "scale"}, "without latents"),
        ({"only_if_active": True}, "without latents"),
    ):
        with pytest.raises(ValueError, match=words):
            Splice(**{"sae": "s", "layers": [1], **fields})  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="has 0 to 49"):
        Splice(sae="s", layers=[1], latents={50: 1.0}).resolved(_sae(0, "relu").for_engine().entry)
