"""From a request's edits to the table and the op: each token gets what the definition says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inspect_lens._engine.tap.edit_table import Bank
from inspect_lens._engine.tap.gates import NEVER
from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec import (
    Ablate,
    Add,
    Gate,
    Latents,
    LensRequest,
    Renormalise,
    Replace,
    SteeringVector,
    check_request,
    run_program,
)
from tests.kit.edit_cases import WIDTH, edit_cases, random_rows
from tests.kit.edit_table import (
    LAYERS,
    N_FED,
    N_PROMPT,
    admitted,
    configs_of,
    facts,
    make_state,
    run,
    sealed,
    streams,
)


@settings(max_examples=25, deadline=None)
@example(16, [15] * 6, False)
@given(st.integers(0, 2**20), st.lists(st.integers(0, 28), min_size=1, max_size=8), st.booleans())
def test_chains_equal_the_definition(seed: int, chosen: list[int], is_split: bool) -> None:
    cases = edit_cases(seed)
    edits = [cases[i % len(cases)][0] for i in chosen]
    # Something has to be left whose norm can be given back.
    edits += [Add(vector=random_rows(seed + 9, 1)[0], layers=[1]), Renormalise(layers=[1])]
    state = make_state()
    _, steering = admitted(LensRequest(edits=edits), state)
    given_streams = streams(seed)
    residual = torch.from_numpy(random_rows(seed, N_FED)) if is_split else None
    out = run(state, configs_of(steering), given_streams, residual)
    program = [one for edit in edits for one in edit.program(0)]
    for p in range(N_FED):
        stream = given_streams[1][p].numpy().astype(np.float64)
        other = 0.0 if residual is None else residual[p].numpy().astype(np.float64)
        start = stream + other
        wanted = run_program(start, program) - other
        # Some chains, such as one edit of latents six times, make a stream huge, and its last bits.
        norms = [np.linalg.norm(run_program(start, program[:n])) for n in range(len(program))]
        growth = float(max(norms) / norms[0])
        atol = (1e-3 + 1e-6 * growth) * max(1.0, float(np.abs(wanted).max()))
        np.testing.assert_allclose(out[1][p].numpy(), wanted, rtol=1e-3, atol=atol)


@pytest.mark.parametrize("only", [False, True])
def test_a_latent_is_raised_where_it_is_less_and_no_other_bit_changes(only: bool) -> None:
    e, d = random_rows(11, 2)
    d /= float(e @ d)  # what is written is read again
    x = streams(12)
    z = x[1].numpy().astype(np.float64) @ e.astype(np.float64)
    value = float(np.quantile(z[z > 0], 0.5))
    raised = (z < value) & ((z > 0) | (not only))
    assert 0 < raised.sum() < len(z)
    edit = Latents(
        encoder=e[None], decoder=d[None], value=[value], mode="at_least", only_if_active=only,
        layers=[1],
    )  # fmt: skip
    state = make_state()
    _, steering = admitted(LensRequest(edits=[edit]), state)
    out = run(state, configs_of(steering), x)[1]
    for p in range(N_FED):
        if not raised[p]:
            assert torch.equal(out[p], x[1][p])
            continue
        was = max(z[p], 0.0)
        wanted = x[1][p].numpy().astype(np.float64) + (value - was) * d
        np.testing.assert_allclose(out[p].numpy(), wanted, rtol=1e-4, atol=1e-4)
        if z[p] > 0:
            assert float(out[p].numpy() @ e) == pytest.approx(value, rel=1e-3, abs=1e-3)


def test_positions_phases_and_rows_of_their_own() -> None:
    rows = np.random.default_rng(0).standard_normal((2, 2, WIDTH)).astype(np.float32)
    v = random_rows(1, 1)[0]
    request = LensRequest(
        edits=[
            Add(vector=v, layers=[0], positions="completion"),
            Replace(rows=rows, layers=[1, 2], positions=[-1, 7]),
            Add(vector=v, layers=[2], positions=[True, False, True, False, False, False]),
            Ablate(direction=v, layers=[1], positions="last_prompt"),
        ]
    )
    state = make_state()
    _, steering = admitted(request, state)
    x = streams(3)
    out = run(state, configs_of(steering), x)
    for p in range(N_FED):
        first = x[0][p] + torch.from_numpy(v) if p >= N_PROMPT else x[0][p]
        torch.testing.assert_close(out[0][p], first)
    for layer, at in ((1, 0), (2, 1)):
        torch.testing.assert_close(out[layer][7], torch.from_numpy(rows[at, 1]))
    torch.testing.assert_close(out[2][5], torch.from_numpy(rows[1, 0]))
    u = v / np.linalg.norm(v)
    assert abs(float(out[1][5].numpy() @ u)) < 1e-5, "replaced first, ablated behind it"
    torch.testing.assert_close(out[2][0], x[2][0] + torch.from_numpy(v))
    assert torch.equal(out[2][1], x[2][1])


def test_vectors_and_other_edits_act_in_order() -> None:
    v, w = random_rows(5, 2)
    vector = SteeringVector(activations=w[None], layer_indices=[1], scale=2.0)
    matched = SteeringVector(activations=v[None], layer_indices=[1], scale=0.5, norm_match=True)
    request = LensRequest(edits=[vector, matched, Ablate(direction=w, layers=[1])])
    state = make_state()
    _, steering = admitted(request, state)
    x = streams(6)
    out = run(state, configs_of(steering), x)[1][2].numpy().astype(np.float64)
    h = x[1][2].numpy().astype(np.float64)
    added = h + 2.0 * w
    steered = added + 0.5 * np.linalg.norm(added) * v / np.linalg.norm(v)
    u = w.astype(np.float64) / np.linalg.norm(w)
    np.testing.assert_allclose(out, steered - (steered @ u) * u, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sharpness", [None, 3.0])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_gate_of_an_earlier_tap_or_the_same_one_decides(
    sharpness: float | None, layer: int
) -> None:
    v, probe = random_rows(7, 2)
    gate = Gate(direction=probe, layer=layer, threshold=0.2, sharpness=sharpness)
    request = LensRequest(
        edits=[
            Add(vector=v, layers=[1, 2], when=gate),
            Add(vector=v, scale=3.0, layers=[2], when=gate, positions="prompt"),
        ]
    )
    state = make_state()
    _, steering = admitted(request, state)
    x = streams(8)
    out = run(state, configs_of(steering), x)
    score = x[layer].numpy().astype(np.float64) @ probe.astype(np.float64) - 0.2
    factor = (score > 0) * 1.0 if sharpness is None else 1 / (1 + np.exp(-sharpness * score))
    for p in range(N_FED):
        np.testing.assert_allclose(out[1][p], x[1][p].numpy() + factor[p] * v, rtol=1e-4, atol=1e-4)
        more = 4.0 if p < N_PROMPT else 1.0
        wanted = x[2][p].numpy() + more * factor[p] * v
        np.testing.assert_allclose(out[2][p], wanted, rtol=1e-4, atol=1e-4)
    if sharpness is None:
        shut = np.flatnonzero(factor == 0)
        assert len(shut)
        for p in shut:
            assert torch.equal(out[1][p], x[1][p]), "a shut gate changes no bit"


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_gate_of_scope_rest_opens_behind_the_token_that_fires(layer: int) -> None:
    v, probe = random_rows(7, 2)
    x = streams(8)
    score = (x[layer] @ torch.from_numpy(probe)).numpy()[N_PROMPT:]
    # The second of the sampled tokens is above, and the first one is not.
    if score[1] < score[0]:
        probe, score = -probe, -score
    gate = Gate(direction=probe, layer=layer, threshold=float(score[:2].mean()), scope="rest")
    edit = Add(vector=v, layers=[1], when=gate, positions="completion")
    state = make_state()
    bank, steering = admitted(LensRequest(edits=[edit]), state)
    configs = configs_of(steering)
    one_by_one = [list(range(N_PROMPT)), *([p] for p in range(N_PROMPT, N_FED))]
    # As tokens come, and once more as after a pre-emption: the decisions stand.
    for parts in (one_by_one, [list(range(N_FED))]):
        for part in parts:
            own = [configs[p] for p in part]
            out = run(state, own, [one[part] for one in x], first=part[0])
            for i, p in enumerate(part):
                wanted = x[1][p] + torch.from_numpy(v) if p > N_PROMPT + 1 else x[1][p]
                torch.testing.assert_close(out[1][i], wanted)
    latches = state.bank.latches
    assert int(latches.first[7, 0]) == N_PROMPT + 1
    assert int(latches.noted[7, 0]) == N_PROMPT + 2
    bank.reset(7)
    assert int(latches.first[7, 0]) == NEVER


def test_a_shadow_gate_leaves_its_edits_out_and_equal_gates_are_one() -> None:
    v, probe = random_rows(7, 2)
    shadow = Gate(direction=probe, layer=2, scope="rest", shadow=True)
    acts = Gate(direction=probe, layer=2, scope="rest", reads="completion")
    first = Add(vector=v, layers=[0], when=shadow, positions="completion")
    second = Add(vector=v, layers=[1], when=acts, phase="decode")
    envelopes = sealed(LensRequest(edits=[first, second])).edits
    assert [e.latch for e in envelopes] == [0, None]
    assert [e.layers for e in envelopes] == [(2,), (1,)]


def test_a_gate_that_another_stage_reads_is_refused() -> None:
    v, probe = random_rows(7, 2)
    gate = Gate(direction=probe, layer=0)
    envelope = sealed(LensRequest(edits=[Add(vector=v, layers=[1], when=gate)]))
    state = make_state()
    here = {tap: i for i, tap in enumerate(state.taps) if tap.layer}
    with pytest.raises(UnsupportedError, match="stage of the pipeline"):
        Bank(state.bank).admit(envelope, here)


def test_what_a_request_held_is_given_back_and_shared_by_content() -> None:
    v = random_rows(9, 1)[0]
    state = make_state(bank_rows=4)
    bank, one = admitted(LensRequest(edits=[Ablate(direction=v, layers=LAYERS)]), state)
    assert bank.rows_in_use == 1, "a direction that is read and written lies there once"
    index = {point: i for i, point in enumerate(state.taps)}
    w, z = random_rows(10, 2)
    others = [
        bank.admit(sealed(LensRequest(edits=[Add(vector=row, layers=[0])])), index)
        for row in (w, z)
    ]
    for steering in (one, *others):
        bank.release(steering)
    assert bank.rows_in_use == 0
    for seed in range(20):
        row = random_rows(20 + seed, 1)[0]
        bank.release(bank.admit(sealed(LensRequest(edits=[Add(vector=row, layers=[0])])), index))
    assert bank.rows_in_use == 0


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        ([Add(vector=np.ones(WIDTH), layers=[3])], "layers 0 to 2"),
        ([Add(vector=np.ones(WIDTH + 1), layers=[1])], "25 wide"),
        ([Add(vector=np.ones(WIDTH), layers=[1])] * 65, "64 at most"),
        (
            [
                Add(
                    vector=np.ones(WIDTH),
                    layers=[1],
                    when=Gate(direction=np.ones(WIDTH), layer=1, threshold=float(i)),
                )
                for i in range(9)
            ],
            "8 at most",
        ),
    ],
)
def test_edits_are_judged_by_the_engines_facts(edits: list[Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        check_request(LensRequest(edits=edits), facts())
