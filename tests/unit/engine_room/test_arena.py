"""Shared memory between a worker and a front-end: no block is given out twice, none is lost."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inspect_lens._engine import _arena
from inspect_lens._engine._arena import ArenaReader, ArenaWriter
from inspect_lens.errors import CapacityError

PAGE = 4096
ME = os.getpid()


@pytest.fixture
def writer() -> Any:
    made = ArenaWriter(8 * PAGE)
    made.reader("a", ME)
    yield made
    made.close()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5 * PAGE), st.integers(0, 3)), max_size=40))
def test_blocks_that_are_in_use_never_overlap(steps: list[tuple[int, int]]) -> None:
    writer = ArenaWriter(8 * PAGE)
    index = writer.reader("a", ME)
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
    assert reader.wait(1)
    assert reader.view.data[offset : offset + 3].tolist() == [1, 2, 3]
    assert writer.bytes_in_use == PAGE
    reader.done(0, 1)
    assert writer.bytes_in_use == 0


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


def test_rows_that_never_land_are_not_waited_for_for_ever(writer: ArenaWriter) -> None:
    reader = ArenaReader(writer.name)
    assert not reader.wait(7, timeout_s=0.05)
    writer.close()
    assert not reader.wait(7, timeout_s=60)


def test_whoever_waits_for_rows_cuts_a_long_pause_short(
    writer: ArenaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_arena, "_POLL_LEAST_S", 0.01)
    monkeypatch.setattr(_arena, "_POLL_MOST_S", 60.0)
    monkeypatch.setattr(_arena, "_POLL_SHARE", 1e9)
    reader, hurry = ArenaReader(writer.name), threading.Event()

    def land() -> None:
        time.sleep(0.1)
        writer.view.landed[0] = 1
        hurry.set()

    threading.Thread(target=land).start()
    began = time.monotonic()
    assert reader.wait(1, hurry=hurry)
    assert time.monotonic() - began < 10


def test_a_step_waits_for_room_and_says_when_none_comes(
    writer: ArenaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_arena, "_WAIT_S", 0.05)
    writer.place(1, "a", 8 * PAGE)
    assert writer.waited_s == 0
    with pytest.raises(CapacityError, match="more slowly"):
        writer.place(2, "a", 1)
    assert 0.05 <= writer.waited_s < 1
    with pytest.raises(CapacityError, match="INSPECT_LENS_SHM_BYTES"):
        writer.place(3, "a", 9 * PAGE)


def test_time_that_steps_waited_is_counted_and_told_once(
    writer: ArenaWriter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_arena, "_WORTH_A_WORD_S", 0.1)
    # vLLM's loggers do not pass records on.
    monkeypatch.setattr(_arena, "logger", logging.getLogger("inspect_lens.tests"))
    for seq in range(1, 9, 2):
        writer.place(seq, "a", 8 * PAGE)
        late = threading.Timer(0.06, writer.view.cursors.__setitem__, (0, seq))
        late.start()
        writer.place(seq + 1, "a", 8 * PAGE)
        writer.view.cursors[0] = seq + 1
        late.join()
    assert 4 * 0.05 < writer.waited_s < 4
    (record,) = caplog.records
    assert "INSPECT_LENS_SHM_BYTES" in record.getMessage()


def test_a_dead_reader_frees_its_blocks(
    writer: ArenaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_arena, "_WAIT_S", 5)
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)
    writer.reader("b", process)
    writer.place(1, "b", 8 * PAGE)
    assert writer.place(2, "a", PAGE) == 0


def test_the_memory_has_no_name_and_goes_with_its_holders(writer: ArenaWriter) -> None:
    before = set(os.listdir("/dev/shm"))
    reader = ArenaReader(writer.name)
    assert set(os.listdir("/dev/shm")) == before
    assert reader.is_alive
    writer.close()
    assert not reader.is_alive
    np.testing.assert_array_equal(reader.view.data[:4], 0)
