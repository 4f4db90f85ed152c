"""Each worker's messages in their order, and nobody's behind another worker's rows."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inspect_lens._engine.collect import collector as collecting
from inspect_lens._engine.collect.collector import Inbox
from inspect_lens._engine.protocol.messages import Block, Failure, Message, Settled


def block(worker: str, seq: int) -> Block:
    return Block(worker, 0, seq, 0, (1, 1, 1), "float32", 0, 0, "eager", b"", b"", b"", {})


class Machine:
    """Workers whose rows land when a test says so."""

    def __init__(self) -> None:
        self.handled: list[Message] = []
        self.landed: defaultdict[str, int] = defaultdict(int)
        self.alive = True
        self.inbox = Inbox(
            self.handled.append,
            has_landed=lambda b: self.landed[b.worker] >= b.seq,
            is_alive=lambda name: self.alive,
        )


def test_rows_of_another_worker_are_taken_though_older_ones_have_not_come() -> None:
    machine = Machine()
    a, b = block("a", 1), block("b", 1)
    machine.landed["b"] = 1
    machine.inbox.put(a)
    machine.inbox.put(b)
    assert machine.handled == [b]
    settled = Settled("a", b"", b"")
    machine.inbox.put(settled)
    failure = Failure("k", "CaptureError", "it failed")
    machine.inbox.put(failure)
    assert machine.handled == [b, failure]
    assert not machine.inbox.turn()
    machine.landed["a"] = 1
    while machine.inbox.turn():
        pass
    assert machine.handled == [b, failure, a, settled]
    assert not machine.inbox


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["rows", "told", "land", "turn"])))
)
def test_each_workers_messages_keep_their_order_and_none_is_lost(steps: Any) -> None:
    machine, sent = Machine(), defaultdict[str, list[Message]](list)
    n_blocks: defaultdict[str, int] = defaultdict(int)
    for worker, what in steps:
        if what == "rows":
            n_blocks[worker] += 1
            sent[worker].append(block(worker, n_blocks[worker]))
            machine.inbox.put(sent[worker][-1])
        elif what == "told":
            sent[worker].append(Settled(worker, b"", str(len(sent[worker])).encode()))
            machine.inbox.put(sent[worker][-1])
        elif what == "land":
            machine.landed[worker] = min(machine.landed[worker] + 1, n_blocks[worker])
        else:
            machine.inbox.turn()
        for message in machine.handled:
            if isinstance(message, Block):
                assert machine.landed[message.worker] >= message.seq
    machine.landed.update(n_blocks)
    while machine.inbox.turn():
        pass
    for worker, messages in sent.items():
        assert [m for m in machine.handled if getattr(m, "worker", "") == worker] == messages


@pytest.mark.parametrize("is_dead", [False, True])
def test_rows_that_never_come_are_given_up(monkeypatch: pytest.MonkeyPatch, is_dead: bool) -> None:
    machine, lost = Machine(), block("a", 1)
    machine.inbox.put(lost)
    for _ in range(600):
        assert not machine.inbox.turn()
    if is_dead:
        machine.alive = False
    else:
        monkeypatch.setattr(collecting, "_WAIT_S", 0.0)
    for _ in range(600):
        machine.inbox.turn()
    assert machine.handled == [lost]
