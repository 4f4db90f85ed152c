"""`probe check`: the same tokens in another engine, against what the store says."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from inspect_lens._cli import _jobs, app
from inspect_lens._cli._jobs import _refuse_another_model
from inspect_lens.collect import collect
from inspect_lens.data import ActivationStore, Message, ProbeDataset, ProbeSample
from inspect_lens.errors import SpecError
from inspect_lens.probe import ModelRef, Probe, ProbeCard, SeenSamples, fingerprint_model
from inspect_lens.train import ActivationSet, calibrate_threshold, score_shift
from tests.kit import fake_server
from tests.kit.fake_server import FakeLensServer
from tests.kit.repository import ROOT

pytestmark = pytest.mark.usefixtures("elsewhere")

TOLD = {"engine": "vllm 0.32.0", "dtype": "bfloat16"}
N = 120


def harmless() -> ProbeDataset:
    samples = tuple(
        ProbeSample(
            id=f"s{i}", messages=(Message("user", f"tell me about {i} {'now ' * (i % 5)}"),),
            label=False, group=f"g{i // 2}",
        )
        for i in range(N)
    )  # fmt: skip
    return ProbeDataset(
        name="toy", split="train", source="builtin", licence="MIT", label_meaning="odd",
        on_policy=True, text_overlap_group="toy", samples=samples,
    )  # fmt: skip


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test leaves its store for the others."""
    return tmp_path_factory.mktemp("once") / "control"


@pytest.fixture
def store(elsewhere: Path, collected: Path) -> ActivationStore:
    if collected.exists():
        shutil.copytree(collected, "control")
        return ActivationStore.open("control")
    with FakeLensServer() as server:
        server.computes_with = TOLD
        made = collect(
            f"lens/{server.model}", harmless(), "control", model_args={"base_url": server.url},
            layers=[1], max_tokens=3, progress=False,
        )  # fmt: skip
    shutil.copytree("control", collected)
    return made


@pytest.fixture
def probe(store: ActivationStore) -> Probe:
    data = ActivationSet.from_store(store, name="control")
    direction = np.linspace(1.0, 2.0, 8)
    card = ProbeCard(
        name="t/p", layers=(1,), hidden=8, capture=data.capture, model=ModelRef(name=data.model)
    )
    bare = Probe.from_direction(direction, card=card)
    made = [
        calibrate_threshold(bare, data, 0.1, statistic=one, allow_few=True)
        for one in ("answer", "alarm", "token")
    ]
    seen = SeenSamples.of("content", training=[], control=[c.encode() for c in data.contents])
    probe = replace(bare, card=card.model_copy(update={"thresholds": tuple(made), "seen": seen}))
    probe.save("p")
    return probe


def check(server: FakeLensServer, *words: object) -> Any:
    done = CliRunner().invoke(
        app,
        ["probe", "check", "p", "--model", f"lens/{server.model}", "--control", "control",
         "--base-url", server.url, *map(str, words)],
    )  # fmt: skip
    if done.exception is not None:
        raise done.exception
    return json.loads(done.stdout) if "--json" in words else done.stdout


def test_the_same_engine_changes_nothing(probe: Probe) -> None:
    with FakeLensServer() as server:
        server.computes_with = TOLD
        found = check(server, "--json")
        said = check(server)
        few = check(server, "--limit", 30, "--json")
    assert (found["mean"], found["largest"], found["differences"]) == (0.0, 0.0, [])
    assert (found["n"], found["n_groups"], found["n_calibrated"]) == (N, N // 2, N)
    for one, held in zip(found["thresholds"], probe.card.thresholds, strict=True):
        assert one["n_before"] == one["n_here"] == held.n_above
        assert one["n"] == held.n_control
        assert one["n_changed"] == 0 < one["changed"]["high"]
    assert "engine, dtype and quantisation are those of the store" in said
    assert "0 of 120 changed sides" in said
    assert few["n"] == 30
    for words in (("--limit", -1), ("--concurrency", 0), ("--resamples", -1)):
        with FakeLensServer() as server, pytest.raises(SystemExit) as refused:
            check(server, *words)
        assert refused.value.code == 2


def test_other_weights_are_refused_before_anything_is_fed_to_them(
    store: ActivationStore,
) -> None:
    data = ActivationSet.from_store(store, name="control")
    folder = str(ROOT / "organism/checkpoint")
    ours = replace(data, model_sha256=fingerprint_model(folder))
    _refuse_another_model(ours, folder, {})
    theirs = replace(data, model_sha256="0" * 64)
    with pytest.raises(SpecError, match=r"the weights of .* are not those of"):
        _refuse_another_model(theirs, folder, {})
    _refuse_another_model(theirs, folder, {"quantization": "fp8"})
    _refuse_another_model(theirs, "org/far-away", {})


@pytest.mark.usefixtures("probe")
def test_the_command_asks_whose_weights_they_are_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise SpecError("other weights")

    monkeypatch.setattr(_jobs, "_refuse_another_model", refuse)
    with FakeLensServer() as server, pytest.raises(SpecError, match="other weights"):
        check(server)
    assert not server.requests


def test_a_shift_is_measured_with_its_interval_and_what_it_does_to_the_rate(
    probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = fake_server.residual

    def moved(*args: Any) -> Any:
        made = original(*args)
        return replace(made, storage=(made.to_float32() + 0.5).astype(np.float32), dtype="float32")

    monkeypatch.setattr(fake_server, "residual", moved)
    with FakeLensServer() as server:
        server.computes_with = TOLD | {"dtype": "float32"}
        found = check(server, "--json")
        said = check(server)
    expected = 0.5 * float(np.linspace(1.0, 2.0, 8).sum())
    assert found["mean"] == pytest.approx(expected, rel=1e-3)
    assert found["interval"]["low"] <= found["mean"] <= found["interval"]["high"]
    assert found["differences"] == ["dtype float32 instead of bfloat16"]
    answer = found["thresholds"][0]
    data = ActivationSet.from_store(ActivationStore.open("control"))
    above = int((data.scores(probe) + expected > answer["value"]).sum())
    assert answer["n_before"] + 10 < answer["n_here"] == pytest.approx(above, abs=1)
    assert answer["n_changed"] == answer["n_here"] - answer["n_before"]
    assert answer["here"]["low"] < answer["n_here"] / N <= answer["here"]["high"]
    assert ("RATE DOES NOT HOLD HERE" in said) == (answer["here"]["low"] > 0.1)
    assert "computed with dtype float32 instead of bfloat16" in said


def test_what_cannot_be_compared_is_refused(probe: Probe) -> None:
    data = ActivationSet.from_store(ActivationStore.open("control"))
    with pytest.raises(SpecError, match="other samples"):
        score_shift(probe, data, data.subset(range(1, N)))
    replace(probe, card=probe.card.model_copy(update={"thresholds": ()})).save("p2")
    done = CliRunner().invoke(
        app, ["probe", "check", "p2", "--model", "lens/x", "--control", "control"]
    )
    assert "no threshold" in str(done.exception)


def test_a_file_has_no_tokens_to_feed_and_that_is_said_first(probe: Probe) -> None:
    ActivationSet.from_store(ActivationStore.open("control")).save("acts.safetensors")
    done = CliRunner().invoke(
        app, ["probe", "check", "p", "--model", "lens/x", "--control", "acts.safetensors"]
    )
    assert isinstance(done.exception, SpecError)
    assert "--control: acts.safetensors is a file of rows, without the tokens" in str(
        done.exception
    )


def test_only_the_samples_that_are_compared_are_held(
    probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    original = ActivationSet.__post_init__

    def made(self: ActivationSet) -> None:
        original(self)
        sizes.append(len(self))

    monkeypatch.setattr(ActivationSet, "__post_init__", made)
    with FakeLensServer() as server:
        server.computes_with = TOLD
        found = check(server, "--limit", 30, "--json")
        assert found["n"] == max(sizes) == 30
        assert found["model"] == found["stored_model"] == server.model
        monkeypatch.setattr("inspect_lens._cli._jobs.MEMORY", 1e-6)
        asked = len(server.requests)
        with pytest.raises(SpecError, match="pass --limit"):
            check(server, "--json")
        assert len(server.requests) == asked, "before anything is fed"
