"""What travels of a request: the same on the other side, and nothing is unpacked that is here."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import numpy as np
import pytest

from inspect_lens import CaptureSpec, LensRequest, SteeringVector
from inspect_lens._engine.protocol.messages import Envelope, seal
from inspect_lens.spec import EngineProbe
from tests.kit.steps import FACTS, HIDDEN

PROBES = {
    name: EngineProbe(layers=layers, tensors={"weight": np.ones((len(layers), HIDDEN))})
    for name, layers in (("p", (0, 5)), ("q", (2,)))
}
VECTOR = SteeringVector(
    activations=np.arange(2.0 * HIDDEN).reshape(2, HIDDEN),
    layer_indices=[0, 2],
    position_indices=[1, -1],
    norm_match=True,
)


@pytest.mark.parametrize(
    "request_",
    [
        LensRequest(capture=CaptureSpec(layers=(0, 5), positions=(1, -1), reduce="mean")),
        LensRequest(probes=["q", {"name": "p", "positions": "all"}]),
        LensRequest(edits=(VECTOR,), capture=CaptureSpec(layers="all"), probes=["p"]),
    ],
    ids=["capture", "probes", "all"],
)
def test_an_envelope_arrives_as_it_was_sent(request_: LensRequest) -> None:
    sent = seal(request_, FACTS, reply="ipc:///r", n_prompt=4, max_tokens=6, probes=PROBES)
    packed = sent.pack()
    assert Envelope.unpack(packed) is sent, "in one process"
    plain: list[Any] = [
        msgspec.msgpack.decode(msgspec.msgpack.encode(packed)),
        pickle.loads(pickle.dumps(packed)),
        dict(packed),
        packed | {},
    ]
    for value in plain:
        assert type(value) is dict
        come = Envelope.unpack(value)
        assert come is not sent
        for name in ("reply", "pid", "capture", "probes", "n_prompt", "steer_hash"):
            assert getattr(come, name) == getattr(sent, name), name
        for mine, theirs in zip(come.edits, sent.edits, strict=True):
            assert (mine.taps, mine.positions, mine.until, mine.receipt_sha256, mine.sha256) == (
                theirs.taps,
                theirs.positions,
                theirs.until,
                theirs.receipt_sha256,
                theirs.sha256,
            )
            assert mine.made.data == theirs.made.data


def test_what_requests_have_in_common_is_read_once() -> None:
    both = LensRequest(capture=CaptureSpec(layers="all"), probes=["p", "q"])
    other = LensRequest(capture=CaptureSpec(layers=(0,)), probes=["p"])

    def arrived(request: LensRequest, n_prompt: int) -> Envelope:
        sent = seal(
            request, FACTS, reply="ipc:///r", n_prompt=n_prompt, max_tokens=6, probes=PROBES
        )
        return Envelope.unpack(msgspec.msgpack.decode(msgspec.msgpack.encode(sent.pack())))

    short, again, long, else_ = (
        arrived(r, n) for r, n in ((both, 4), (both, 4), (both, 9), (other, 4))
    )
    assert (short.capture, short.probes) != (long.capture, long.probes)
    for part in ("capture", "probes"):
        first, second, third, fourth = (getattr(e, part) for e in (short, again, long, else_))
        assert first is second
        assert first.alike is third.alike
        assert first.alike != fourth.alike
