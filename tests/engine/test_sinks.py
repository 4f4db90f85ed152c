"""Rows that go to stores and functions beside the response, from an engine in this process."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inspect_lens import LensRequest, SteeringVector
from inspect_lens._vllm.frontend.state import front_end
from inspect_lens.data import ActivationStore, Captured, Recording
from inspect_lens.engine import flush_sinks, sinks
from inspect_lens.spec import SinkUse
from inspect_lens.train import ActivationSet

from .conftest import HIDDEN, Engine, start, tokens

pytestmark = pytest.mark.engine

FUNCTION = """
import time
seen, about = [], []

def note(sample, what):
    seen.append(sample)
    about.append(what)

def fail(sample, what):
    raise RuntimeError("not today")
"""
SHARE = 0.4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sinks")


@pytest.fixture(scope="module")
def recording(tiny_folder: Path, folder: Path) -> Iterator[Engine]:
    """An engine whose operator has named sinks."""
    (folder / "their_sinks.py").write_text(FUNCTION)
    (folder / "theirs-1.dist-info").mkdir()
    (folder / "theirs-1.dist-info/METADATA").write_text("Name: theirs\nVersion: 1\n")
    (folder / "theirs-1.dist-info/entry_points.txt").write_text(
        "[inspect_lens.sinks]\nnote = their_sinks:note\nfail = their_sinks:fail\n"
    )
    named = {
        "some": {"store": str(folder / "some"), "layers": [1, 3]},
        "every": {"store": "memory://every", "positions": "all", "site": "resid_pre"},
        "noted": {"callback": "note", "layers": [2], "positions": "last"},
        "fails": {"callback": "fail", "layers": [2]},
        "ruled": {
            "store": str(folder / "ruled"), "layers": [2], "positions": "all", "share": SHARE,
            "seed": "secret", "requests": False,
        },
    }  # fmt: skip
    (folder / "sinks.json").write_text(json.dumps(named))
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(folder)
    patch.setenv("INSPECT_LENS_SINKS", str(folder / "sinks.json"))
    engine = start(tiny_folder, enforce_eager=True)
    yield engine
    engine.close()
    patch.undo()
    sys.modules.pop("their_sinks", None)


def asking(sink: Any, **more: Any) -> dict[str, Any]:
    return {"inspect_lens": {"sink": sink, **more}}


def by_id(uri: str | Path) -> dict[str, Captured]:
    return {sample.record.id: sample for sample in ActivationStore.open(uri).samples()}


def test_rows_in_the_store_are_those_of_the_response_to_the_bit(
    recording: Engine, folder: Path
) -> None:
    prompts = [tokens(n, seed=n) for n in (5, 40, 90, 130)]
    same = {"layers": [1, 3], "positions": "completion"}
    asked = [asking({"name": "some", "id": f"both-{i}"}, capture=same) for i in range(4)]
    outputs = recording.run(prompts, asked)
    found = by_id(folder / "some")
    for i, output in enumerate(outputs):
        told = output.inspect_lens.sink
        assert (told.status, told.rows) == ("written", 7), told
        assert (folder / "some" / told.shard).is_file()
        sample = found[f"both-{i}"]
        rows = output.activations["residual_stream"].numpy()
        assert sample.acts is not None
        np.testing.assert_array_equal(sample.acts.storage, rows)
        assert sample.token_ids == (*prompts[i], *output.outputs[0].token_ids)
        n = len(prompts[i])
        assert sample.positions == tuple(range(n, n + 7))


def test_without_a_capture_the_response_has_no_rows(recording: Engine, hugging_face: Any) -> None:
    prompt = tokens(70, seed=3)
    alone, plain = recording.run([prompt, prompt], [asking("every"), None])
    assert not hasattr(alone, "activations")
    assert alone.inspect_lens.sink.status == "written"
    assert alone.inspect_lens.capture.n_positions == 77
    assert alone.outputs[0].token_ids == plain.outputs[0].token_ids
    (sample,) = ActivationStore.open("memory://every").samples()
    assert sample.layers == (0, 1, 2, 3)
    fed = [*prompt, *alone.outputs[0].token_ids][:77]
    truth = hugging_face.residual_stream(fed)[:-1]
    assert sample.acts is not None
    # The stream before block i is the stream after the block below.
    np.testing.assert_allclose(sample.acts.storage[1:], truth, atol=2e-4)


def test_what_a_request_says_of_its_sample_is_kept_and_trains(
    recording: Engine, folder: Path
) -> None:
    uses = [
        SinkUse(name="some", id=f"l{i}", label=i % 2 == 0, group=f"g{i // 2}", columns={"k": "v"})
        for i in range(8)
    ]
    prompts = [tokens(20, seed=50 + i) for i in range(8)]
    recording.run(prompts, [{"inspect_lens": LensRequest(sink=use)} for use in uses])
    store = ActivationStore.open(folder / "some")
    store.verify()
    made = ActivationSet.from_store(store)
    assert sorted(made.ids) == sorted(f"l{i}" for i in range(8))
    record = by_id(folder / "some")["l4"].record
    assert (record.label, record.group, record.columns) == (True, "g2", {"k": "v"})


def test_choices_of_one_request_are_samples_of_their_own(recording: Engine, folder: Path) -> None:
    before = set(by_id(folder / "some"))
    (output,) = recording.run([tokens(12, seed=77)], asking("some"), n=3, temperature=1.0)
    assert {c.inspect_lens.sink.status for c in output.outputs} == {"written"}
    found = by_id(folder / "some")
    new = {key: found[key] for key in set(found) - before}
    assert len(new) == 3
    texts = {sample.token_ids[12:] for sample in new.values()}
    assert texts == {tuple(c.token_ids) for c in output.outputs}


def test_other_results_beside_a_sink_are_returned(recording: Engine) -> None:
    vector = SteeringVector(
        activations=np.full((1, HIDDEN), 0.5, dtype=np.float32), layer_indices=[1]
    )
    request = LensRequest(sink={"name": "noted"}, edits=(vector,), lens={"layers": [2], "top_k": 2})
    (output,) = recording.run([tokens(30)], {"inspect_lens": request})
    assert output.inspect_lens.steer.n_tokens == 37
    assert list(output.activations) == ["logit_lens"]
    assert output.inspect_lens.sink.status == "written"
    import their_sinks  # type: ignore[import-not-found]

    sample, about = their_sinks.seen[-1], their_sinks.about[-1]
    assert sample.positions == (36,)
    assert sample.acts.shape == (1, 1, HIDDEN)
    assert (about["sink"], about["layers"], about["site"]) == ("noted", [2], "resid_post")


def test_a_function_that_fails_harms_no_request(recording: Engine) -> None:
    outputs = recording.run([tokens(8), tokens(9)], [asking("fails"), None])
    assert outputs[0].inspect_lens.sink.status == "failed"
    assert outputs[0].inspect_lens.sink.reason == "RuntimeError; the server's log has more"
    assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)
    assert sinks()["fails"]["counts"] == {"failed": 1}


def settled(uri: Path, wanted: set[str]) -> list[Captured]:
    """Samples of a recording by rule, whose clients wait for nothing, once these are there."""
    deadline = time.monotonic() + 30
    while True:
        assert flush_sinks(20)
        found = [s for shard in Recording.open(uri).shards() for s in shard.samples()]
        if wanted <= {sample.record.id for sample in found} or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def test_a_rule_records_its_share_of_plain_requests_and_nobody_sees_it(
    recording: Engine, folder: Path, hugging_face: Any
) -> None:
    from inspect_lens._vllm.sinks.sink import lot

    n = 150
    prompts = [tokens(10 + i % 7, seed=200 + i) for i in range(n)]
    outputs = recording.run(prompts, None, max_tokens=5)
    assert not any(hasattr(o, "inspect_lens") or hasattr(o, "activations") for o in outputs)
    chosen = [o for o in outputs if lot("secret", "ruled", o.request_id) < SHARE]
    assert abs(len(chosen) - SHARE * n) < 4 * sqrt(n * SHARE * (1 - SHARE))
    # Samples of tests before this one may still come.
    samples = settled(folder / "ruled", {o.request_id for o in chosen})
    found = {sample.record.id: sample for sample in samples}
    assert len(found) == len(samples)
    for output in outputs:
        assert (output.request_id in found) == (output in chosen)
    for output in chosen[:5]:
        sample, ids = found[output.request_id], output.outputs[0].token_ids
        fed = [*output.prompt_token_ids, *ids]
        assert sample.token_ids == tuple(fed)
        assert sample.acts is not None
        truth = hugging_face.residual_stream(fed[:-1])[2]
        np.testing.assert_allclose(sample.acts.storage[0], truth, atol=2e-4)
    counts = sinks()["ruled"]["counts"]
    assert list(counts) == ["written"]
    assert counts["written"] >= len(found)


def test_nothing_is_left_behind(recording: Engine) -> None:
    recording.run([tokens(8)], None)
    stats = recording.stats()
    held = ("requests", "ring_rows", "bank_rows")
    assert {k: stats[k] for k in held if k in stats} == {k: 0 for k in held if k in stats}
    assert front_end().results.n_open == 0
