"""What the commands take for one model, one kind of tokens, and a control set."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from inspect_lens._cli import _jobs, app
from inspect_lens._cli._jobs import train_job
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe import load_probe
from inspect_lens.train import ActivationSet, MeanDifferenceProbe, measure_baselines
from tests.kit.planted_store import plant

HALF = [0, 1] * 40


def train(**change: Any) -> Any:
    how: dict[str, Any] = {
        "out": "p", "train": "s/train", "control": "s/control", "selection": "", "held_out": (),
        "disjoint": {}, "name": "t/p", "family": "mean-difference", "settings": {},
        "layers": "all", "rows": "tokens", "pool": "mean", "fpr": 0.05, "allow_few": False,
        "seed": 0,
    }  # fmt: skip
    return train_job(**{**how, **change})


def command(*words: object) -> Any:
    """What a command says as JSON, or its error."""
    done = CliRunner().invoke(app, ["probe", *map(str, words), "--json"])
    if done.exception is not None:
        raise done.exception
    return json.loads(done.stdout)


def evaluate(store: str, *words: str) -> Any:
    return command("evaluate", "p", store, *words)["evaluations"][0]


def sweep(selection: str) -> Any:
    return command("sweep", "--train", "s/train", "--selection", selection, "--family", "lda")


@pytest.fixture(autouse=True)
def _stores(elsewhere: Path) -> None:
    plant("s/train", HALF, seed=1)
    plant("s/control", [0] * 100, seed=2)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"positions": "prompt"}, "at positions 'prompt'; allowed are those of 'train"),
        ({"positions": [-1]}, r"at positions \(-1,\)"),
        ({"weights": "b"}, "weights bbbbbbbbbbbb.*weights aaaaaaaaaaaa"),
    ],
)
def test_stores_of_other_tokens_or_weights_are_not_mixed(change: Any, match: str) -> None:
    plant("s/other", HALF, seed=3, **change)
    for use in ({"control": "s/other"}, {"held_out": ["s/other"]}, {"selection": "s/other"}):
        with pytest.raises(SpecError, match=match):
            train(**use)
    with pytest.raises(SpecError, match=match):
        sweep("s/other")


def test_a_probe_is_judged_on_the_tokens_that_it_reads() -> None:
    train()
    plant("s/same", HALF, seed=3)
    assert evaluate("s/same")["auroc"] > 0.9
    plant("s/all", HALF, seed=3, positions="all")
    with pytest.raises(ArtifactError, match="positions 'all'; probe 't/p' reads 'completion'"):
        evaluate("s/all")
    plant("s/other", HALF, seed=3, weights="b")
    with pytest.raises(ArtifactError, match="--any-model"):
        evaluate("s/other")
    assert evaluate("s/other", "--any-model")["auroc"] > 0.9
    plant("s/both", HALF, seed=3, weights="b", positions="all")
    with pytest.raises(ArtifactError, match="positions 'all'"):
        evaluate("s/both", "--any-model")


def test_a_text_is_prompt_and_completion_at_once() -> None:
    """`collect` reads the whole of a raw text, whichever of the two it is asked for."""
    plant("s/text", HALF, seed=3, raw=True, positions="completion")
    plant("s/prompt", HALF, seed=4, positions="prompt")
    made = train(train="s/text", held_out=["s/prompt"])
    assert made.probe.card.positions == "completion"
    plant("s/more", HALF, seed=5, raw=True, positions="prompt")
    assert evaluate("s/more")["auroc"] > 0.9
    with pytest.raises(ArtifactError, match="positions 'prompt'"):
        evaluate("s/prompt")
    plant("s/last", HALF, seed=6, raw=True, positions="last_prompt")
    with pytest.raises(SpecError, match="positions 'last_prompt'"):
        train(train="s/text", held_out=["s/last"])


def test_positive_samples_of_a_control_set_set_no_threshold() -> None:
    """Else the threshold lies above the positives, and nothing is ever flagged."""
    plant("s/held", HALF, seed=3, gap=3.0)
    plant("s/mixed", [0, 1] * 100, seed=2, gap=3.0)
    plant("s/train", HALF, seed=1, gap=3.0)
    made = train(control="s/mixed", held_out=["s/held"])
    threshold, alarm, token = made.probe.card.thresholds
    assert (alarm.statistic.over, alarm.n_control) == ("alarm", threshold.n_control)
    # A third of the negatives took part in choosing the layer, and sets no threshold.
    assert (threshold.n_control, threshold.n_left_out) == (67, 100)
    assert made.evaluations[0].recall > 0.9
    assert any("67 mixed (100 positive ones left out) above it" in line for line in made.lines())
    assert "(100 positive ones left out)" in Path("p/card.md").read_text()
    assert made.probe.card.seen.count("control") == 100
    plant("s/again", [0, 0, 1] * 50, seed=7, gap=3.0)
    command("calibrate", "p", "--out", "q", "--control", "s/again", "--fpr", 0.05)
    threshold, *kept = load_probe("q").card.thresholds
    assert (threshold.n_control, threshold.n_left_out) == (100, 50)
    assert kept == [alarm, token], (
        "another statistic keeps its threshold, and what set it stays known"
    )
    assert load_probe("q").card.seen.count("control") == 200
    plant("s/lies", [1] * 100, seed=8)
    with pytest.raises(SpecError, match="lies: all 100 samples are positive"):
        train(control="s/lies")


def test_folders_of_one_name_are_not_taken_for_one_another(monkeypatch: Any) -> None:
    """The bag of words would learn the words of the test set, and reach an area of 1."""
    plant("s/r1/acts", HALF, seed=1, say=lambda i: ("truth", "lie")[i % 2])
    plant("s/r2/acts", HALF, seed=2, say=lambda i: ("banana", "kiwi")[i % 2])
    monkeypatch.setattr(MeanDifferenceProbe, "fit", lambda *_: pytest.fail("it was fitted"))
    for use in ({"held_out": ["s/r2/acts"]}, {"control": "s/r2/acts"}, {"selection": "s/r2/acts"}):
        with pytest.raises(SpecError, match="acts: the name of 2 of the training, selection"):
            train(train="s/r1/acts", **use)


def test_baselines_read_the_words_of_their_own_set() -> None:
    plant("s/r1/acts", HALF, seed=1, say=lambda i: ("truth", "lie")[i % 2])
    plant("s/r2/test", HALF, seed=2, say=lambda i: ("banana", "kiwi")[i % 2])
    made = train(train="s/r1/acts", held_out=["s/r2/test"])
    assert {b.name: b.auroc for b in made.evaluations[0].baselines}["bag of words (answer)"] == 0.5
    fit, held = (ActivationSet.from_store(s, name="acts") for s in ("s/r1/acts", "s/r2/test"))
    texts = {"answer": {"acts": held.columns["completion"]}}
    with pytest.raises(SpecError, match="allowed are unique names"):
        measure_baselines(made.probe, fit, [held], texts=texts)


def test_a_large_store_is_read_from_disk_and_gives_the_same_probe(tmp_path: Path) -> None:
    small = train(out="small")
    large = train(out="large", memory=2e-5, work="fits")
    assert large.probe.card.thresholds[0].n_above == small.probe.card.thresholds[0].n_above
    np.testing.assert_allclose(large.probe.weight, small.probe.weight, rtol=1e-4, atol=1e-6)
    assert list(Path("fits").glob("train-*.safetensors"))
    found = [command("sweep", "--train", "s/train", "--memory", gb)["sweep"] for gb in (4.0, 2e-5)]
    assert [row["auroc"] for row in found[0]] == pytest.approx([r["auroc"] for r in found[1]])


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("lr", {}), ("lr-pressure", {}), ("mean-difference", {}), ("mass-mean-iid", {}),
        ("lda-ridge", {}), ("lat", {}), ("attention-lite", {"steps": 20}),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:memory=.*reads rows piece by piece:UserWarning")
def test_these_methods_train_in_little_memory(family: str, settings: dict[str, Any]) -> None:
    how = {"family": family, "settings": settings, "rows": "", "allow_few": True}
    # 20 kB, where one layer takes 8 and stores are held with four copies.
    made = [train(out=f"p{memory}", memory=memory, **how) for memory in (4.0, 2e-5)]
    small, large = (load_probe(one.folder) for one in made)
    assert large.layers == small.layers
    scores = [ActivationSet.from_store("s/control").scores(probe) for probe in (small, large)]
    np.testing.assert_allclose(scores[1], scores[0], atol=5e-3 * np.abs(scores[0]).max())


def test_another_method_says_how_much_memory_it_needs() -> None:
    with pytest.raises(SpecError, match=r"LDAProbe is fitted on all 180 rows .*\(memory=\)"):
        train(family="lda", rows="", memory=2e-5, allow_few=True)


def test_a_saved_set_is_read_as_a_store_is() -> None:
    plant("s/test", HALF, seed=3)
    files = {}
    for name in ("train", "control", "test"):
        data = ActivationSet.from_store(f"s/{name}", name=name)
        files[name] = str(data.save(f"sets/{name}.safetensors"))
    stores = train(held_out=["s/test"])
    saved = train(out="q", train=files["train"], control=files["control"], held_out=[files["test"]])
    np.testing.assert_array_equal(saved.probe.weight, stores.probe.weight)
    assert saved.probe.threshold.value == stores.probe.threshold.value
    assert [e.name for e in saved.evaluations] == ["test"]
    assert saved.probe.card.model == stores.probe.card.model
    assert evaluate(files["test"])["auroc"] == stores.evaluations[0].auroc
    with pytest.raises(SpecError, match="layer 77 is not in it"):
        train(out="r", train=files["train"], layers=[77])


def test_what_was_warned_of_is_told_where_training_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        warnings.warn("it needs much memory", UserWarning, stacklevel=2)
        raise SpecError("a failed fit")

    monkeypatch.setattr(_jobs, "train_probe", fails)
    with (
        pytest.warns(UserWarning, match="much memory"),
        pytest.raises(SpecError, match="a failed fit"),
    ):
        train()
