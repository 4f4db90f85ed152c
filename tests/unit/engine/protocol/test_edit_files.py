"""Large tensors of edits lie in memory while somebody may send them, and are read as they were."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from inspect_lens import LensRequest, SteeringVector
from inspect_lens._engine.protocol import messages, programs
from inspect_lens._engine.protocol.messages import Envelope, Packed, seal
from inspect_lens._engine.protocol.programs import LARGE, MOST, file_of, read_file
from inspect_lens.errors import CaptureError
from inspect_lens.spec import Add, Cache, LowRank
from tests.kit.forks import run_python
from tests.kit.wide_edits import wide_facts

FACTS = wide_facts("resid_post", 4096, 1, 4096)
ROWS = np.random.default_rng(0).standard_normal((16, 4096)).astype(np.float32)


class Owner:
    """Anything."""


def files() -> set[tuple[str, int]]:
    """Those of edits that this process has open, with their inodes."""
    found = set()
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "inspect-lens-edits" in os.readlink(one):
                found.add((one.name, os.stat(one).st_ino))
    return found


def packed(request: LensRequest, *, is_local: bool = True, n_prompt: int = 5) -> Packed:
    sealed = seal(request, FACTS, reply="ipc://a", n_prompt=n_prompt, max_tokens=3)
    return sealed.pack(is_local=is_local)


def sent(packed: Packed) -> bytes:
    return msgspec.msgpack.encode(dict(packed))


def low_rank(seed: int = 0, **options: Any) -> LensRequest:
    rows = np.roll(ROWS, seed, axis=1)
    return LensRequest(edits=[LowRank(read=rows[:8], write=rows[8:], layers=[0], **options)])


def vectors() -> LensRequest:
    """A vector of its own at each position."""
    rows = ROWS[None, :5]
    return LensRequest(
        edits=[SteeringVector(activations=rows, layer_indices=[0], position_indices=list(range(5)))]
    )


@pytest.fixture(autouse=True)
def before(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int]]:
    for name, module in (("_EDITED", messages), ("_UNPACKED", programs), ("_MADE", programs)):
        monkeypatch.setattr(module, name, Cache(16))
    return files()


@pytest.mark.parametrize("make", [low_rank, vectors])
def test_a_worker_reads_from_a_file_what_it_would_have_been_sent(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make()
    local = packed(request)
    plain, short = sent(packed(request, is_local=False)), sent(local)
    assert len(plain) > LARGE > 10 * len(short)
    read = [Envelope.unpack(msgspec.msgpack.decode(plain)).edited]
    for name, module in (("_EDITED", messages), ("_UNPACKED", programs)):
        monkeypatch.setattr(module, name, Cache(16))
    read.append(Envelope.unpack(msgspec.msgpack.decode(short)).edited)
    assert read[0] is not read[1]
    assert read[0].content == read[1].content
    assert read[0].pack(is_local=False) == read[1].pack(is_local=False)


def test_edits_of_many_prompts_share_one_file(before: Any) -> None:
    request = low_rank(positions="completion")
    kept = [packed(request, n_prompt=n_prompt) for n_prompt in (5, 6, 90)]
    assert len({sent(one) for one in kept}) == 3
    assert len(files() - before) == 1


def test_a_file_is_there_as_long_as_a_request_may_be_under_way(
    monkeypatch: pytest.MonkeyPatch, before: Any
) -> None:
    # Nothing is kept for requests to come.
    monkeypatch.setattr(programs, "_MADE", Cache(0))
    one = packed(low_rank(1, positions="completion"))
    gc.collect()
    assert Envelope.unpack(msgspec.msgpack.decode(sent(one))).edited.edits
    del one
    gc.collect()
    assert files() <= before


def test_small_data_and_hosts_apart_have_no_file(before: Any) -> None:
    small = LensRequest(edits=[Add(vector=ROWS[0], layers=[0])])
    assert len(sent(packed(small))) > ROWS[0].nbytes
    assert len(sent(packed(low_rank(), is_local=False))) > 16 * ROWS[0].nbytes
    assert files() <= before


def test_data_are_sent_where_there_is_no_room_for_a_file(
    monkeypatch: pytest.MonkeyPatch, before: Any
) -> None:
    owners = [Owner() for _ in range(3)]
    monkeypatch.setattr(programs, "_MOST_FILES", len(programs._FILES) + 2)
    found = [file_of([bytes(LARGE)], owner, is_local=True) for owner in owners]
    assert found[2] is None
    assert None not in found[:2]
    assert file_of([bytes(LARGE)], owners[0], is_local=True) == found[0]
    monkeypatch.undo()

    def full(*_: Any, **__: Any) -> io.BytesIO:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("builtins.open", full)
    assert file_of([bytes(LARGE)], owners[2], is_local=True) is None
    monkeypatch.undo()
    assert len(files() - before) == 2


def test_nobody_waits_for_a_disk(monkeypatch: pytest.MonkeyPatch, before: Any) -> None:
    owner = Owner()
    assert file_of([bytes(MOST + 1)], owner, is_local=True) is None

    def stands(*_: Any, **__: Any) -> None:
        raise AssertionError("a disk may take a minute for this")

    with monkeypatch.context() as patched:
        for name in ("unlink", "write_bytes", "open"):
            patched.setattr(Path, name, stands)
        assert file_of([bytes(MOST)], owner, is_local=True) is not None
        assert files() - before
        del owner
        gc.collect()
    assert files() <= before


def test_a_file_that_has_gone_fails_its_request_and_names_no_path() -> None:
    owners = [Owner(), Owner()]
    name = file_of([b"x" * LARGE, b"y"], owners[0], is_local=True)
    assert name is not None
    assert read_file(name) == b"x" * LARGE + b"y"
    del owners[0]
    gc.collect()
    with pytest.raises(CaptureError, match="No such file or directory") as raised:
        read_file(name)
    assert "/proc" not in str(raised.value)
    # The number of a file is used again.
    other = file_of([b"z" * LARGE], owners[0], is_local=True)
    assert other is not None
    assert other.split("/")[:2] == name.split("/")[:2]
    with pytest.raises(CaptureError, match="try again"):
        read_file(name)


CLOSED = """
import ctypes, os
from inspect_lens._engine.protocol.programs import LARGE, file_of

class Owner:
    pass

owners = Owner(), Owner()
assert file_of([bytes(LARGE)], owners[0], is_local=True)
if not os.geteuid():
    os.setuid(65534)  # root sees all
ctypes.CDLL(None).prctl(4, 0)  # as of a program that has capabilities
print("sent", file_of([bytes(LARGE)], owners[1], is_local=True))
"""


def test_data_are_sent_where_no_worker_could_read_a_file() -> None:
    ran = run_python("-c", CLOSED)
    assert ran.stdout.split() == ["sent", "None"]
