"""Large tensors of edits lie in a file while somebody may send it, and are read as they were."""

from __future__ import annotations

import gc
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
from tests.kit.wide_edits import wide_facts

FACTS = wide_facts("resid_post", 4096, 1, 4096)
ROWS = np.random.default_rng(0).standard_normal((16, 4096)).astype(np.float32)


class Owner:
    """Anything."""


def packed(request: LensRequest, folder: Path | None, n_prompt: int = 5) -> Packed:
    sealed = seal(request, FACTS, reply="ipc://a", n_prompt=n_prompt, max_tokens=3)
    return sealed.pack(folder)


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
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_EDITED", Cache(16))
    monkeypatch.setattr(programs, "_UNPACKED", Cache(16))


@pytest.mark.parametrize("make", [low_rank, vectors])
def test_a_worker_reads_from_a_file_what_it_would_have_been_sent(
    tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make()
    plain, short = sent(packed(request, None)), sent(packed(request, tmp_path))
    assert len(plain) > LARGE > 10 * len(short)
    read = [Envelope.unpack(msgspec.msgpack.decode(plain)).edited]
    nothing_known.__wrapped__(monkeypatch)  # type: ignore[attr-defined]
    read.append(Envelope.unpack(msgspec.msgpack.decode(short)).edited)
    assert read[0] is not read[1]
    assert read[0].content == read[1].content
    assert read[0].pack(None) == read[1].pack(None)


def test_edits_of_many_prompts_share_one_file(tmp_path: Path) -> None:
    request = low_rank(positions="completion")
    kept = [packed(request, tmp_path, n_prompt) for n_prompt in (5, 6, 90)]
    assert len({sent(one) for one in kept}) == 3
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_is_there_as_long_as_a_request_may_be_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is kept for requests to come.
    monkeypatch.setattr(programs, "_MADE", Cache(0))
    one = packed(low_rank(1, positions="completion"), tmp_path)
    gc.collect()
    assert Envelope.unpack(msgspec.msgpack.decode(sent(one))).edited.edits
    del one
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_small_data_and_hosts_apart_have_no_file(tmp_path: Path) -> None:
    small = LensRequest(edits=[Add(vector=ROWS[0], layers=[0])])
    assert len(sent(packed(small, tmp_path))) > ROWS[0].nbytes
    assert len(sent(packed(low_rank(), None))) > 16 * ROWS[0].nbytes
    assert not list(tmp_path.iterdir())


def test_data_are_sent_where_no_file_can_be_written(tmp_path: Path) -> None:
    assert file_of([bytes(LARGE)], Owner(), tmp_path / "gone") is None


def test_nobody_waits_for_a_disk_that_takes_long(tmp_path: Path) -> None:
    assert file_of([bytes(MOST + 1)], Owner(), tmp_path) is None
    assert not list(tmp_path.iterdir())
    assert file_of([bytes(MOST)], Owner(), tmp_path) is not None


def test_a_file_that_has_gone_fails_its_request(tmp_path: Path) -> None:
    one = packed(low_rank(2), tmp_path)
    for file in tmp_path.iterdir():
        file.unlink()
    with pytest.raises(CaptureError, match="try again"):
        Envelope.unpack(msgspec.msgpack.decode(sent(one)))


def test_a_fork_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()
    path = file_of([b"x" * LARGE, b"y"], owner, tmp_path)
    assert path is not None
    # As in a child that was forked meanwhile, whose objects go when it ends.
    child = os.getpid() + 1
    monkeypatch.setattr(programs.os, "getpid", lambda: child)
    del owner
    gc.collect()
    assert read_file(path) == b"x" * LARGE + b"y"
