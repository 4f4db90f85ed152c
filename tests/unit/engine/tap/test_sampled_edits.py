"""Edits of sampled tokens with some ids: each token gets what its own id says, and no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inspect_lens._engine.protocol.edits import seal_edits
from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec import (
    NEXT_TOKEN,
    Ablate,
    Add,
    Clamp,
    EditBase,
    Kind,
    LensRequest,
    Replace,
    SiteWidth,
    TokenMatch,
    check_request,
    parse_edits,
    run_program,
    token_gate,
)
from tests.kit.edit_cases import WIDTH, random_rows
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

V, W = random_rows(40, 2)


def _run(edits: list[EditBase], ids: list[int], x: list[torch.Tensor]) -> list[torch.Tensor]:
    """One pass over prompt and sampled tokens, of which every second one is somebody else's."""
    state = make_state()
    _, steering = admitted(LensRequest(edits=edits), state)
    state.bank.fed.source = lambda: torch.tensor(ids, dtype=torch.int32)
    state.bank.fed.note()
    return run(state, configs_of(steering), x)


def _match(ids: list[int], *, exclude: bool = False) -> TokenMatch:
    return TokenMatch(token_ids=ids, among="completion", exclude=exclude)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=N_FED, max_size=N_FED),
    st.sets(st.integers(0, 4), min_size=1, max_size=4),
    st.sets(st.integers(0, 4), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_a_sampled_token_gets_the_edits_of_its_id_in_order(
    ids: list[int], first: set[int], second: set[int], exclude: bool, seed: int
) -> None:
    edits = [
        Add(vector=V, layers=[0, 1], positions=_match(sorted(first))),
        Clamp(
            direction=W, max=0.1, layers=[1, 2], positions=_match(sorted(second), exclude=exclude)
        ),
        Add(vector=W, layers=[2], positions="completion"),
    ]
    x = streams(seed)
    out = _run(edits, ids, x)
    for layer in LAYERS:
        for p in range(N_FED):
            if p < N_PROMPT:
                assert torch.equal(out[layer][p], x[layer][p]), "a prompt keeps its bits"
                continue
            acts = [ids[p] in first, (ids[p] in second) != exclude, True]
            wanted = x[layer][p].numpy().astype(np.float64)
            for edit, does in zip(edits, acts, strict=True):
                if does and layer in edit.layers:
                    wanted = run_program(wanted, edit.program(edit.layers.index(layer)))
            np.testing.assert_allclose(out[layer][p].numpy(), wanted, rtol=1e-4, atol=1e-4)


def test_a_token_without_the_id_keeps_its_bits_and_others_in_the_batch_do() -> None:
    x = streams(3)
    state = make_state()
    edit = Ablate(direction=V, layers=[1], positions=_match([7]))
    _, steering = admitted(LensRequest(edits=[edit]), state)
    ids = [7] * N_FED
    ids[8] = 6
    state.bank.fed.source = lambda: torch.tensor([*ids, 7, 7, 7, 7, 7, 7, 7], dtype=torch.int32)
    state.bank.fed.note()
    configs = configs_of(steering)
    configs[9] = 0
    out = run(state, configs, x)[1]
    changed = [p for p in range(N_FED) if not torch.equal(out[p], x[1][p])]
    assert changed == [6, 7]


def test_the_definition_of_the_instruction() -> None:
    named = token_gate(_match([5, 3, 3]), SiteWidth("resid_post", WIDTH), register=2)
    others = token_gate(_match([0], exclude=True), SiteWidth("resid_post", WIDTH), register=3)
    assert named.kind == others.kind == Kind.TOKEN_GATE
    registers = np.full(NEXT_TOKEN + 4, -1.0)
    for token, wanted in ((3, (1, 1)), (5, (1, 1)), (4, (0, 1)), (0, (0, 0)), (None, (0, 1))):
        run_program(np.ones(WIDTH), [named, others], registers, token_id=token)
        assert (registers[2], registers[3]) == wanted


def test_ranks_that_share_a_row_each_have_all_ids() -> None:
    width = SiteWidth("mlp_hidden", 12, shards=3)
    row = token_gate(_match([9, 2]), width, register=0).read
    assert row is not None
    assert row.reshape(3, 4).tolist() == [[3.0, 10.0, 0.0, 0.0]] * 3


def test_edits_of_the_same_ids_share_a_register_and_look_at_each_layer() -> None:
    request = LensRequest(
        edits=[
            Add(vector=V, layers=[0, 2], positions=_match([1, 2])),
            Add(vector=W, layers=[1], positions=_match([2, 1])),
            Add(vector=W, layers=[1], positions=_match([1]), phase="decode"),
        ]
    )
    looks = [edit for edit in sealed(request).edits if edit.reads_ids]
    assert [edit.layers for edit in looks] == [(0, 2), (1,), (1,)]
    assert [edit.programs[0][0][0].gate for edit in looks] == [0, 0, 1]
    assert {edit.lo for edit in sealed(request).edits} == {N_PROMPT}


def test_what_decides_is_part_of_the_hash_of_the_request() -> None:
    hashes = {
        sealed(LensRequest(edits=[Add(vector=V, layers=[1], positions=at)])).steer_hash
        for at in (_match([1]), _match([2]), _match([1], exclude=True), "completion")
    }
    assert len(hashes) == 4


def test_a_worker_that_cannot_read_ids_says_so() -> None:
    with pytest.raises(UnsupportedError, match="among='completion'"):
        make_state().bank.fed.check()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"positions": {"pattern": "a", "among": "completion"}}, "known by its id alone"),
        ({"positions": {"token_ids": [1], "among": "completion", "matches": "first"}}, "matches"),
        ({"positions": {"token_ids": [1], "among": "completion", "tokens": "last"}}, "tokens"),
        ({"positions": {"token_ids": [1], "among": "answer"}}, "positions.among"),
        (
            {"positions": {"token_ids": [1], "among": "completion"}, "phase": "prefill"},
            "selects no token",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(given: dict[str, Any], match: str) -> None:
    form = {"op": "add", "vector": V.tolist(), "layers": [1], **given}
    with pytest.raises(SpecError, match=match):
        parse_edits(form)


def test_ids_are_judged_against_the_engine() -> None:
    def ask(*ids: int, n: int = 1) -> LensRequest:
        sets = [_match([*ids, i]) for i in range(n)]
        return LensRequest(edits=[Add(vector=V, layers=[1], positions=one) for one in sets])

    known = replace(facts(), vocab=50)
    check_request(ask(49, n=8), known)
    with pytest.raises(SpecError, match="50; the model has tokens 0 to 49"):
        check_request(ask(50), known)
    with pytest.raises(SpecError, match="-1; the model has tokens"):
        check_request(ask(-1), facts())
    with pytest.raises(SpecError, match=f"{WIDTH + 1} ids; {WIDTH} at most at resid_post"):
        check_request(ask(*range(WIDTH + 1)), known)
    with pytest.raises(SpecError, match="9 different gates"):
        check_request(ask(49, n=9), known)


def test_captures_cannot_ask_for_it_and_prompts_travel_as_before() -> None:
    where = {"token_ids": [1], "among": "completion"}
    with pytest.raises(ValueError, match="belongs to edits"):
        LensRequest.model_validate({"capture": {"layers": [1], "positions": where}})
    assert TokenMatch(token_ids=[1]).model_dump(exclude_none=True).keys() >= {"token_ids"}
    assert "among" not in TokenMatch(token_ids=[1]).model_dump()
    edit = Replace(rows=V, layers=[1], positions=_match([1]))
    (again,) = parse_edits(edit.model_dump(mode="json"))
    assert again.positions == _match([1])
    assert seal_edits([again], 4, 8, facts().width_of)[0].reads_ids
