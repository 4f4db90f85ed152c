"""A store that stays on disk gives what it gives in memory, and reads one layer at a time."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens.data import (
    MANIFEST,
    STORE_FORMAT,
    ActivationStore,
    Captured,
    SampleRecord,
    encode_shard,
    write_whole,
)
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe import Probe, ProbeCard
from inspect_lens.spec import TensorData
from inspect_lens.train import (
    ActivationSet,
    EnsembleProbe,
    LATProbe,
    LDAProbe,
    LogisticProbe,
    MeanDifferenceProbe,
    StoreSet,
    fit_on,
    make_estimator,
    select_layer,
    split_by_group,
    train_probe,
)

H, LAYERS = 8, (2, 4, 7)


def plant(
    folder: Path, n: int, *, seed: int, shard: int = 7, dtype: str = "float32", tokens: int = 4
) -> str:
    """Shards of samples of 1 to `tokens` rows; some without rows, some without a label."""
    rng, shards = np.random.default_rng(seed), []
    for first in range(0, n, shard):
        samples = []
        for i in range(first, min(first + shard, n)):
            label = bool(i % 2)
            n_rows = 0 if i % 11 == 5 else 1 + i % tokens
            acts = rng.normal(size=(len(LAYERS), n_rows, H)).astype(np.float32)
            acts[1, :, 0] += 2.0 * label
            stored: Any = TensorData(acts, "float32")
            if dtype == "bfloat16":
                bits = torch.from_numpy(acts).bfloat16().view(torch.int16).numpy()
                stored = TensorData(bits.view(np.uint16), "bfloat16")
            record = SampleRecord(
                index=i, id=f"{folder.name}-{i}", label=None if i % 13 == 7 else label,
                group=f"{folder.name}-{i // 2}", n_rows=n_rows, n_prompt=2, completion="so",
                columns={"topic": str(i % 3)}, prompt="Is it?",
                content=hashlib.sha256(f"{folder.name}-{i}".encode()).hexdigest()[:24],
            )  # fmt: skip
            samples.append(
                Captured(
                    record=record, acts=stored if n_rows else None,
                    layers=LAYERS if n_rows else (), positions=tuple(range(2, 2 + n_rows)),
                    token_ids=tuple(range(3 + n_rows)),
                )
            )  # fmt: skip
        content = encode_shard(samples)
        name = f"shard-{first // shard:05d}.safetensors"
        write_whole(f"{folder}/{name}", content)
        shards.append({
            "file": name, "sha256": hashlib.sha256(content).hexdigest(),
            "n_samples": len(samples), "n_rows": sum(s.record.n_rows for s in samples),
        })  # fmt: skip
    manifest = {
        "format": STORE_FORMAT, "model": {"name": "m", "sha256": "a" * 64},
        "dataset": {"name": folder.name, "on_policy": True, "label_meaning": "planted",
                    "text_overlap_group": folder.name},
        "request": {"layers": list(LAYERS), "positions": "completion"}, "layers": list(LAYERS),
        "hidden": H, "dtype": dtype, "n_empty": 0, "n_samples": n, "shards": shards,
        "n_rows": sum(s["n_rows"] for s in shards),
    }  # fmt: skip
    write_whole(f"{folder}/{MANIFEST}", json.dumps(manifest).encode())
    return str(folder)


def same(large: ActivationSet, small: ActivationSet) -> None:
    assert isinstance(large, StoreSet)
    for field in ("name", "model", "layers", "groups", "ids", "columns", "contents", "positions",
                  "raw", "model_sha256", "hidden", "n_positive"):  # fmt: skip
        assert getattr(large, field) == getattr(small, field), field
    assert len(large) == len(small)
    for ours, theirs in zip(large.mask, small.mask, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(large.acts, small.acts, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for layer in LAYERS:
        for ours, theirs in zip(large.rows(layer), small.rows(layer), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        for kind in ("mean", "last"):
            np.testing.assert_array_equal(large.pooled(layer, kind), small.pooled(layer, kind))
        pieces = list(large.passes(layer))
        order = sorted(range(len(large)), key=lambda i: large.places[i])
        expected = np.concatenate([small.sequences(layer)[i] for i in order])
        np.testing.assert_array_equal(np.concatenate([x for _, x in pieces]), expected)
        places = np.concatenate([index for index, _ in pieces])
        np.testing.assert_array_equal(small.rows(layer)[0][places], expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_the_set_that_memory_would_hold(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = plant(tmp_path / "s", 60, seed=0, dtype=dtype)
    small = ActivationSet.from_store(store)
    # Samples that straddle two pieces, too.
    monkeypatch.setattr("inspect_lens.train.sets._store_set._ROWS", 5)
    large = StoreSet(store)
    same(large, small)
    picks = np.random.default_rng(0).permutation(len(small))[:23]
    same(large.subset(picks, name="part"), small.subset(picks, name="part"))
    for ours, theirs in zip(split_by_group(large), split_by_group(small), strict=True):
        same(ours, theirs)
    assert large.negatives().ids == small.negatives().ids
    assert large.shown("activations", (4,)) == small.shown("activations", (4,))
    assert large.sha256 == StoreSet(store).sha256 != large.subset(picks).sha256


def probes(data: ActivationSet) -> list[Any]:
    one = ProbeCard(name="m/p", layers=(4,), hidden=H)
    made = [
        fit_on(family, data, 4, rows=rows).to_probe(one)
        for family, rows in (
            (LogisticProbe(), "tokens"), (MeanDifferenceProbe(), "mean"), (LATProbe(), "tokens"),
            (LDAProbe(shrinkage="ridge"), "tokens"), (LogisticProbe(), "last"),
        )
    ]  # fmt: skip
    ensemble = EnsembleProbe(base=MeanDifferenceProbe(), n_layers=2)
    two = ProbeCard(name="m/e", layers=(2, 7), hidden=H)
    return [*made, fit_on(ensemble, data, (2, 7)).to_probe(two)]


def test_probes_fitted_from_disk_score_as_those_fitted_in_memory(tmp_path: Path) -> None:
    store = plant(tmp_path / "s", 120, seed=0)
    small, large = ActivationSet.from_store(store), StoreSet(store)
    for ours, theirs in zip(probes(large), probes(small), strict=True):
        np.testing.assert_allclose(large.scores(ours), small.scores(theirs), atol=2e-3)
        np.testing.assert_allclose(large.scores(theirs), small.scores(theirs), rtol=1e-12)


def test_a_probe_is_trained_from_disk_alone(tmp_path: Path) -> None:
    stores = {n: plant(tmp_path / n, k, seed=i) for i, (n, k) in enumerate(
        {"train": 160, "control": 500, "test": 90}.items())}  # fmt: skip
    made = {}
    for kind in (StoreSet, ActivationSet.from_store):
        train, control, test = (kind(store) for store in stores.values())
        made[kind] = train_probe(
            MeanDifferenceProbe(), train, name="m/p", control=control, held_out=[test], fpr=0.05,
        )  # fmt: skip
    ours, theirs = made.values()
    assert isinstance(ours, Probe)
    assert isinstance(theirs, Probe)
    np.testing.assert_allclose(ours.weight, theirs.weight, rtol=1e-4, atol=1e-6)
    assert ours.layers == (4,)
    assert ours.card.evaluations[0].auroc == theirs.card.evaluations[0].auroc
    assert ours.card.seen == theirs.card.seen
    head = fit_on(make_estimator("attention-lite", steps=20), StoreSet(stores["train"]), 4)
    assert len(StoreSet(stores["test"]).scores(head.to_probe(
        ProbeCard(name="m/h", layers=(4,), hidden=H))))  # fmt: skip


def test_a_sweep_goes_on_at_the_layer_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = plant(tmp_path / "train", 80, seed=0)
    test = ActivationSet.from_store(plant(tmp_path / "test", 80, seed=1))
    card = ProbeCard(name="m/p", layers=(2,), hidden=H)
    read: list[int] = []
    original = StoreSet.passes

    def counted(self: StoreSet, layer: int) -> Any:
        read.extend([layer] if layer not in read else [])  # once per step
        if len(read) == limit:
            raise KeyboardInterrupt
        return original(self, layer)

    monkeypatch.setattr(StoreSet, "passes", counted)
    limit = 3
    with pytest.raises(KeyboardInterrupt):
        select_layer(LogisticProbe(), StoreSet(train, work=tmp_path / "w"), test, card=card)
    assert read == [2, 4, 7]
    limit, read[:] = -1, []
    found = select_layer(LogisticProbe(), StoreSet(train, work=tmp_path / "w"), test, card=card)
    assert read == [7]
    read[:] = []
    again = select_layer(LogisticProbe(), StoreSet(train), test, card=card)
    assert read == [2, 4, 7]
    assert found.probe.sha256 == again.probe.sha256
    # Other settings, and other samples, are another fit.
    read[:] = []
    fit_on(LogisticProbe(C=0.5), StoreSet(train, work=tmp_path / "w"), 2)
    assert read == [2]
    read[:] = []
    fit_on(LogisticProbe(), StoreSet(train, work=tmp_path / "w").subset(range(20)), 2)
    assert read == [2]
    # And a damaged file is made again.
    for file in (tmp_path / "w").iterdir():
        file.write_bytes(b"no")
    read[:] = []
    fit_on(LogisticProbe(), StoreSet(train, work=tmp_path / "w"), 2)
    assert read == [2]


def test_memory_is_that_of_a_shard_and_a_layer(tmp_path: Path) -> None:
    store = plant(tmp_path / "s", 600, seed=0, shard=20, tokens=40)
    layer = ActivationStore.open(store).n_rows * H * 4
    large = StoreSet(store, memory=0.0)
    probe = fit_on(MeanDifferenceProbe(), large, 4).to_probe(
        ProbeCard(name="m/p", layers=(4,), hidden=H)
    )
    large.scores(probe)  # what is imported and cached on the way
    tracemalloc.start()
    fit_on(MeanDifferenceProbe(), large, 4)
    large.scores(probe)
    large.pooled(4, "mean")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 0.6 * layer, (peak, layer)


@pytest.mark.parametrize("on_policy", [True, False])
def test_sampling_is_that_of_answers_the_model_wrote(on_policy: bool, tmp_path: Path) -> None:
    folder = Path(plant(tmp_path / "s", 40, seed=0))
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["dataset"]["on_policy"] = on_policy
    manifest["request"] |= {"temperature": 0.7, "max_tokens": 9, "seed": 3}
    # Another release may tell more.
    manifest["computed_with"] = {"engine": "vllm 1.0", "dtype": "bfloat16", "colour": "blue"}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    for made in (ActivationSet.from_store(folder), StoreSet(folder)):
        assert made.capture is not None
        assert (made.capture.engine, made.capture.dtype) == ("vllm 1.0", "bfloat16")
        sampling = (made.capture.temperature, made.capture.max_tokens, made.capture.seed)
        assert sampling == ((0.7, 9, 3) if on_policy else (None, None, None))


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    store = plant(tmp_path / "s", 40, seed=0)
    with pytest.raises(SpecError, match="holds"):
        StoreSet(store, layers=[3])
    large = StoreSet(store, layers=[2, 4])
    with pytest.raises(SpecError, match="layer=7"):
        large.rows(7)
    with pytest.raises(SpecError, match="named twice"):
        large.subset([1, 1])
    (tmp_path / "s/shard-00001.safetensors").unlink()
    with pytest.raises(ArtifactError, match="shard-00001"):
        large.rows(4)
