from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inspect_lens.data import (
    MANIFEST,
    ActivationStore,
    Captured,
    SampleRecord,
    encode_shard,
    write_whole,
)
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe import ProbeCard
from inspect_lens.spec import TensorData
from inspect_lens.train import ActivationSet, fit_on, make_estimator, train_probe
from tests.kit.planted_store import plant


def captured(i: int, *, rows: int, label: bool | None = True) -> Captured:
    acts = np.full((2, rows, 4), i, dtype=np.float16)
    record = SampleRecord(
        index=i, id=f"s{i}", label=label, group=f"g{i}", n_rows=rows, n_prompt=1,
        completion=f"text {i}", prompt=f"say {i}",
        columns={"topic": "t", **({"odd": "1"} if i % 2 else {})},
    )  # fmt: skip
    return Captured(
        record=record, acts=TensorData(acts, "float16") if rows else None,
        layers=(3, 5) if rows else (), positions=tuple(range(1, rows + 1)),
        token_ids=tuple(range(rows + 2)),
    )  # fmt: skip


def store(folder: Path, samples: list[Captured]) -> ActivationStore:
    content = encode_shard(samples)
    write_whole(f"{folder}/shard-00000.safetensors", content)
    manifest = {
        "format": "inspect_lens.activation_store/1", "layers": [3, 5], "hidden": 4,
        "dtype": "float16", "n_samples": len(samples), "n_rows": 9,
        "model": {"name": "m", "sha256": None}, "dataset": {"name": "toy"},
        "shards": [{"file": "shard-00000.safetensors",
                    "sha256": hashlib.sha256(content).hexdigest()}],
    }  # fmt: skip
    write_whole(f"{folder}/{MANIFEST}", json.dumps(manifest).encode())
    return ActivationStore.open(folder)


def test_a_store_becomes_a_set_without_what_cannot_be_used(tmp_path: Path) -> None:
    samples = [
        captured(0, rows=2), captured(1, rows=3, label=False), captured(2, rows=0),
        captured(3, rows=4, label=None),
    ]  # fmt: skip
    data = ActivationSet.from_store(store(tmp_path, samples), name="mine")
    assert (data.name, data.ids, data.layers, data.hidden) == ("mine", ("s0", "s1"), (3, 5), 4)
    assert data.labels.tolist() == [True, False]
    assert [s.shape for s in data.sequences(5)] == [(2, 4), (3, 4)]
    assert data.columns["completion"] == ("text 0", "text 1")
    assert data.columns["prompt_text"] == ("say 0", "say 1")
    assert set(data.columns) == {"topic", "completion", "prompt_text"}, "what all samples have"
    assert float(data.sequences(3)[1][0, 0]) == 1.0
    other = ActivationSet.from_store(ActivationStore.open(tmp_path), layers=[5])
    assert other.layers == (5,)
    for one, whole in zip(other.acts, data.acts, strict=True):
        np.testing.assert_array_equal(one, whole[1:])
    with pytest.raises(SpecError, match=r"layers=\[5, 4\]: .* holds \[3, 5\]"):
        ActivationSet.from_store(ActivationStore.open(tmp_path), layers=[5, 4])


def test_a_damaged_or_unusable_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="rows and a label"):
        ActivationSet.from_store(store(tmp_path / "a", [captured(0, rows=2, label=None)]))
    made = store(tmp_path / "b", [captured(0, rows=2)])
    file = tmp_path / "b" / "shard-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ArtifactError, match="another hash"):
        list(made.samples())
    whole = file.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    file.write_bytes(whole[: start + 20])
    with pytest.raises(ArtifactError, match="ends within the activations"):
        list(made.rows(5))
    file.write_bytes((2).to_bytes(8, "little") + b"{}")
    for read in (made.records, lambda: made.rows(5)):
        with pytest.raises(ArtifactError, match="not a shard"):
            list(read())
    file.write_bytes(b"\xff" * 64)
    with pytest.raises(ArtifactError, match="not a shard"):
        list(made.records())
    with pytest.raises(ArtifactError, match="another hash"):
        made.verify()
    (tmp_path / "b" / MANIFEST).write_text('{"format": "x"}')
    with pytest.raises(ArtifactError, match="not a manifest"):
        ActivationStore.open(tmp_path / "b")


def test_a_layer_that_was_not_captured_is_refused(tmp_path: Path) -> None:
    made = store(tmp_path, [captured(0, rows=2), captured(1, rows=3)])
    rows = [x for x, _ in made.rows(5, size=2)]
    assert [len(x) for x in rows] == [2, 2, 1]
    with pytest.raises(ArtifactError, match="layer 4 was not captured"):
        list(made.rows(4))


@pytest.mark.parametrize("held", [(3,), (5, 7), (5, 3)])
def test_a_shard_of_other_layers_is_refused_by_name(tmp_path: Path, held: tuple[int, ...]) -> None:
    """Layer 5 was then read from the second place of the stack, whatever is there."""
    rows = np.full((len(held), 2, 4), 1.0, dtype=np.float16)
    other = replace(captured(0, rows=2), layers=held, acts=TensorData(rows, "float16"))
    made = store(tmp_path / "other", [other])
    for layers in (None, [5]):
        with pytest.raises(ArtifactError, match=r"shard-00000.*manifest says \[3, 5\] of width 4"):
            ActivationSet.from_store(made, layers=layers)


def test_memory_is_that_of_the_rows_and_of_a_shard(tmp_path: Path) -> None:
    import hashlib
    import json
    import tracemalloc

    rng, shards, rows, hidden = np.random.default_rng(0), [], 500, 256
    expected = []
    for k in range(12):
        acts = rng.normal(size=(2, rows, hidden)).astype(np.float16)
        expected.append(acts)
        sample = replace(
            captured(k, rows=rows), acts=TensorData(acts, "float16"), token_ids=(1,) * (rows + 2)
        )
        content = encode_shard([sample])
        write_whole(f"{tmp_path}/shard-{k:05d}.safetensors", content)
        shards.append(
            {"file": f"shard-{k:05d}.safetensors", "sha256": hashlib.sha256(content).hexdigest()}
        )
    manifest = {
        "format": "inspect_lens.activation_store/1", "layers": [3, 5], "hidden": hidden,
        "dtype": "float16", "n_samples": 12, "n_rows": 12 * rows,
        "model": {"name": "m", "sha256": None}, "dataset": {"name": "toy"}, "shards": shards,
    }  # fmt: skip
    write_whole(f"{tmp_path}/{MANIFEST}", json.dumps(manifest).encode())
    tracemalloc.start()
    data = ActivationSet.from_store(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size, shard = 12 * 2 * rows * hidden * 4, 2 * rows * hidden * 2
    assert peak < size + 6 * shard, "the whole store in float16 is 12 shards more"
    for one, other in zip(data.acts, expected, strict=True):
        np.testing.assert_array_equal(one, other.astype(np.float32))


def test_sentence_ends_make_sentence_mean_max_a_probes_own_pool(tmp_path: Path) -> None:
    words = ["<user>", "Say", " it", ".", " Yes", ".", " No", " way", "!", "\n"]
    labels, samples = [True, False] * 6, []
    rng = np.random.default_rng(0)
    for i, label in enumerate(labels):
        # A lie is in the second sentence only; its tokens are 6, 7 and 8.
        acts = rng.normal(size=(2, 5, 4)).astype(np.float32) * 0.1
        acts[1, 2:, 0] += 4.0 * label
        sample = captured(i, rows=5, label=label)
        samples.append(
            replace(
                sample,
                acts=TensorData(acts, "float32"),
                positions=(4, 5, 6, 7, 8),
                token_ids=tuple(range(10)),
                record=replace(sample.record, n_prompt=4),
            )
        )
    opened = store(tmp_path, samples)
    data = ActivationSet.from_store(opened, pieces=lambda ids: [words[t] for t in ids])
    assert [e.tolist() for e in data.ends[:1]] == [[False, True, False, False, True]]
    card = ProbeCard(name="t/p", layers=(5,), hidden=4, pool="sentence_mean_max")
    for family in ("mean-difference", "mlp"):
        fitted = fit_on(make_estimator(family), data, 5).to_probe(card)
        assert fitted.pool == "sentence_mean_max"
        scores = data.scores(fitted)
        for value, acts in zip(scores, data.acts, strict=True):
            tokens = fitted.score_tokens(acts, data.layers)
            assert value == pytest.approx(max(tokens[:2].mean(), tokens[2:].mean()), abs=1e-12)
    kept = data.subset([3, 0])
    assert ActivationSet.load(kept.save(tmp_path / "x")).scores(fitted) == pytest.approx(
        scores[[3, 0]]
    )
    masked = replace(data, mask=tuple(np.array([0, 0, 1, 1, 1], dtype=bool) for _ in labels))
    token = fitted.score_tokens(data.acts[0], data.layers)
    assert masked.scores(fitted)[0] == pytest.approx(token[2:].mean())
    with pytest.raises(SpecError, match="has no sentence ends"):
        ActivationSet.from_store(opened).scores(fitted)
    with pytest.raises(SpecError, match="1 texts for 10 tokens"):
        ActivationSet.from_store(opened, pieces=lambda _: ["x"])
    with pytest.raises(SpecError, match=r"ends\[0\]"):
        replace(data, ends=tuple(e[1:] for e in data.ends))


def test_contents_are_those_of_all_samples_or_none(tmp_path: Path) -> None:
    samples = [captured(i, rows=2, label=bool(i % 2)) for i in range(3)]
    known = [replace(s, record=replace(s.record, content=f"c{i}")) for i, s in enumerate(samples)]
    assert ActivationSet.from_store(store(tmp_path / "a", known)).contents == ("c0", "c1", "c2")
    old = store(tmp_path / "b", [*known[:2], samples[2]])
    assert ActivationSet.from_store(old).contents == ()


def test_a_set_knows_which_tokens_of_which_weights_it_holds(tmp_path: Path) -> None:
    data = ActivationSet.from_store(plant(tmp_path / "s", [0, 1] * 3, seed=1, positions=[-1, 0]))
    assert (data.positions, data.raw, data.model_sha256) == ((-1, 0), False, "a" * 64)
    loaded = ActivationSet.load(data.subset([0, 1]).save(tmp_path / "x"))
    assert (loaded.positions, loaded.raw, loaded.model_sha256) == ((-1, 0), False, "a" * 64)
    text = ActivationSet.from_store(plant(tmp_path / "t", [0, 1], seed=1, raw=True))
    assert (text.positions, text.raw) == ("completion", True)
    assert text.reads("prompt")
    assert not text.reads("all")
    unknown = replace(data, positions=None, model_sha256=None)
    assert unknown.reads("all")
    assert data.reads(None)
    # Cards name sets by their hash, which does not depend on what older releases did not know.
    assert unknown.sha256 == data.sha256
    older = ActivationSet.load(unknown.save(tmp_path / "old"))
    assert (older.positions, older.model_sha256) == (None, None)
    older.save(tmp_path / "again")
    assert hashlib.sha256((tmp_path / "again").read_bytes()).hexdigest() == unknown.sha256
    file = replace(data, positions="nowhere").save(tmp_path / "bad")  # type: ignore[arg-type]
    with pytest.raises(ArtifactError, match="positions='nowhere'"):
        ActivationSet.load(file)


def test_a_probe_reads_the_positions_of_its_training_set(tmp_path: Path) -> None:
    sets = [
        ActivationSet.from_store(plant(tmp_path / n, [0, 1] * 40, seed=i, positions="prompt"))
        for i, n in enumerate(("train", "control"))
    ]
    card = train_probe(make_estimator("lda"), sets[0], name="t/p", control=sets[1], fpr=0.1).card
    assert card.positions == "prompt"
    assert card.model is not None
    assert card.model.sha256 == "a" * 64


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden": "wide"}, "not a manifest of activations .*hidden='wide'"),
        ({"hidden": 1 << 40}, "not a manifest of activations .*hidden=1099511627776"),
        ({"layers": 3}, "not a manifest of activations .*layers=3"),
        ({"n_samples": None}, "not a manifest of activations .*n_samples=None"),
        ({"shards": [{"file": "a"}]}, r"not a manifest of activations .*shards\[0\].sha256"),
        ({"model": [1]}, "not a manifest of activations .*model="),
        ({"dataset": {}}, "says no 'name', only "),
        ({"model": {"sha256": "0"}}, "says no 'name', only "),
    ],
)
def test_what_a_manifest_says_is_judged(tmp_path: Path, change: Any, said: str) -> None:
    """Each was an error of Python's own, or memory for rows that are not there."""
    store(tmp_path, [captured(0, rows=2)])
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(manifest | change))
    with pytest.raises(ArtifactError, match=said):
        ActivationSet.from_store(tmp_path)
    without = {k: v for k, v in manifest.items() if k not in change}
    (tmp_path / MANIFEST).write_text(json.dumps(without))
    with pytest.raises(ArtifactError, match=r"not a manifest|says no"):
        ActivationSet.from_store(tmp_path)
