"""Which requests a sink records, and what is said to those that it does not."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from concurrent.futures import Future
from math import sqrt
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from inspect_lens import LensRequest
from inspect_lens._base.receipts import not_done
from inspect_lens._vllm.sinks.process import (
    SINK_KEY,
    Sinks,
    is_by_rule,
    settle,
    settle_now,
    task_of,
)
from inspect_lens._vllm.sinks.recorder import Offered
from inspect_lens._vllm.sinks.sink import lot
from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec import (
    EngineFacts,
    SinkReceipt,
    SinkUse,
    parse_extra_args,
    tap_points,
    to_extra_args,
    to_wire_args,
)

FACTS = EngineFacts(
    model="m",
    n_layers=4,
    hidden=8,
    dtype="float32",
    layers=(0, 1, 2),
    sites=("resid_pre", "resid_post"),
    taps=tap_points(["resid_pre", "resid_post"], (0, 1, 2)),
    max_step_tokens=32,
    ring_rows=256,
    bank_rows=8,
    vllm_version="0",
)


def sinks(**named: Any) -> Sinks:
    made = Sinks()
    made.learn(
        FACTS,
        json.dumps({n: {"store": f"memory://{uuid.uuid4().hex}"} | f for n, f in named.items()}),
    )
    return made


def test_what_a_request_gives_and_what_it_gets() -> None:
    made = sinks(a={"layers": [1, 2]}, b={"layers": [0], "requests": False, "share": 0.5})
    plain = LensRequest(capture={"layers": [0]})
    assert made.resolve(plain, FACTS) is plain
    resolved = made.resolve(LensRequest(sink="a"), FACTS)
    assert resolved.capture is not None
    assert (resolved.capture.layers, resolved.capture.positions) == ((1, 2), "completion")
    assert resolved.capture.transport == "sink"
    same = LensRequest(sink="a", capture={"layers": [1, 2], "positions": "completion"})
    assert made.resolve(same, FACTS) is same
    with pytest.raises(SpecError, match="known are a; the operator"):
        made.resolve(LensRequest(sink="c"), FACTS)
    with pytest.raises(UnsupportedError, match="known for those are a"):
        made.resolve(LensRequest(sink="b"), FACTS)
    with pytest.raises(SpecError, match="known are none"):
        Sinks().resolve(LensRequest(sink="a"), FACTS)
    task = task_of({SINK_KEY: (made.key_of(SinkUse(name="a"), FACTS), {"name": "a"})})
    assert task is not None
    assert task.recorder.name == "a"
    assert task_of({}) is None


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


def test_rules_are_asked_in_order() -> None:
    made = sinks(a={"layers": [1], "share": 0.3, "seed": "x"}, b={"layers": [2], "share": 1.0})
    found = [made.rule_for(FACTS, str(i)) for i in range(500)]
    assert all(found)
    keys = [rule.key for rule in found if rule is not None]
    first = made.key_of(SinkUse(name="a"), FACTS)
    wanted = [lot("x", "a", str(i)) < 0.3 for i in range(500)]
    assert [key == first for key in keys] == wanted
    assert is_by_rule({SINK_KEY: (first, None)})
    assert not is_by_rule({SINK_KEY: (first, {"name": "a"})})
    assert sinks(a={"layers": [1]}).rule_for(FACTS, "1") is None


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
    began = time.monotonic()
    if is_async:
        asyncio.run(settle(made, 0.1))
    else:
        settle_now([made], 0.1)
    assert 0.05 < time.monotonic() - began < 5
    told = [choice.inspect_lens.sink for choice in made.outputs]
    assert [t and t.status for t in told] == ["written", "queued", None, None]
    assert "still waits for the sink after 0.1 s" in told[1].reason
    never.set_result(queued)  # whoever settles it later harms nobody


def test_a_request_travels_whole() -> None:
    use = SinkUse(name="a", id="i", label=False, group="g", columns={"k": "v"}, wait=False)
    request = LensRequest(sink=use)
    assert parse_extra_args(to_extra_args(request)) == request
    assert parse_extra_args(to_wire_args(to_extra_args(request))) == request
    assert parse_extra_args({"inspect_lens": {"sink": "a"}}) == LensRequest(sink={"name": "a"})
    assert not_done(request, {"sink": {"name": "a"}}) is None
    assert "answered without recording" in str(not_done(request, None))
    with pytest.raises(SpecError, match="nobody reads it there"):
        parse_extra_args({"sink": "a"})


def test_rows_are_copied_where_they_would_hold_much_more() -> None:
    from inspect_lens._vllm.sinks.sink import own_memory
    from inspect_lens.spec import TensorData

    large = np.zeros((1, 1000, 8), dtype=np.float32)
    part, most = TensorData(large[:, :10], "float32"), TensorData(large[:, :900], "float32")
    assert own_memory(part).storage.base is None
    assert own_memory(most).storage.base is large
