from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inspect_lens.data import ActivationStore, Captured, Recording, SampleRecord, ShardWriter
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.spec import TensorData
from inspect_lens.train import ActivationSet
from tests.kit.repository import ROOT

ABOUT = {
    "model": {"name": "m", "sha256": None}, "layers": [3], "hidden": 4, "dtype": "float32",
    "dataset": {"name": "live", "on_policy": True, "label_meaning": "", "text_overlap_group": "l"},
    "request": {"positions": "completion"},
}  # fmt: skip
WRITERS = ("0" * 12, "a" * 12, "f" * 12)


def captured(key: str, rows: int = 2, label: bool | None = None) -> Captured:
    record = SampleRecord(
        index=0, id=key, label=label, group=key, n_rows=rows, n_prompt=1, completion="x"
    )
    values = np.random.default_rng(len(key)).normal(size=(1, rows, 4)).astype(np.float32)
    return Captured(
        record=record,
        acts=TensorData(values, "float32"),
        layers=(3,),
        positions=tuple(range(1, 1 + rows)),
        token_ids=tuple(range(rows + 2)),
    )


def ids(uri: str, after: str = "") -> tuple[list[str], str]:
    found = []
    for shard in Recording.open(uri).shards(after=after):
        found += [sample.record.id for sample in shard.samples()]
        after = shard.cursor
    return found, after


@settings(max_examples=60)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(0, 2), st.integers(0, 9)),
            st.tuples(st.just("half"), st.integers(0, 2), st.integers(0, 9)),
            st.tuples(st.just("read"), st.integers(0, 3), st.just(0)),
        ),
        max_size=30,
    )
)
def test_a_reader_that_goes_on_has_every_finished_shard_once(
    steps: list[tuple[str, int, int]],
) -> None:
    """Whatever the order of writers, gaps between numbers, kills between files, and stops."""
    uri = f"memory://recordings/{uuid.uuid4().hex}"
    ShardWriter(uri, ABOUT, WRITERS[0]).claim()
    filesystem = fsspec.filesystem("memory")
    finished: set[str] = set()
    read: list[str] = []
    cursor = ""
    for step, who, number in steps:
        key = f"{who}-{number}"
        if step == "write" and key not in finished:
            ShardWriter(uri, ABOUT, WRITERS[who]).write(number, [captured(key)])
            finished.add(key)
        elif step == "half" and key not in finished:
            # Killed between a shard and its facts: nothing but its bytes are there.
            name = f"{uri}/shard-{WRITERS[who]}-{number:06d}.safetensors"
            filesystem.pipe_file(name.removeprefix("memory:/"), b"\0" * 64)
        elif step == "read":
            for n, shard in enumerate(Recording.open(uri).shards(after=cursor)):
                if n >= who:
                    break
                read += [sample.record.id for sample in shard.samples()]
                cursor = shard.cursor
    read += ids(uri, cursor)[0]
    assert sorted(read) == sorted(finished)
    assert ActivationStore.open(uri).n_rows == 2 * len(finished)


def test_several_writers_are_one_store_that_trains(tmp_path: Path) -> None:
    for n, name in enumerate(WRITERS):
        writer = ShardWriter(str(tmp_path / "live"), ABOUT, name)
        writer.write(0, [captured(f"{n}-{i}", rows=1 + i, label=i % 2 == 0) for i in range(4)])
    store = ActivationStore.open(tmp_path / "live")
    store.verify()
    assert (len(store), store.n_rows, store.layers, store.hidden) == (12, 30, (3,), 4)
    kept = ActivationSet.from_store(store)
    assert sorted(kept.ids) == sorted(f"{n}-{i}" for n in range(3) for i in range(4))
    for sample in store.samples():
        same = captured(sample.record.id, rows=sample.record.n_rows)
        assert sample.acts is not None
        assert same.acts is not None
        np.testing.assert_array_equal(sample.acts.storage, same.acts.storage)
        assert sample.token_ids == same.token_ids


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    ShardWriter(str(tmp_path), ABOUT, WRITERS[0]).claim()
    with pytest.raises(SpecError, match=r"another recording \(layers: \[3\], now \[4\]\)"):
        ShardWriter(str(tmp_path), ABOUT | {"layers": [4]}, WRITERS[1]).claim()
    with pytest.raises(ArtifactError, match="holds no recording"):
        Recording.open(tmp_path / "nowhere")
    (tmp_path / "recording.json").write_text("{}")
    with pytest.raises(ArtifactError, match="not what a recording is of"):
        Recording.open(tmp_path)


@pytest.mark.parametrize("old", ["", "recording.json"])
def test_a_recording_that_was_put_away_begins_anew(tmp_path: Path, old: str) -> None:
    """By its operator, or by a program that removes old files, with the server still there."""
    folder = tmp_path / "live"
    writer = ShardWriter(str(folder), ABOUT, WRITERS[0])
    writer.write(0, [captured("a")])
    (folder / old).rename(tmp_path / "away")
    writer.write(1, [captured("b")])
    assert ids(str(folder))[0] == (["a", "b"] if old else ["b"])


def test_damage_is_named(tmp_path: Path) -> None:
    ShardWriter(str(tmp_path), ABOUT, WRITERS[0]).write(0, [captured("a")])
    (shard,) = Recording.open(tmp_path).shards()
    with pytest.raises(SpecError, match="not a cursor"):
        list(Recording.open(tmp_path).shards(after="[1]"))
    Path(shard.uri).write_bytes(b"short")
    with pytest.raises(ArtifactError, match="another hash"):
        shard.samples()
    facts = Path(shard.uri.removesuffix(".safetensors") + ".json")
    facts.write_text("{")
    with pytest.raises(ArtifactError, match="not the facts of a shard"):
        list(Recording.open(tmp_path).shards())


WRITE_ON = """
import sys
from inspect_lens.data import ShardWriter
from tests.unit.shards.test_recording import ABOUT, captured
writer = ShardWriter(sys.argv[1], ABOUT, sys.argv[2])
for n in range(100_000):
    writer.write(n, [captured(f"{sys.argv[2]}-{n}-{i}", rows=500) for i in range(4)])
"""


@pytest.mark.slow
def test_killed_at_any_moment_it_reads_up_to_the_last_finished_shard(tmp_path: Path) -> None:
    """Two processes write to one folder and are killed, several times, while another reads."""
    uri, cursor, read = str(tmp_path), "", []
    ShardWriter(uri, ABOUT, WRITERS[0]).claim()
    for round_ in range(2):
        names = [f"{round_}{who}" * 6 for who in "ab"]
        command = [sys.executable, "-c", WRITE_ON, uri]
        running = [subprocess.Popen([*command, name], cwd=ROOT) for name in names]
        try:
            while len(list(tmp_path.glob("*.json"))) < 6 + 8 * round_:
                assert all(process.poll() is None for process in running)
                new, cursor = ids(uri, cursor)
                read += new
        finally:
            for process in running:
                process.kill()
                process.wait()
    new, cursor = ids(uri, cursor)
    read += new
    store = ActivationStore.open(uri)
    store.verify()
    assert sorted(read) == sorted(r.id for r in store.records())
    assert len(set(read)) == len(read) == 4 * len(store.manifest["shards"])
    # A number is written once, and those of a killed writer have no gap.
    for writer, (following, rest) in json.loads(cursor).items():
        assert following > 0, writer
        assert rest == []


def test_files_of_a_recording_are_their_owners(tmp_path: Path) -> None:
    writer = ShardWriter(str(tmp_path / "live"), ABOUT, writer=WRITERS[0])
    writer.write(0, [captured("a")])
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "live").iterdir()}
    assert len(modes) == 3
    assert set(modes.values()) == {0o600}, modes
