"""A sink alone: what becomes of results when its receiver is fast, slow, broken or gone."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inspect_lens._shards import Captured, ShardWriter
from inspect_lens._vllm.sinks.recorder import Recorder, new_writer
from inspect_lens._vllm.sinks.sink import (
    Done,
    Exchange,
    Given,
    SinkConfig,
    StoreReceiver,
    find_function,
)
from inspect_lens.data import Recording
from inspect_lens.errors import SpecError
from inspect_lens.spec import SinkReceipt, SinkUse, TensorData
from tests.kit.repository import ROOT
from tests.kit.waiting import until

ABOUT = {
    "model": {"name": "m", "sha256": None}, "layers": [3], "hidden": 8, "dtype": "float32",
    "dataset": {"name": "live"}, "request": {"positions": "all"},
}  # fmt: skip
NAME = "residual_stream"
ROWS = 4


def config(**fields: Any) -> SinkConfig:
    return SinkConfig(**({"store": "memory://nowhere", "layers": (3,)} | fields))


def done(key: str, *, rows: int = ROWS, use: SinkUse | None = None) -> Done:
    values = np.random.default_rng(abs(hash(key)) % 1000).normal(size=(1, rows, 8))
    return Done(
        tensors={NAME: TensorData(values.astype(np.float32), "float32")},
        positions=tuple(range(rows)),
        layers=(3,),
        said=Exchange(key, tuple(range(rows)), f"prompt of {key}", (7,), "text"),
        use=use,
    )


class Slow:
    """Takes samples when it is let, and notes them."""

    is_eager = False

    def __init__(self, *, let: bool = False, sleep_s: float = 0.0) -> None:
        self.may_go = threading.Event()
        if let:
            self.may_go.set()
        self.sleep_s = sleep_s
        self.given: list[tuple[int, list[str]]] = []

    def give(
        self, writer: str, number: int, samples: Sequence[Captured], parts: Sequence[Any]
    ) -> Given:
        self.may_go.wait()
        time.sleep(self.sleep_s)
        self.given.append((number, [sample.record.id for sample in samples]))
        return Given(shard=f"{writer}-{number}")

    @property
    def ids(self) -> list[str]:
        return [key for _, keys in self.given for key in keys]


def store_of(uri: str) -> Callable[..., Recorder]:
    def make(**fields: Any) -> Recorder:
        writer = new_writer()
        receiver = StoreReceiver(ShardWriter(uri, ABOUT, writer))
        return Recorder("live", config(store=uri, **fields), receiver, NAME, writer)

    return make


def statuses(recorder: Recorder) -> dict[str, int]:
    return dict(recorder.counts)


def test_a_slow_sink_drops_what_its_memory_cannot_hold_and_counts_it() -> None:
    receiver = Slow()
    one = 1500
    recorder = Recorder("live", config(memory_bytes=20 * one, shard_bytes=one), receiver, NAME)
    # Nothing is taken until then, so whoever offers does not wait for it.
    told = [recorder.take(done(f"r{i}")) for i in range(1000)]
    kept = [i for i, t in enumerate(told) if t.receipt.status == "queued"]
    assert 10 <= len(kept) <= 20
    assert "bytes wait for the sink" in str(told[-1].receipt.reason)
    receiver.may_go.set()
    assert recorder.flush(60)
    assert receiver.ids == [f"r{i}" for i in kept]
    assert statuses(recorder) == {"written": len(kept), "dropped": 1000 - len(kept)}


def test_a_slow_sink_that_samples_thins_out_and_keeps_taking() -> None:
    receiver = Slow()
    one = 1500
    fields = {"memory_bytes": 200 * one, "shard_bytes": one, "when_slow": "sample"}
    recorder = Recorder("live", config(**fields), receiver, NAME)
    told = [recorder.take(done(f"r{i}")).receipt.status for i in range(2000)]
    count = Counter(told)
    assert told[:80] == ["queued"] * 80, "nothing is thinned out while half of it is free"
    assert count["sampled_out"] > 1000
    late = [i for i, status in enumerate(told) if status == "queued"][-20:]
    assert late[-1] - late[0] > 100, "what is kept is spread over what comes"
    again = Recorder("live", config(**fields), Slow(), NAME)
    assert [again.take(done(f"r{i}")).receipt.status for i in range(2000)][:200] == told[:200]
    receiver.may_go.set()
    assert recorder.flush(60)
    assert statuses(recorder)["written"] == count["queued"]


def test_a_slow_sink_spills_and_drains_in_the_end(tmp_path: Path) -> None:
    receiver = Slow()
    one = 1500
    spill = {"when_slow": "spill", "spill": str(tmp_path)}
    fields = {"memory_bytes": 40 * one, "shard_bytes": 5 * one} | spill
    recorder = Recorder("live", config(**fields), receiver, NAME)
    told = []
    for i in range(300):
        told.append(recorder.take(done(f"r{i}"), waits=True))
        # As fast as a disk takes them.
        assert until(lambda: recorder.counts["spilled"] >= len(told) - 30)
    assert until(lambda: recorder.counts["spilled"] >= 200)
    # Nothing more is spilled then. The folder is looked at once: who lists it again and again may
    # keep a file from being made there for a minute.
    assert until(lambda: 2 * recorder.describe()["queued_bytes"] <= fields["memory_bytes"])
    on_disk = sum(f.stat().st_size for f in tmp_path.glob("live/shard-*"))
    assert recorder.describe()["spilled_bytes"] == on_disk > 0
    receiver.may_go.set()
    assert until(lambda: recorder.describe()["spilled_bytes"] == 0)
    assert recorder.flush(60)
    counts = statuses(recorder)
    # What is spilled counts once as that, and once when it is written.
    assert counts["written"] + counts.get("dropped", 0) == 300
    assert sorted(receiver.ids) == sorted(set(receiver.ids))
    assert len(receiver.ids) == counts["written"]
    final = Counter(t.future.result(5).status for t in told if t.future is not None)
    assert final["spilled"] == counts["spilled"]


def test_a_full_disk_for_what_is_spilled_drops(tmp_path: Path) -> None:
    receiver = Slow()
    fields = {"memory_bytes": 10_000, "shard_bytes": 1500, "spill_bytes": 20_000}
    fields |= {"when_slow": "spill", "spill": str(tmp_path)}
    recorder = Recorder("live", config(**fields), receiver, NAME)
    for i in range(200):
        recorder.take(done(f"r{i}"))
        time.sleep(0.002)
    assert sum(f.stat().st_size for f in tmp_path.glob("live/*")) <= 20_000
    assert recorder.counts["dropped"] > 100
    assert recorder.counts["spilled"] > 2
    receiver.may_go.set()


def test_a_spilled_file_that_cannot_be_removed_is_given_away_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = Slow()
    fields = {"memory_bytes": 10_000, "shard_bytes": 1500, "when_slow": "spill"}
    recorder = Recorder("live", config(spill=str(tmp_path), **fields), receiver, NAME)
    for i in range(20):
        recorder.take(done(f"r{i}"))
        time.sleep(0.01)
    assert until(lambda: recorder.counts["spilled"] > 2)

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", read_only)
    receiver.may_go.set()
    assert until(lambda: recorder.counts["written"] >= 20 - recorder.counts["dropped"], 20)
    assert len(receiver.ids) == len(set(receiver.ids))


SPILL_AND_HANG = """
import sys, time
from tests.unit.vllm.sinks.test_recorder import Recorder, Slow, NAME, config, done
fields = dict(memory_bytes=10_000, shard_bytes=2800, when_slow="spill", spill=sys.argv[1])
recorder = Recorder("live", config(**fields), Slow(), NAME)
for i in range(40):
    recorder.take(done(f"r{i}"))
    time.sleep(0.01)
while recorder.counts["spilled"] <= 10:
    time.sleep(0.01)
print(recorder.counts["spilled"], flush=True)
time.sleep(600)
"""


def test_what_a_killed_process_spilled_is_written_by_the_next(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SPILL_AND_HANG, str(tmp_path / "spill")],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        n_spilled = int(process.stdout.readline())
        assert n_spilled > 10
        spill = {"when_slow": "spill", "spill": str(tmp_path / "spill")}
        uri = str(tmp_path / "store")
        # It lives, so its shards are its own.
        alive = store_of(uri)(**spill)
        assert alive.describe()["spilled_bytes"] == 0
        process.send_signal(signal.SIGKILL)
        process.wait()
        after = store_of(uri)(**spill)
        assert until(lambda: after.describe()["spilled_bytes"] == 0)
    finally:
        process.kill()
        process.wait()
    found = [s.record.id for shard in Recording.open(uri).shards() for s in shard.samples()]
    assert len(found) == len(set(found)) == n_spilled == after.counts["written"]
    assert not list((tmp_path / "spill/live").glob("shard-*"))


def test_no_client_fills_a_store_beyond_its_limit() -> None:
    receiver = Slow(let=True)
    rows = 4 * 8 * ROWS
    recorder = Recorder("live", config(limit_bytes=10 * rows), receiver, NAME)
    told = [recorder.take(done(f"r{i}")).receipt for i in range(30)]
    assert [t.status for t in told] == ["queued"] * 10 + ["dropped"] * 20
    assert told[-1].reason == f"the operator's limit for the sink is reached ({10 * rows} bytes)"
    assert recorder.flush(60)
    assert statuses(recorder) == {"written": 10, "dropped": 20}


def test_what_is_dropped_does_not_count_as_taken() -> None:
    receiver, rows = Slow(), 4 * 8 * ROWS
    recorder = Recorder(
        "live", config(limit_bytes=10 * rows, memory_bytes=7000, shard_bytes=rows), receiver, NAME
    )
    first = [recorder.take(done(f"r{i}")).receipt.status for i in range(30)]
    assert 1 < first.count("queued") < 10
    receiver.may_go.set()
    assert recorder.flush(60)
    for i in range(30):
        recorder.take(done(f"s{i}"))
        assert recorder.flush(60)
    assert statuses(recorder) == {"written": 10, "dropped": 50}


class Broken(Slow):
    def give(self, *args: Any) -> Given:
        if not self.may_go.is_set():
            raise OSError("the bucket is gone")
        return super().give(*args)


def test_a_broken_store_fails_its_results_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("inspect_lens._vllm.sinks.recorder._RETRIES_S", (0.01, 0.01, 0.01))
    receiver = Broken()
    recorder = Recorder("live", config(linger_s=0.0), receiver, NAME)
    with caplog.at_level(logging.ERROR, logger="vllm.inspect_lens"):
        receipts: list[SinkReceipt] = []
        for i in range(4):
            offered = recorder.take(done(f"r{i}"), waits=True)
            assert offered.future is not None
            receipts.append(offered.future.result(20))
    assert {r.status for r in receipts} == {"failed"}
    assert {r.reason for r in receipts} == {"OSError; the server's log has more"}
    assert len(caplog.records) == 1
    receiver.may_go.set()
    offered = recorder.take(done("r4"), waits=True)
    assert offered.future is not None
    assert offered.future.result(20).status == "written"
    assert receiver.given == [(0, ["r4"])], "no number is left out, which readers would note"


def test_functions_are_found_by_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, points in (
        ("mine", "lengths = json:dumps\nlost = json:nothing\nnumber = math:pi\ntwo = math:sin"),
        ("theirs", "lengths = json:dumps\ntwo = math:cos"),
    ):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[inspect_lens.sinks]\n{points}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_function("lengths") is json.dumps
    for name, why in (("lost", "cannot be loaded"), ("number", "is no function")):
        with pytest.raises(SpecError, match=why) as found:
            find_function(name)
        assert "/" not in str(found.value), "clients hear of no file of the server"
    with pytest.raises(SpecError, match="installed are lengths, lost, number, two;"):
        find_function("other")
    with pytest.raises(SpecError, match="callback='two' is math:sin and math:cos of"):
        find_function("two")


def test_whoever_reads_meanwhile_sees_whole_shards() -> None:
    uri = f"memory://half-{time.monotonic_ns()}"
    recorder = store_of(uri)(shard_bytes=1)
    recorder.take(done("first"))
    assert recorder.flush(60)
    cursor, n_read = "", 0
    for i in range(60):
        recorder.take(done(f"r{i}"))
        for shard in Recording.open(uri).shards(after=cursor):
            n_read += len(shard.samples())
            cursor = shard.cursor
    assert recorder.flush(60)
    n_read += sum(len(shard.samples()) for shard in Recording.open(uri).shards(after=cursor))
    assert n_read == recorder.counts["written"] == 61
