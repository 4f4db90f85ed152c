from __future__ import annotations

import hashlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from inspect_ai._util.registry import registry_params
from inspect_ai.scorer import Scorer, scorer

from inspect_lens._base import artifact
from inspect_lens.errors import ArtifactError
from inspect_lens.probe import (
    Evaluation,
    Interval,
    ModelRef,
    Probe,
    ProbeCard,
    Threshold,
    TrainingFacts,
    check_model,
    fingerprint_model,
    load_probe,
    register_probe_dir,
    write_atomic,
)
from inspect_lens.probe.kinds import _load as load_module

H = 8
INTERVAL = Interval(low=0.1, high=0.2, method="m")


def make(name: str = "tiny/test", *, seed: int = 0, **card: object) -> Probe:
    rng = np.random.default_rng(seed)
    return Probe(
        weight=rng.normal(size=(2, H)),
        bias=rng.normal(size=2),
        mean=rng.normal(size=(2, H)),
        scale=rng.uniform(0.5, 2, size=(2, H)),
        card=ProbeCard(
            name=name,
            layers=(1, 3),
            hidden=H,
            created=datetime(2026, 1, 2, tzinfo=UTC),
            **{
                "model": ModelRef(name="tiny"),
                "thresholds": (
                    Threshold(
                        value=0.1 + 0.2, fpr=0.01, control="control", n_control=300, n_above=2,
                        interval=INTERVAL,
                    ),
                ),
                **card,
            },
        ),
    )  # fmt: skip


def test_save_then_load_is_bit_equal(tmp_path: Path) -> None:
    probe = make()
    folder = probe.save(tmp_path / "tiny" / "test")
    loaded = Probe.load(folder)
    for name in ("weight", "bias", "mean", "scale"):
        assert getattr(loaded, name).tobytes() == getattr(probe, name).tobytes()
    assert loaded.card == probe.card
    assert loaded.sha256 == probe.sha256
    assert loaded.path == folder
    assert Probe.load(folder / "probe.safetensors").sha256 == probe.sha256
    x = np.random.default_rng(2).normal(size=(2, 5, H)).astype(np.float32)
    assert loaded.score(x) == probe.score(x)


def test_the_hash_is_that_of_the_file(tmp_path: Path) -> None:
    probe = make()
    content = (probe.save(tmp_path / "p") / "probe.safetensors").read_bytes()
    assert hashlib.sha256(content).hexdigest() == probe.sha256
    assert make().sha256 == probe.sha256
    assert make(seed=1).sha256 != probe.sha256
    assert make(pool="max").sha256 != probe.sha256
    assert make(description="other words").sha256 == probe.sha256


def test_saving_again_replaces_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    make().save(tmp_path)
    make(seed=1).save(tmp_path)
    assert Probe.load(tmp_path).sha256 == make(seed=1).sha256
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "card.json", "card.md", "probe.safetensors"
    ]  # fmt: skip


def test_a_crash_between_the_files_is_noticed(tmp_path: Path) -> None:
    make().save(tmp_path)
    other = make(seed=1)
    write_atomic(tmp_path / "probe.safetensors", other.to_bytes())
    with pytest.raises(ArtifactError, match="damaged or replaced"):
        Probe.load(tmp_path)


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f"
    write_atomic(file, b"old")

    def fail(fd: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(file, b"new")
    assert file.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("at", [0, 20, -1])
def test_a_damaged_tensor_file_is_refused(tmp_path: Path, at: int) -> None:
    file = make().save(tmp_path) / "probe.safetensors"
    content = bytearray(file.read_bytes())
    content[at] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match="sha256"):
        Probe.load(tmp_path)


def _edit(folder: Path, change: dict[str, object]) -> None:
    file = folder / "card.json"
    stored = json.loads(file.read_text())
    stored["card"].update(change)
    file.write_text(json.dumps(stored))


@pytest.mark.parametrize(
    "change",
    [{"layers": [1, 4]}, {"pool": "max"}, {"positions": "all"}, {"thresholds": []},
     {"model": {"name": "other", "sha256": None, "revision": None}}],
)  # fmt: skip
def test_an_edit_of_what_decides_a_score_is_refused(
    tmp_path: Path, change: dict[str, object]
) -> None:
    make().save(tmp_path)
    _edit(tmp_path, change)
    with pytest.raises(ArtifactError, match="both have to agree"):
        Probe.load(tmp_path)


def test_words_of_the_card_may_be_edited(tmp_path: Path) -> None:
    make().save(tmp_path)
    _edit(tmp_path, {"notes": ["checked by hand"]})
    assert Probe.load(tmp_path).card.notes == ("checked by hand",)


def test_files_that_are_no_probe_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be read as a probe"):
        Probe.load(tmp_path / "nothing")
    make().save(tmp_path)
    (tmp_path / "card.json").write_text("{")
    with pytest.raises(ArtifactError, match="not a card"):
        Probe.load(tmp_path)
    (tmp_path / "card.json").write_text(json.dumps({"format": "inspect_lens.probe/9"}))
    with pytest.raises(ArtifactError, match="newer one"):
        Probe.load(tmp_path)
    (tmp_path / "card.json").unlink()
    with pytest.raises(ArtifactError, match=r"card\.json"):
        Probe.load(tmp_path)


def test_a_card_with_unknown_fields_is_of_another_version(tmp_path: Path) -> None:
    make().save(tmp_path)
    _edit(tmp_path, {"colour": "blue"})
    with pytest.raises(ArtifactError, match=r"\(colour\), so another version"):
        Probe.load(tmp_path)
    _edit(tmp_path, {"layers": "none"})
    with pytest.raises(ArtifactError, match="not a card"):
        Probe.load(tmp_path)


def test_the_rendered_card_shows_the_facts(tmp_path: Path) -> None:
    probe = make(
        method="difference | of means",
        training=TrainingFacts(
            dataset="d", sha256="e" * 64, n_positive=3, n_negative=4, n_tokens=50, n_groups=5
        ),
        evaluations=(
            Evaluation(
                name="held", sha256="f" * 64, n_positive=3, n_negative=4, disjoint_by="entity",
                auroc=0.987, auroc_interval=INTERVAL,
            ),
        ),
    )  # fmt: skip
    text = (probe.save(tmp_path) / "card.md").read_text()
    for part in ("# tiny/test", probe.sha256, "difference \\| of means", "entity",
                 "0.987 [0.100, 0.200]", "2 of 300", "n/a"):  # fmt: skip
        assert part in text


def test_names_are_found_above_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("tiny/one").save(tmp_path / "probes" / "tiny" / "one")
    deep = tmp_path / "evals" / "task"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    assert load_probe("tiny/one").name == "tiny/one"
    assert load_probe("one").name == "tiny/one"
    assert load_probe(Path("tiny/one")).name == "tiny/one"
    assert load_probe("probes/tiny/one").name == "tiny/one"
    make("big/one").save(tmp_path / "probes" / "big" / "one")
    with pytest.raises(ArtifactError, match="ambiguous"):
        load_probe("one")
    with pytest.raises(ArtifactError, match="was not found"):
        load_probe("tiny/two")
    with pytest.raises(ArtifactError, match="was not found"):
        load_probe("../probes/tiny/none")


def test_where_no_folder_has_probes_the_error_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_module, "_registered", [])
    monkeypatch.setattr(artifact, "shipped_root", lambda: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError, match=r"a name below probes/ \(there is no such folder"):
        load_probe("my/lies")


def test_registered_folders_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "_registered", [])
    monkeypatch.chdir(tmp_path)
    make("t/p").save(tmp_path / "probes" / "t" / "p")
    make("t/p", seed=1).save(tmp_path / "shipped" / "t" / "p")
    register_probe_dir(tmp_path / "shipped")
    assert load_probe("t/p").sha256 == make("t/p", seed=1).sha256


def test_a_probe_passes_through_and_other_things_are_refused() -> None:
    probe = make()
    assert load_probe(probe) is probe
    with pytest.raises(ArtifactError, match="never saved"):
        load_probe({"name": "x", "sha256": "y"})  # type: ignore[arg-type]


def test_inspect_logs_a_saved_probe_by_its_path(tmp_path: Path) -> None:
    @scorer(metrics=[])
    def uses(probe: object) -> Scorer:
        async def score(state: object, target: object) -> None:
            return None

        return score  # type: ignore[return-value]

    probe = make()
    loaded = Probe.load(probe.save(tmp_path))
    assert registry_params(uses(loaded)) == {"probe": str(tmp_path)}
    assert registry_params(uses(probe))["probe"] == {"name": probe.name, "sha256": probe.sha256}


def _checkpoint(folder: Path, *, seed: int = 0, size: int = 400_000) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    header = b"{}      "
    body = np.random.default_rng(seed).bytes(size)
    content = len(header).to_bytes(8, "little") + header + body
    (folder / "model.safetensors").write_bytes(content)
    return folder


@pytest.mark.parametrize("size", [100, 400_000])
def test_fingerprint_tells_checkpoints_apart(tmp_path: Path, size: int) -> None:
    a = _checkpoint(tmp_path / "a", size=size)
    b = _checkpoint(tmp_path / "b", size=size)
    c = _checkpoint(tmp_path / "c", seed=1, size=size)
    assert fingerprint_model(a) == fingerprint_model(b) != fingerprint_model(c)
    assert fingerprint_model(tmp_path) is None
    assert fingerprint_model("meta-llama/not-here") is None


def test_a_probe_of_another_model_is_refused(tmp_path: Path) -> None:
    a, c = _checkpoint(tmp_path / "a"), _checkpoint(tmp_path / "c", seed=1)
    probe = make(model=ModelRef(name="a", sha256=fingerprint_model(a)))
    assert check_model(probe, str(a)) is True
    assert check_model(probe, "somewhere/else") is False
    assert check_model(make(), str(a)) is False
    with pytest.raises(ArtifactError, match="trained on 'a'"):
        check_model(probe, str(c))
