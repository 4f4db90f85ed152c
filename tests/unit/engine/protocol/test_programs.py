"""Programs that are made once: equal edits share them, and nothing else does."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inspect_lens import LensRequest
from inspect_lens._engine.protocol import programs as module
from inspect_lens._engine.protocol.edits import EditEnvelope, pack_edit, seal_edits, unpack_edit
from inspect_lens._engine.protocol.kept import Kept
from inspect_lens.spec import (
    Ablate,
    Add,
    EditBase,
    Gate,
    LowRank,
    ProjectOut,
    Replace,
    SiteWidth,
    TokenMatch,
)

WIDTH = 8


def width_of(site: Any) -> SiteWidth:
    return SiteWidth(site, WIDTH)


def sealed(*edits: EditBase, n_prompt: int = 6) -> tuple[EditEnvelope, ...]:
    return seal_edits(LensRequest(edits=edits).edits, n_prompt, n_prompt + 4, width_of)


def direction(seed: int, *shape: int) -> np.ndarray:
    made: np.ndarray = np.random.default_rng(seed).standard_normal((*shape, WIDTH))
    return made.astype(np.float32)


def same(a: EditEnvelope, b: EditEnvelope) -> None:
    """All that a worker reads of two edits is the same."""
    assert (a.site, a.layers, a.positions, a.lo, a.hi, a.room) == (
        b.site, b.layers, b.positions, b.lo, b.hi, b.room,
    )  # fmt: skip
    assert a.sha256 == b.sha256
    for x, y in zip(a.programs, b.programs, strict=True):
        for p, q in zip(x, y, strict=True):
            for one, other in zip(p, q, strict=True):
                assert (one.kind, one.params, one.sees_edits, one.gate) == (
                    other.kind, other.params, other.sees_edits, other.gate,
                )  # fmt: skip
                for mine, theirs in ((one.read, other.read), (one.write, other.write)):
                    assert (mine is None) == (theirs is None)
                    if mine is not None and theirs is not None:
                        np.testing.assert_array_equal(mine, theirs)


EDITS: dict[str, Any] = {
    "ablate": lambda: Ablate(direction=direction(0), layers=[0, 1, 2]),
    "add": lambda: Add(vector=direction(1), layers=[1], scale=2.0, positions="completion"),
    "project_out": lambda: ProjectOut(directions=direction(2, 3), layers=[2]),
    "low_rank": lambda: LowRank(read=direction(3, 2), write=direction(4, 2), layers=[1]),
    "replace": lambda: Replace(rows=direction(5, 1, 2), positions=[1, 3], layers=[1]),
    "gated": lambda: Add(
        vector=direction(1), layers=[1], when=Gate(direction=direction(6), layer=0)
    ),
    "by_id": lambda: Add(
        vector=direction(1), layers=[0, 1],
        positions=TokenMatch(token_ids=[3, 5], among="completion"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_what_is_sent_is_read_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = sealed(EDITS[name](), EDITS["ablate"]())
    packed = [pack_edit(edit, None) for edit in here]
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(packed))
    monkeypatch.setattr(module, "_UNPACKED", Kept(16))
    for a, b in zip(here, map(unpack_edit, wire), strict=True):
        same(a, b)
    # The second time it is found, and is the same object.
    again = list(map(unpack_edit, wire))
    assert [e.made for e in again] == [unpack_edit(one).made for one in wire]


@pytest.mark.parametrize("name", EDITS)
def test_equal_edits_share_what_was_made_for_any_prompt(name: str) -> None:
    one, other = sealed(EDITS[name]()), sealed(EDITS[name](), n_prompt=9)
    assert [id(e.made) for e in one] == [id(e.made) for e in other]


@given(st.data())
def test_edits_that_differ_in_anything_share_nothing(data: st.DataObject) -> None:
    base: dict[str, Any] = {
        "vector": direction(0), "layers": (1, 2), "scale": 1.0, "norm_match": False,
    }  # fmt: skip
    changes: dict[str, Any] = {
        "vector": direction(1), "layers": (1, 3), "scale": 2.0, "norm_match": True,
        "site": "attn_out", "when": Gate(direction=direction(2), layer=0),
    }  # fmt: skip
    changed = data.draw(st.sampled_from(sorted(changes)))
    one = sealed(Add(**base))[-1]
    other = sealed(Add(**{**base, changed: changes[changed]}))[-1]
    assert one.made is not other.made
    assert (one.sha256, one.layers, one.site) != (other.sha256, other.layers, other.site)
