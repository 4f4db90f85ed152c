"""Shared memory between a worker and a front-end: no block is given out twice, none is lost."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inspect_lens._engine.protocol import messages
from inspect_lens._engine.protocol.messages import ArenaReader, ArenaWriter
from inspect_lens._engine.protocol.processes import Process
from inspect_lens.errors import CapacityError

PAGE = 4096
ME = os.getpid()


@pytest.fixture
def writer() -> Any:
    made = ArenaWriter(8 * PAGE)
    made.reader("a", Process(ME))
    yield made
    made.close()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5 * PAGE), st.integers(0, 3)), max_size=40))
def test_blocks_that_are_in_use_never_overlap(steps: list[tuple[int, int]]) -> None:
    writer = ArenaWriter(8 * PAGE)
    index = writer.reader("a", Process(ME))
    live: dict[int, range] = {}
    for seq, (nbytes, taken) in enumerate(steps, start=1):
        for old in sorted(live)[:taken]:
            writer.view.cursors[index] = old
            del live[old]
        while True:
            fits = writer._fit(-(-nbytes // PAGE) * PAGE)
            if fits is not None or not live:
                break
            old = min(live)
            writer.view.cursors[index] = old
            del live[old]
        assert fits is not None
        offset = writer.place(seq, "a", nbytes)
        mine = range(offset, offset + nbytes)
        assert mine.stop <= 8 * PAGE
        for other in live.values():
            assert mine.stop <= other.start or other.stop <= mine.start
        live[seq] = mine
    writer.close()


def test_a_reader_sees_what_was_written_and_frees_it(writer: ArenaWriter) -> None:
    offset = writer.place(1, "a", PAGE)
    writer.view.data[offset : offset + 3] = [1, 2, 3]
    writer.view.landed[0] = 1
    reader = ArenaReader(writer.name)
    assert reader.has_landed(1)
    assert not reader.has_landed(2)
    assert reader.view.data[offset : offset + 3].tolist() == [1, 2, 3]
    assert writer.bytes_in_use == PAGE
    reader.done(0, 1)
    assert writer.bytes_in_use == 0


def test_a_link_can_be_made_anew_any_number_of_times(writer: ArenaWriter) -> None:
    first = writer.reader("far", Process(ME))
    writer.place(1, "far", PAGE)
    writer.view.cursors[first] = writer.view.revoked[first] = 9
    writer.place(10, "a", PAGE)
    writer.place(11, "far", PAGE)
    writer.forget("far")
    other = writer.reader("far", Process(ME))
    assert other != first, "what lies behind a block of somebody else is not free yet"
    writer.view.cursors[0] = 10
    for seq in range(20, 1020):
        writer.forget("far")
        index = writer.reader("far", Process(ME))
        writer.place(seq, "far", PAGE)
        assert writer.bytes_in_use == PAGE, "what a link that ended had is free"
        assert not writer._stands_still(index)
    assert writer.reader("a", Process(ME)) == 0


def test_memory_is_told_from_what_came_in_its_place(writer: ArenaWriter) -> None:
    pid, number, mark = writer.name.split("/")
    with pytest.raises(OSError, match="another worker"):
        ArenaReader(f"{pid}/{number}/{int(mark, 16) ^ 1:x}")
    name = writer.name
    writer.close()
    other = os.open("/dev/null", os.O_RDWR)
    try:
        if other != int(number):
            os.dup2(other, int(number))
        with pytest.raises(OSError, match="another file"):
            ArenaReader(name)
    finally:
        os.close(other)
        if other != int(number):
            os.close(int(number))


def test_closing_twice_closes_nothing_that_took_the_number(writer: ArenaWriter) -> None:
    number = int(writer.name.split("/")[1])
    writer.close()
    reader, other = os.pipe()
    try:
        if number not in (reader, other):
            os.dup2(other, number)
        writer.close()
        os.fstat(number)
    finally:
        for one in {reader, other, number}:
            os.close(one)


def test_a_step_waits_for_room_and_says_when_none_comes(
    writer: ArenaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_WAIT_S", 0.05)
    writer.place(1, "a", 8 * PAGE)
    assert writer.waited_s == 0
    with pytest.raises(CapacityError, match="more slowly"):
        writer.place(2, "a", 1)
    assert writer.waited_s >= 0.05
    with pytest.raises(CapacityError, match="INSPECT_LENS_SHM_BYTES"):
        writer.place(3, "a", 9 * PAGE)


def test_time_that_steps_waited_is_counted_and_told_once(
    writer: ArenaWriter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(messages, "_WORTH_A_WORD_S", 0.1)
    # vLLM's loggers do not pass records on.
    monkeypatch.setattr(messages, "logger", logging.getLogger("inspect_lens.tests"))
    for seq in range(1, 9, 2):
        writer.place(seq, "a", 8 * PAGE)
        late = threading.Timer(0.06, writer.view.cursors.__setitem__, (0, seq))
        late.start()
        writer.place(seq + 1, "a", 8 * PAGE)
        writer.view.cursors[0] = seq + 1
        late.join()
    assert writer.waited_s > 4 * 0.05
    (record,) = caplog.records
    assert "INSPECT_LENS_SHM_BYTES" in record.getMessage()


def test_a_dead_reader_frees_its_blocks(
    writer: ArenaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_WAIT_S", 5)
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)
    writer.reader("b", Process(process))
    writer.place(1, "b", 8 * PAGE)
    assert writer.place(2, "a", PAGE) == 0


@pytest.fixture
def stopped() -> Iterator[int]:
    """A process that was told to stop."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process.send_signal(signal.SIGSTOP)
    yield process.pid
    process.kill()
    process.wait()


def test_blocks_of_a_stopped_reader_make_room_for_others(writer: ArenaWriter, stopped: int) -> None:
    index = writer.reader("stopped", Process(stopped))
    for seq in (1, 2):
        writer.place(seq, "stopped", 4 * PAGE)
    writer.view.landed[0] = 2
    assert writer.place(3, "a", 3 * PAGE) == 0
    waited_s = writer.waited_s
    assert waited_s >= messages.STOPPED_S
    # It is not waited for again, until it has found out.
    assert writer.place(4, "stopped", PAGE) is None
    assert writer.waited_s == waited_s
    reader = ArenaReader(writer.name)
    assert [reader.is_revoked(index, seq) for seq in (1, 2, 3)] == [True, True, False]
    assert not reader.is_revoked(0, 1)
    reader.done(index, 1)
    assert writer.place(4, "stopped", PAGE) == 3 * PAGE


def test_whoever_fills_the_memory_alone_and_is_stopped_is_waited_for_once(
    writer: ArenaWriter, stopped: int
) -> None:
    writer.reader("stopped", Process(stopped))
    writer.place(1, "stopped", 8 * PAGE)
    writer.view.landed[0] = 1
    assert writer.place(2, "stopped", 1) is None
    assert writer.place(3, "a", 8 * PAGE) == 0


def test_a_reader_that_goes_on_is_waited_for_however_slow_it_is(
    writer: ArenaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "STALLED_S", 2.0)
    monkeypatch.setattr(messages, "STOPPED_S", 0.1)
    for seq in range(1, 9):
        writer.place(seq, "a", PAGE)
    writer.view.landed[0] = 8

    def take() -> None:
        for seq in range(1, 9):
            time.sleep(0.3)
            writer.view.cursors[0] = seq

    thread = threading.Thread(target=take)
    thread.start()
    assert writer.place(9, "a", 8 * PAGE) == 0
    thread.join()


def test_rows_that_have_not_landed_are_not_their_readers_fault(
    writer: ArenaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "STALLED_S", 0.2)
    monkeypatch.setattr(messages, "STOPPED_S", 0.1)
    writer.place(1, "a", 8 * PAGE)

    def land() -> None:
        time.sleep(0.6)
        writer.view.landed[0] = writer.view.cursors[0] = 1

    thread = threading.Thread(target=land)
    thread.start()
    assert writer.place(2, "a", 8 * PAGE) == 0
    thread.join()
    writer.view.landed[0] = 2
    waited_s = writer.waited_s
    assert writer.place(3, "a", 1) is None
    assert writer.waited_s >= waited_s + 0.2


def test_the_memory_has_no_name_and_goes_with_its_holders(writer: ArenaWriter) -> None:
    before = set(os.listdir("/dev/shm"))
    reader = ArenaReader(writer.name)
    assert set(os.listdir("/dev/shm")) == before
    assert reader.is_alive
    writer.close()
    assert not reader.is_alive
    np.testing.assert_array_equal(reader.view.data[:4], 0)
