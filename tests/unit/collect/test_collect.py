from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import fsspec
import numpy as np
import pytest

from inspect_lens.collect import collect, feed_again
from inspect_lens.collect._collect import claimed, n_kept
from inspect_lens.data import (
    ActivationStore,
    Message,
    ProbeDataset,
    ProbeSample,
    write_whole,
)
from inspect_lens.errors import ArtifactError, CaptureError, SpecError
from inspect_lens.model import _server
from inspect_lens.probe import ProbeCard
from inspect_lens.probe.card._files import render_card
from inspect_lens.train import ActivationSet, StoreSet
from tests.kit.fake_server import FakeLensServer, residual, tokens_of
from tests.kit.repository import ROOT

pytestmark = pytest.mark.usefixtures("elsewhere")


def dataset(n: int = 20, **change: Any) -> ProbeDataset:
    samples = tuple(
        ProbeSample(
            id=f"s{i}", messages=(Message("user", f"tell me about {i} {'now ' * (i % 3)}"),),
            label=i % 2 == 1, group=f"g{i // 2}", columns={"parity": str(i % 2)}, **change,
        )
        for i in range(n)
    )  # fmt: skip
    return ProbeDataset(
        name="toy", split="train", source="builtin", licence="MIT", label_meaning="odd",
        on_policy=True, text_overlap_group="toy", samples=samples,
    )  # fmt: skip


def run(server: FakeLensServer, data: ProbeDataset, out: Path | str, **options: Any) -> Any:
    options = {"concurrency": 8, "shard_samples": 3, "max_tokens": 3, "progress": False} | options
    return collect(
        f"lens/{server.model}", data, out, model_args={"base_url": server.url}, **options
    )


def test_no_request_at_a_time_is_refused() -> None:
    with pytest.raises(SpecError, match="concurrency=0; allowed are 1 or more"):
        anyio.run(partial(feed_again, "lens/none", [], layers=[1], concurrency=0))


@pytest.mark.parametrize("given", ["instructed_pairs", []])
def test_what_is_no_data_set_is_refused(tmp_path: Path, given: Any) -> None:
    with pytest.raises(SpecError, match=r"^dataset=.*; allowed is a ProbeDataset, such as load_d"):
        collect("lens/tiny", given, tmp_path / "out")


def test_what_computed_the_rows_reaches_the_set_and_the_card(tmp_path: Path) -> None:
    told = {"engine": "vllm 9.9", "dtype": "bfloat16", "tokenizer": "tok", "newer": "unknown here"}
    with FakeLensServer() as server:
        server.computes_with = told
        store = run(server, dataset(60), tmp_path / "out", temperature=0.5)
        server.computes_with = {}
        bare = run(server, dataset(), tmp_path / "bare")
    capture = ActivationSet.from_store(store).capture
    assert capture == StoreSet(store).subset([3, 1]).capture
    assert capture is not None
    assert (capture.engine, capture.dtype, capture.tokenizer) == ("vllm 9.9", "bfloat16", "tok")
    assert (capture.temperature, capture.max_tokens, capture.seed) == (0.5, 3, 0)
    assert ActivationSet.from_store(bare).capture is None
    saved = ActivationSet.from_store(store).save(tmp_path / "s.safetensors")
    assert ActivationSet.load(saved).capture == capture
    card = ProbeCard(name="t/p", layers=(1,), hidden=8, capture=capture)
    page = render_card(card, sha256="0" * 64)
    assert "| engine | vllm 9.9 |" in page
    assert "| sampling of the answers | temperature 0.5, seed 0, up to 3 tokens |" in page


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def test_rows_are_those_of_their_tokens_in_the_order_of_the_set(tmp_path: Path) -> None:
    with FakeLensServer(delay_s=0.01) as server:
        store = run(server, dataset(), tmp_path / "out", layers=[1, 3])
    assert (len(store), store.layers, store.hidden) == (20, (1, 3), 8)
    samples = list(store.samples())
    assert [s.record.id for s in samples] == [f"s{i}" for i in range(20)]
    for i, sample in enumerate(samples):
        prompt = tokens_of(f"<user> {dataset().samples[i].messages[0].content}")
        assert sample.record.n_prompt == len(prompt)
        assert sample.token_ids[: len(prompt)] == tuple(prompt)
        # The last sampled token is never fed.
        assert sample.positions == (len(prompt), len(prompt) + 1)
        expected = residual(list(sample.token_ids), (1, 3), list(sample.positions))
        assert sample.acts is not None
        np.testing.assert_array_equal(sample.acts.storage, expected.storage)
        assert sample.read_ids == sample.token_ids[len(prompt) : -1]
        assert sample.record.columns == {"parity": str(i % 2)}
    assert [r.label for r in store.records()] == [i % 2 == 1 for i in range(20)]
    rows = list(store.rows(3, size=4))
    assert sum(len(x) for x, _ in rows) == store.n_rows == 40
    together = np.concatenate([x for x, _ in rows])
    np.testing.assert_array_equal(
        together, np.concatenate([s.acts.to_float32()[1] for s in samples if s.acts])
    )
    assert np.concatenate([y for _, y in rows]).tolist() == [i // 2 % 2 == 1 for i in range(40)]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["dataset"]["sha256"] == dataset().sha256
    assert manifest["dtype"] == "bfloat16"
    assert len(manifest["shards"]) == 7
    store.verify()


def test_requests_overlap_and_memory_is_bounded(tmp_path: Path) -> None:
    from inspect_lens.collect import _collect

    most, most_at_once, original = 0, 0, _collect.capture_sample
    alive: set[int] = set()
    asked: set[int] = set()

    async def watched(model: Any, index: int, sample: Any, how: Any) -> Any:
        nonlocal most, most_at_once
        asked.add(index)
        most_at_once = max(most_at_once, len(asked))
        made = await original(model, index, sample, how)
        asked.remove(index)
        alive.add(index)
        most = max(most, len(alive))
        return made

    def written(uri: str, k: int, mark: Any, samples: list[Any], capture: Any) -> None:
        write(uri, k, mark, samples, capture)
        alive.difference_update(s.record.index for s in samples)

    write = _collect.write_shard
    with pytest.MonkeyPatch.context() as patch, FakeLensServer(delay_s=0.05) as server:
        patch.setattr(_collect, "capture_sample", watched)
        patch.setattr(_collect, "write_shard", written)
        run(server, dataset(120), tmp_path / "out", concurrency=20, shard_samples=5)
    assert most_at_once == 20
    assert most <= (2 + 4) * 5


def test_given_completions_and_raw_texts_are_read_as_they_stand(tmp_path: Path) -> None:
    with FakeLensServer() as server:
        store = run(
            server, dataset(4, completion="all of this is read"), tmp_path / "off", layers="all"
        )
        raw = run(server, dataset(4, raw=True), tmp_path / "raw", layers=[2])
        assert server.paths.count("/v1/chat/completions") == 0
    for i, sample in enumerate(store.samples()):
        prompt = tokens_of(f"<user> {dataset().samples[i].messages[0].content}")
        reply = tokens_of("<assistant> all of this is read")
        assert sample.token_ids == (*prompt, *reply)
        assert sample.positions == tuple(range(len(prompt), len(prompt) + len(reply)))
        expected = residual(list(sample.token_ids), (0, 1, 2, 3), list(sample.positions))
        assert sample.acts is not None
        np.testing.assert_array_equal(sample.acts.storage, expected.storage)
    for i, sample in enumerate(raw.samples()):
        words = tokens_of(dataset().samples[i].messages[0].content)
        assert sample.token_ids == tuple(words)
        assert sample.record.n_rows == len(words)


CHILD = """
import json, os, signal, sys, threading
sys.path[:0] = [{root!r}, {src!r}]
from inspect_lens.collect import _collect, collect
from tests.unit.collect.test_collect import AGAIN, dataset

point = last = 0

def step():
    global point
    point += 1
    if point == last:
        os.kill(os.getpid(), signal.SIGKILL)

def audit(event, arguments):
    if event == "os.rename" or (event == "open" and "w" in str(arguments[1])):
        if str(arguments[0]).startswith({out!r}):
            step()

async def answered(*arguments):
    made = await capture(*arguments)
    step()
    return made

def run(out):
    collect("lens/org/tiny", dataset({samples}), out, **AGAIN, max_tokens=3, progress=False,
            model_args={{"base_url": {url!r}}})

run({out!r} + "/warm")  # imports many modules, which forks need not do again
for thread in set(threading.enumerate()) - {{threading.main_thread()}}:
    thread.join()  # the loop told its workers to end; a fork may hold no lock of theirs
capture, _collect.capture_sample = _collect.capture_sample, answered
sys.addaudithook(audit)
for line in sys.stdin:
    out, last = json.loads(line)
    child = os.fork()
    if child == 0:
        point = 0
        run(out)
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""
SAMPLES = 3
AGAIN = {"concurrency": 2, "shard_samples": 2}


class Killer:
    """Runs collect in processes that end themselves, by SIGKILL, at a point that is counted.

    A point is an answer that came, or a file below the folder that is about to be written or to
    get its name: nothing depends on how fast the machine is. The interpreter is started once, and
    forked for each run.
    """

    def __init__(self, folder: Path, url: str) -> None:
        code = CHILD.format(
            root=str(ROOT), src=str(ROOT / "src"), out=str(folder), url=url, samples=SAMPLES
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Killer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()

    def run(self, out: Path, *, until: int) -> bool:
        """Whether the process was killed at that point; else it came to its end."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(out), until]) + "\n")
        self.process.stdin.flush()
        status = int(self.process.stdout.readline())
        assert status in (0, signal.SIGKILL)
        return status == signal.SIGKILL


def test_reasoning_is_fed_and_not_read(tmp_path: Path) -> None:
    reply, unread = "first i think then i say so", "first i think "
    data = dataset(4, completion=reply, unread=unread)
    with FakeLensServer() as server:
        store = run(server, data, tmp_path / "out", layers=[1])
        whole = run(server, data, tmp_path / "all", layers=[1], positions="all")
        plain = run(server, dataset(4, completion=reply), tmp_path / "plain", layers=[1])
    n_unread = len(tokens_of(f"<assistant> {unread}"))
    for sample, other, every in zip(store.samples(), plain.samples(), whole.samples(), strict=True):
        assert sample.token_ids == other.token_ids
        assert sample.positions == other.positions[n_unread:]
        assert len(sample.positions) == len(tokens_of("then i say so"))
        assert every.positions == tuple(range(len(sample.token_ids)))
        assert sample.acts is not None
        assert other.acts is not None
        np.testing.assert_array_equal(sample.acts.storage, other.acts.storage[:, n_unread:])


@pytest.mark.slow
def test_killed_at_any_point_and_started_again_it_gives_the_same_bytes(tmp_path: Path) -> None:
    with FakeLensServer() as server, Killer(tmp_path, server.url) as killer:
        run(server, dataset(SAMPLES), tmp_path / "whole", **AGAIN)
        whole, point = content(tmp_path / "whole"), 1
        while killer.run(out := tmp_path / f"at-{point}", until=point):
            # What has its name is part of the whole; what is half written has another.
            left = content(out)
            assert all(whole[name] == data for name, data in left.items() if name[0] != ".")
            run(server, dataset(SAMPLES), out, **AGAIN)
            assert content(out) == whole
            point += 1
        assert content(out) == whole, "it was not killed and came to its end"
        # Every answer, and two points for each of plan, manifest, two shards and their facts.
        assert point - 1 == SAMPLES + 2 * 6
        # Killed again and again in one folder, each time a little later.
        kills = 0
        while killer.run(tmp_path / "often", until=4 + kills):
            kills += 1
        assert kills >= 2
        store = ActivationStore.open(tmp_path / "often")
    assert content(tmp_path / "often") == whole
    assert [r.id for r in store.records()] == [f"s{i}" for i in range(SAMPLES)]


def test_what_a_kill_leaves_inside_a_write_is_overwritten(tmp_path: Path) -> None:
    with FakeLensServer() as server:
        run(server, dataset(9), tmp_path / "whole")
        out = tmp_path / "torn"
        run(server, dataset(9), out)
        # Every state that a kill can leave: no manifest, a shard without its facts, half a file
        # under the temporary name.
        for torn in ("manifest.json", "shard-00001.json", "shard-00002.json"):
            (out / torn).unlink()
        (out / "shard-00002.safetensors").unlink()
        (out / ".shard-00002.safetensors.tmp").write_bytes(b"half")
        asked = len(server.requests)
        run(server, dataset(9), out)
        assert len(server.requests) == asked + 6, "the first shard is kept"
    assert content(out) == content(tmp_path / "whole")


def test_a_full_disk_keeps_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CaptureError, match=r"could not be written .*free space"):
        write_whole(str(tmp_path / "shard"), b"rows")
    assert not list(tmp_path.iterdir())


def test_another_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with FakeLensServer() as server:
        run(server, dataset(6), tmp_path / "out")
        asked = len(server.requests)
        assert len(run(server, dataset(6), tmp_path / "out")) == 6
        assert len(server.requests) == asked, "a finished store is opened, not made again"
        for data, options, match in (
            (dataset(7), {}, "dataset"),
            (dataset(6), {"layers": [1]}, "layers"),
            (dataset(6), {"shard_samples": 2}, "shard_samples"),
        ):
            with pytest.raises(SpecError, match=match):
                run(server, data, tmp_path / "out", **options)
        with pytest.raises(SpecError, match="1 or more"):
            run(server, dataset(6), tmp_path / "x", concurrency=0)


def test_shards_of_two_runs_that_began_at_once_are_not_mixed(tmp_path: Path) -> None:
    with FakeLensServer() as server:
        run(server, dataset(6), tmp_path / "out", layers=[1])
        for file in ("manifest.json", "shard-00001.json"):
            (tmp_path / "out" / file).unlink()
        # As when the other one read that there is no plan, and wrote its own later.
        run(server, dataset(6), tmp_path / "other", layers=[2])
        plan = (tmp_path / "other/plan.json").read_bytes()
        (tmp_path / "out/plan.json").write_bytes(plan)
        whole, asked = content(tmp_path / "out"), len(server.requests)
        with pytest.raises(SpecError, match=r"shard-00000\.safetensors is of a run with other"):
            run(server, dataset(6), tmp_path / "out", layers=[2])
        assert len(server.requests) == asked
        assert content(tmp_path / "out") == whole
        # The plan is gone: what there is still is not taken for the new run's.
        (tmp_path / "out/plan.json").unlink()
        with pytest.raises(SpecError, match="use another folder"):
            run(server, dataset(6), tmp_path / "out", layers=[2])
        assert len(server.requests) == asked
        # Its own run finds it as it was.
        assert run(server, dataset(6), tmp_path / "out", layers=[1]).layers == (1,)


def test_two_processes_do_not_write_into_one_folder(tmp_path: Path) -> None:
    """They wrote the same temporary files, of which one lost its name to the other."""
    with FakeLensServer() as server, claimed(str(tmp_path / "out"), {"format": "any"}):
        with pytest.raises(SpecError, match=r"^out=.*: another run is writing into this folder"):
            run(server, dataset(4), tmp_path / "out")
        assert not server.requests
    (tmp_path / "out" / "plan.json").unlink()
    with FakeLensServer() as server:
        assert len(run(server, dataset(4), tmp_path / "out")) == 4


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_folder_is_free_although_a_forked_process_lives_on(tmp_path: Path) -> None:
    """An engine that is forked while a run collects has the handle of the lock."""
    at, end = os.pipe()
    plan = {"format": "any"}
    with claimed(str(tmp_path / "out"), plan):
        if (child := os.fork()) == 0:
            os.close(end)
            os.read(at, 1)
            os._exit(0)
    try:
        with claimed(str(tmp_path / "out"), plan):
            pass
    finally:
        os.close(end)
        os.waitpid(child, 0)
        os.close(at)


@pytest.mark.parametrize("file", ["plan.json", "shard-00001.json"])
@pytest.mark.parametrize("text", ["", "[]", "null", "3", '{"layers": ["x"]}', '{"hidden": -1}'])
def test_damaged_facts_are_named(tmp_path: Path, file: str, text: str) -> None:
    with FakeLensServer() as server:
        run(server, dataset(6), tmp_path / "out")
        (tmp_path / "out" / "manifest.json").unlink()
        (tmp_path / "out" / file).write_text(text)
        asked = len(server.requests)
        with pytest.raises(ArtifactError, match=rf"{file}: not what collect wrote .*delete it"):
            run(server, dataset(6), tmp_path / "out")
        assert len(server.requests) == asked


@pytest.mark.parametrize(
    ("file", "key"),
    [("plan.json", "dataset"), ("plan.json", "shard_samples"), ("shard-00001.json", "dtype"),
     ("shard-00001.json", "hidden"), ("shard-00001.json", "layers")],
)  # fmt: skip
def test_facts_that_are_missing_are_named(tmp_path: Path, file: str, key: str) -> None:
    with FakeLensServer() as server:
        run(server, dataset(6), tmp_path / "out")
        where = tmp_path / "out" / file
        facts = json.loads(where.read_text())
        del facts[key]
        where.write_text(json.dumps(facts))
        (tmp_path / "out" / "manifest.json").unlink()
        read = n_kept if file == "plan.json" else partial(run, server, dataset(6))
        with pytest.raises(ArtifactError, match=rf"{file}: says no '{key}', only"):
            read(str(tmp_path / "out"))


def test_a_run_that_wrote_nothing_keeps_no_folder_from_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with FakeLensServer(api_key="secret") as server:
        with pytest.raises(SpecError, match=r"^api_key: http.* \(HTTP 401\).* set VLLM_API_KEY"):
            run(server, dataset(4), out, layers=[1])
        monkeypatch.setenv("VLLM_API_KEY", "secret")
        with pytest.raises(CaptureError, match="layer 9"):
            run(server, dataset(4), out, layers=[9])
        assert run(server, dataset(4), out, layers=[3]).layers == (3,)
        whole = content(out)
        with pytest.raises(SpecError, match="holds another run"):
            run(server, dataset(4), out, layers=[9])
    assert content(out) == whole


def test_a_run_goes_on_with_weights_that_were_quantised_alike_only(tmp_path: Path) -> None:
    out = tmp_path / "out"
    told = {"engine": "vllm 0.32.0", "dtype": "bfloat16"}
    with FakeLensServer() as server:
        server.computes_with = told | {"quantization": "awq"}
        run(server, dataset(4), out, layers=[1], shard_samples=2)
        for name in ("manifest.json", "shard-00001.json"):
            (out / name).unlink()
        asked = len(server.requests)
        for other in (told | {"quantization": "fp8"}, told, told | {"dtype": "half"}):
            server.computes_with = other
            with pytest.raises(SpecError, match=r"runs had .*'auto_awq'.* as dtype and quantis"):
                run(server, dataset(4), out, layers=[1], shard_samples=2)
        assert len(server.requests) == asked, "no sample was sent"
        # Another name of the same, and one that does not say.
        server.computes_with = told | {"quantization": "auto_awq"}
        store = run(server, dataset(4), out, layers=[1], shard_samples=2)
    assert store.manifest["computed_with"] == told | {"quantization": "auto_awq"}


def test_a_server_that_does_not_start_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "raise SystemExit(3)",
        "import sys; print('(EngineCore pid=7) ValueError: 9 blocks, 8 needed', file=sys.stderr);"
        "raise RuntimeError('Engine core initialization failed. See root cause above.')",
    )
    for code, last in zip(
        program, ("--model org/none .*\n", "\nValueError: 9 blocks, 8 needed"), strict=True
    ):
        monkeypatch.setattr(_server, "COMMAND", ("-c", code))
        with pytest.raises(
            CaptureError, match=rf"(?s)org/none: .*exited unexpectedly.*{last}$"
        ) as e:
            collect("lens/org/none", dataset(2), tmp_path / "a", progress=False)
        assert "PARENT" not in str(e.value), "the command can be given as it is"


def test_a_failing_sample_ends_the_run_or_is_written_down(tmp_path: Path) -> None:
    with FakeLensServer() as server:
        data = dataset(6)
        with pytest.raises(Exception, match="layer 9"):
            run(server, data, tmp_path / "a", layers=[9])
        assert not (tmp_path / "a" / "manifest.json").exists()
        with pytest.raises(ArtifactError, match="incomplete"):
            ActivationStore.open(tmp_path / "a")
    with FakeLensServer(dialect="plain") as plain, pytest.raises(CaptureError):
        run(plain, data, tmp_path / "b")
    with FakeLensServer() as server:
        from inspect_lens.collect import _collect

        original = _collect.capture_sample

        async def one_fails(model: Any, index: int, sample: Any, how: Any) -> Any:
            if index == 4:
                raise CaptureError("lost")
            return await original(model, index, sample, how)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_collect, "capture_sample", one_fails)
            store = run(server, data, tmp_path / "c", on_error="skip")
    records = list(store.records())
    assert [r.n_rows for r in records] == [2, 2, 2, 2, 0, 2]
    assert records[4].error == "lost"
    assert store.manifest["n_empty"] == 1


def test_any_fsspec_path_does(tmp_path: Path) -> None:
    with FakeLensServer() as server:
        run(server, dataset(6), tmp_path / "local")
        store = run(server, dataset(6), "memory://collected/set")
    remote = fsspec.filesystem("memory")
    names = {n.rpartition("/")[2] for n in remote.ls("/collected/set", detail=False)}
    assert names == {p.name for p in (tmp_path / "local").iterdir()}
    assert store.sha256 == ActivationStore.open(tmp_path / "local").sha256
    assert sum(len(x) for x, _ in store.rows(0)) == store.n_rows
    damaged = tmp_path / "local" / "shard-00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\7")
    with pytest.raises(ArtifactError, match="shard-00001"):
        ActivationStore.open(tmp_path / "local").verify()


@pytest.mark.anyio
async def test_a_notebook_is_told_to_await(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="as in a notebook; await collect_async"):
        collect("lens/org/none", dataset(2), tmp_path / "a")
