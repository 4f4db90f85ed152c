from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe import (
    HeadSpec,
    NeuralProbe,
    Probe,
    ProbeCard,
    load_probe,
    parse_head_pool,
    parse_pool,
)

H, HEADS = 6, 3
POOLS = ("attention", "multimax", "rolling_attention:3", "mean", "top_k_mean:2", "ema:0.2")


def probe(pool: str = "attention", *, layers: int = 1, seed: int = 0, **spec: Any) -> NeuralProbe:
    rng = np.random.default_rng(seed)
    tensors, width = {"mean": rng.normal(size=H), "scale": rng.uniform(0.5, 2, size=H)}, H
    for i in range(layers):
        tensors |= {f"w{i}": rng.normal(size=(5, width)), f"b{i}": rng.normal(size=5)}
        width = 5
    tensors |= {
        "query": rng.normal(size=(HEADS, width)), "value": rng.normal(size=(HEADS, width)),
        "position": rng.normal(size=HEADS) / 10, "bias": rng.normal(size=1),
    }  # fmt: skip
    card = ProbeCard(
        name="t/n", layers=(2,), hidden=H, kind="neural", pool=pool, head=HeadSpec(**spec)
    )
    return NeuralProbe(tensors=tensors, card=card)


def by_hand(p: NeuralProbe, x: np.ndarray) -> float:
    """The formulas of the papers, token by token."""
    t = {k: v.astype(np.float64) for k, v in p.tensors.items()}
    q, v = [], []
    for i, row in enumerate(x):
        z = (row - t["mean"]) / t["scale"]
        if "w0" in t:
            z = np.maximum(t["w0"] @ z + t["b0"], 0)
        q.append(t["query"] @ z * p.card.head.temperature + t["position"] * i)
        value = t["value"] @ z
        v.append(np.tanh(value) if p.card.head.gate else value)
    q, v = np.array(q), np.array(v)

    def attend(a: int, b: int) -> float:
        w = np.exp(q[a:b]) / np.exp(q[a:b]).sum(0)
        return float((w * v[a:b]).sum())

    name, n = p.pool.split(":")[0], len(x)
    if name == "attention":
        return attend(0, n) + t["bias"][0]
    if name == "multimax":
        return float(v.max(0).sum()) + t["bias"][0]
    if name == "rolling_attention":
        w = min(3, n)
        return max(attend(i, i + w) for i in range(n - w + 1)) + t["bias"][0]
    return float((v.sum(1) + t["bias"][0]).mean())


@pytest.mark.parametrize("pool", ["attention", "multimax", "rolling_attention:3", "mean"])
@pytest.mark.parametrize("spec", [{}, {"gate": True, "temperature": 0.4}], ids=str)
def test_it_computes_the_formulas(pool: str, spec: dict[str, Any]) -> None:
    for layers in (0, 1):
        p = probe(pool, layers=layers, **spec)
        for n in (1, 2, 3, 9):
            x = np.random.default_rng(n).normal(size=(n, H))
            assert p.score(x) == pytest.approx(by_hand(p, x), rel=1e-10)


@pytest.mark.parametrize("pool", POOLS)
def test_a_running_score_is_that_of_every_beginning(pool: str) -> None:
    p = probe(pool)
    x = np.random.default_rng(1).normal(size=(12, H)) * 3
    running = p.running_scores(x)
    if pool in ("attention", "multimax") or pool.startswith("rolling"):
        assert running == pytest.approx([p.score(x[: n + 1]) for n in range(12)], rel=1e-11)
    else:
        assert running.tolist() == p.score_tokens(x).tolist()


def test_files_keep_it_and_load_probe_knows_its_kind(tmp_path: Path) -> None:
    made = probe(gate=True)
    folder = made.save(tmp_path / "n")
    loaded = load_probe(folder)
    assert isinstance(loaded, NeuralProbe)
    assert loaded.sha256 == made.sha256
    x = np.random.default_rng(0).normal(size=(4, H))
    assert loaded.score(x) == made.score(x)
    assert loaded.attention_weights(x).sum(axis=0) == pytest.approx(np.ones(HEADS))
    with pytest.raises(ArtifactError, match="neural"):
        Probe.load(folder)
    card = (folder / "card.json").read_text().replace('"gate": true', '"gate": false')
    (folder / "card.json").write_text(card)
    with pytest.raises(ArtifactError, match="head"):
        load_probe(folder)


def test_layers_and_shapes_are_checked() -> None:
    p = probe()
    x = np.zeros((4, H))
    assert p.score(np.stack([x, x + 1]), (1, 2)) == p.score(x + 1)
    for acts, layers, match in (
        (x, (1,), "layer 2 is missing"),
        (np.zeros((4, H + 1)), None, "shape"),
        (np.zeros((0, H)), None, "no token"),
        (np.full((1, H), np.nan), None, "NaN"),
    ):
        with pytest.raises(SpecError, match=match):
            p.score(acts, layers)
    with pytest.raises(ArtifactError, match="directions at"):
        p.at(1)
    with pytest.raises(SpecError, match="query"):
        NeuralProbe(tensors={**p.tensors, "query": np.zeros((2, 2))}, card=p.card)
    with pytest.raises(ValueError, match="learned pool"):
        ProbeCard(name="t/p", layers=(1,), hidden=2, pool="attention")
    with pytest.raises(SpecError, match="allowed are mean"):
        parse_pool("attention")
    assert str(parse_head_pool("rolling_attention")) == "rolling_attention:10"


def test_addresses_of_the_hub_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    folder, asked = probe().save(tmp_path / "cache" / "n"), []

    def download(repo: str, file: str, revision: str | None) -> str:
        asked.append((repo, file, revision))
        return str(folder / Path(file).name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert load_probe("hf://lab/probes/llama/deception@v1.2").name == "t/n"
    assert asked == [
        ("lab/probes", "llama/deception/probe.safetensors", "v1.2"),
        ("lab/probes", "llama/deception/card.json", "v1.2"),
    ]
    assert load_probe("hf://lab/probes").name == "t/n"
    with pytest.raises(ArtifactError, match="hf://owner/repository"):
        load_probe("hf://lab")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: 1 / 0)
    with pytest.raises(ArtifactError, match="could not be downloaded"):
        load_probe("hf://lab/probes")
