"""Edits that are resolved, and made into programs, once for all prompts, and those that are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from inspect_lens import LensRequest, SteeringVector
from inspect_lens._engine.protocol.edits import EVERY, SealedEdits, seal_edits, seal_request_edits
from inspect_lens._engine.protocol.messages import Envelope, seal
from inspect_lens.errors import SpecError
from inspect_lens.spec import (
    Ablate,
    Add,
    Gate,
    LowRank,
    ProjectOut,
    Renormalise,
    Replace,
    SiteWidth,
    TokenMatch,
    Zero,
)
from tests.kit.wide_edits import wide_facts

ROWS = np.random.default_rng(0).standard_normal((3, 128)).astype(np.float32)
ROW = ROWS[0]
FACTS = wide_facts("resid_post", 128, 1, 128)


def vector(**options: Any) -> SteeringVector:
    shape = options.pop("shape", (1, 128))
    return SteeringVector(activations=np.ones(shape), layer_indices=[0], **options)


def add(**options: Any) -> Add:
    return Add(vector=ROW, layers=[1], **options)


ANY_PROMPT = {
    "a vector": LensRequest(edits=[vector()]),
    "an edit": LensRequest(edits=[Ablate(direction=ROW, layers=[0, 1])]),
    "several directions": LensRequest(edits=[ProjectOut(directions=ROWS, layers=[1])]),
    "low rank": LensRequest(edits=[LowRank(read=ROWS, write=ROWS[::-1], layers=[1])]),
    "both, and a gate": LensRequest(edits=[vector(), add(when=Gate(direction=ROW, layer=0))]),
}
ITS_OWN = {
    "positions of a vector": LensRequest(edits=[vector(position_indices=[-1], shape=(1, 1, 128))]),
    "sampled tokens": LensRequest(edits=[add(positions="completion")]),
    "the prompt": LensRequest(edits=[add(phase="prefill")]),
    "rows": LensRequest(edits=[Replace(rows=ROWS[None, :2], positions=[1, -1], layers=[1])]),
    "the last token": LensRequest(edits=[add(positions=[-1])]),
    "some ids": LensRequest(edits=[add(positions=TokenMatch(token_ids=[3], among="completion"))]),
    "a gate that lasts": LensRequest(
        edits=[add(positions="completion", when=Gate(direction=ROW, layer=0, scope="rest"))]
    ),
    "one that suits any, and one": LensRequest(edits=[add(), add(phase="decode")]),
}


def sealed(request: LensRequest, n_prompt: int, n_sampled: int = 4) -> SealedEdits:
    return seal_request_edits(request, FACTS, n_prompt, n_prompt + n_sampled)


def same(a: SealedEdits, b: SealedEdits) -> None:
    assert a.content == b.content
    assert (a.until, a.taps, a.layers, a.sites) == (b.until, b.taps, b.layers, b.sites)
    assert (a.spans, a.hashes) == (b.spans, b.hashes)
    np.testing.assert_array_equal(a.named, b.named)
    assert a.pack(is_local=False) == b.pack(is_local=False)


@pytest.mark.parametrize("name", ANY_PROMPT)
def test_what_suits_any_prompt_is_resolved_once(name: str) -> None:
    request = ANY_PROMPT[name]
    one = sealed(request, 5)
    assert sealed(request, 9, 100) is one
    # As if it had been resolved anew.
    same(sealed(request.model_copy(), 9, 100), one)
    assert one.spans == {(0, EVERY)}
    assert one.until == EVERY


@pytest.mark.parametrize("name", ITS_OWN)
def test_what_looks_at_the_prompt_is_resolved_for_each(name: str) -> None:
    request = ITS_OWN[name]
    one, other = sealed(request, 5), sealed(request, 9)
    assert one.content != other.content
    same(sealed(request.model_copy(), 5), one)
    same(sealed(request.model_copy(), 9), other)


def test_facts_of_another_engine_are_asked_anew() -> None:
    request = ANY_PROMPT["an edit"]
    one = sealed(request, 5)
    assert seal_request_edits(request, replace(FACTS), 5, 9) is not one


@pytest.mark.parametrize("name", [*ANY_PROMPT, *ITS_OWN])
def test_a_worker_reads_alike_requests_once_and_gates_that_last_each_time(name: str) -> None:
    request = (ANY_PROMPT | ITS_OWN)[name]
    there = seal(
        request, FACTS, reply="ipc://a", n_prompt=6, max_tokens=4, epoch=lambda c: c + name
    )
    wire = msgspec.msgpack.encode(dict(there.pack()))
    one, other = (Envelope.unpack(msgspec.msgpack.decode(wire)).edited for _ in range(2))
    same(one, there.edited)
    assert (one is other) == (name != "a gate that lasts")


@pytest.mark.parametrize("name", [*ANY_PROMPT, *ITS_OWN])
def test_equal_edits_share_what_was_made_for_any_prompt(name: str) -> None:
    request = (ANY_PROMPT | ITS_OWN)[name]
    again = LensRequest.model_validate(request.model_dump(mode="json"))
    one, other = (sealed(asked, n).edits for asked, n in ((request, 6), (again, 9)))
    assert [id(edit.made) for edit in one] == [id(edit.made) for edit in other]


CHANGES: dict[str, Any] = {
    "vector": ROWS[1], "layers": (1, 3), "scale": 2.0, "norm_match": True, "site": "attn_out",
    "when": Gate(direction=ROWS[2], layer=0), "positions": (2,), "phase": "decode",
}  # fmt: skip


def resolved(**fields: Any) -> SealedEdits:
    edits = LensRequest(edits=[Add(**fields)]).edits
    return SealedEdits(tuple(seal_edits(edits, 6, 9, FACTS.width_of)))


@pytest.mark.parametrize("changed", CHANGES)
def test_edits_that_differ_in_anything_share_no_block_of_the_cache(changed: str) -> None:
    base: dict[str, Any] = {"vector": ROW, "layers": (1, 2), "scale": 1.0, "norm_match": False}
    one, other = resolved(**base), resolved(**{**base, changed: CHANGES[changed]})
    assert one.content == resolved(**base).content != other.content
    if changed not in ("positions", "phase"):
        assert one.edits[-1].made is not other.edits[-1].made


SAMPLED = {
    3: TokenMatch(token_ids=[3], among="completion"),
    4: TokenMatch(token_ids=[4], among="completion"),
    (3, 4): TokenMatch(token_ids=[3, 4], among="completion"),
}
ALL_BUT_3 = TokenMatch(token_ids=[3], exclude=True, among="completion")


@pytest.mark.parametrize(
    ("first", "second", "meet_at"),
    [
        ({}, {}, 0),
        ({"positions": [2, 5]}, {"positions": [5, 7]}, 5),
        ({"positions": [2, 5]}, {"positions": [-1]}, 5),
        ({"positions": [2, 5]}, {"positions": [3, 4]}, None),
        ({"positions": "prompt"}, {"phase": "decode"}, None),
        ({"positions": "prompt"}, {"positions": [False] * 4 + [True] * 2}, 4),
        ({"positions": SAMPLED[3]}, {"phase": "decode"}, 6),
        ({"positions": SAMPLED[3]}, {"positions": SAMPLED[3, 4]}, 6),
        ({"positions": SAMPLED[3]}, {"positions": SAMPLED[4]}, None),
        ({"positions": SAMPLED[3]}, {"positions": ALL_BUT_3}, None),
        ({"positions": SAMPLED[3, 4]}, {"positions": ALL_BUT_3}, 6),
        ({"positions": ALL_BUT_3}, {"positions": ALL_BUT_3}, 6),
        ({"when": Gate(direction=ROW, layer=0)}, {}, 0),
        # The stream before a layer is the stream after the one below it.
        ({"layers": [0]}, {"site": "resid_pre"}, 0),
        ({"layers": [0, 2]}, {}, None),
        ({}, {"site": "attn_out"}, None),
    ],
)
def test_edits_that_meet_are_refused_where_a_request_says_so(
    first: dict[str, Any], second: dict[str, Any], meet_at: int | None
) -> None:
    made = [Add(vector=ROW, **{"layers": [1], **own}) for own in (first, second)]
    facts = replace(FACTS, n_layers=3)
    sealed_in_order = seal_request_edits(LensRequest(edits=made), facts, 6, 10)
    asked = LensRequest(edits=made, edits_meet="error")
    if meet_at is None:
        assert seal_request_edits(asked, facts, 6, 10).content == sealed_in_order.content
        return
    with pytest.raises(SpecError, match=rf"edits\[1\]: meets edits\[0\] .* token {meet_at},"):
        seal_request_edits(asked, facts, 6, 10)


def test_edits_of_other_heads_do_not_meet_and_what_follows_an_edit_is_none_of_its_own() -> None:
    facts = replace(FACTS, widths=(SiteWidth("z", 128, 1, 4),))
    zeros = [Zero(layers=[1], site="z", heads=heads) for heads in ([0, 3], [1])]
    seal_request_edits(LensRequest(edits=zeros, edits_meet="error"), facts, 6, 10)
    whole = [*zeros, Zero(layers=[1], site="z")]
    with pytest.raises(SpecError, match=r"edits\[2\]: meets edits\[0\]"):
        seal_request_edits(LensRequest(edits=whole, edits_meet="error"), facts, 6, 10)
    grown = [add(), Renormalise(layers=[1])]
    seal_request_edits(LensRequest(edits=grown, edits_meet="error"), facts, 6, 10)
