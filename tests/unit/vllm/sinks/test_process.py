"""Which requests a sink records, and what is said to those that it does not."""

from __future__ import annotations

import asyncio
import json
import uuid
from concurrent.futures import Future
from math import sqrt
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inspect_lens._vllm.sinks.process import (
    Sinks,
    settle,
    settle_now,
)
from inspect_lens._vllm.sinks.recorder import Offered
from inspect_lens._vllm.sinks.sink import lot
from inspect_lens.errors import SpecError
from inspect_lens.spec import (
    SinkReceipt,
    tap_points,
)
from tests.kit.facts import engine_facts

FACTS = engine_facts(
    layers=(0, 1, 2), sites=("resid_pre", "resid_post"),
    taps=tap_points(["resid_pre", "resid_post"], (0, 1, 2)), max_step_tokens=32, ring_rows=256,
)  # fmt: skip


def sinks(**named: Any) -> Sinks:
    made = Sinks()
    made.learn(
        FACTS,
        json.dumps({n: {"store": f"memory://{uuid.uuid4().hex}"} | f for n, f in named.items()}),
    )
    return made


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": [7]}, "layer"),
        ({"layers": [3]}, "INSPECT_LENS_LAYERS"),
        ({"layers": [1], "site": "q"}, "q"),
        ({"store": "nowhere://x", "layers": [1]}, ""),
        ({"store": None, "callback": "lost", "layers": [1]}, "no entry point"),
    ],
)
def test_what_the_engine_does_not_have_stops_the_start(
    fields: dict[str, Any], message: str
) -> None:
    if "nowhere" in str(fields.get("store")):
        # A store that cannot be reached now may be there later.
        assert sinks(a=fields).describe()["a"]["kind"] == "store"
        return
    with pytest.raises(SpecError, match="INSPECT_LENS_SINKS: ") as caught:
        sinks(a=fields)
    assert message in str(caught.value)


def test_one_store_is_of_one_kind() -> None:
    uri = f"memory://{uuid.uuid4().hex}"
    sinks(a={"store": uri, "layers": [1]})
    sinks(a={"store": uri, "layers": [1]})
    with pytest.raises(SpecError, match=r"holds another recording .*layers"):
        sinks(a={"store": uri, "layers": [2]})


@given(seed=st.text(max_size=8), share=st.floats(0, 1))
def test_a_rule_depends_on_the_id_alone_and_has_its_share(seed: str, share: float) -> None:
    ids = [f"cmpl-{i}" for i in range(2000)]
    chosen = [lot(seed, "a", key) < share for key in ids]
    assert chosen == [lot(seed, "a", key) < share for key in ids]
    assert all(0 <= lot(seed, "a", key) < 1 for key in ids[:10])
    # Five standard deviations: once in two million.
    assert abs(sum(chosen) - 2000 * share) <= 5 * sqrt(2000 * share * (1 - share)) + 1


def output(*offered: Offered | None) -> Any:
    choices = []
    for one in offered:
        made = SimpleNamespace(inspect_lens=SimpleNamespace(sink=None))
        if one is not None:
            made.inspect_lens_offered = one
        choices.append(made)
    return SimpleNamespace(outputs=choices)


@pytest.mark.parametrize("is_async", [True, False])
def test_who_waits_too_long_is_told_so(is_async: bool) -> None:
    queued = SinkReceipt(name="a", status="queued", rows=3)
    ready: Future[SinkReceipt] = Future()
    ready.set_result(SinkReceipt(name="a", status="written", rows=3, shard="s"))
    never: Future[SinkReceipt] = Future()
    made = output(Offered(queued, ready), Offered(queued, never), Offered(queued), None)
    if is_async:
        asyncio.run(settle(made, 0.1))
    else:
        settle_now([made], 0.1)
    told = [choice.inspect_lens.sink for choice in made.outputs]
    assert [t and t.status for t in told] == ["written", "queued", None, None]
    assert "still waits for the sink after 0.1 s" in told[1].reason
    never.set_result(queued)  # whoever settles it later harms nobody


def test_rows_are_copied_where_they_would_hold_much_more() -> None:
    from inspect_lens._vllm.sinks.sink import own_memory

    large = np.zeros((1, 1000, 8), dtype=np.float32)
    assert own_memory(large[:, :10]).base is None
    assert own_memory(large[:, :900]).base is large
