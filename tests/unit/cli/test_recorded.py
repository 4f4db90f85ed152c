"""`inspect-lens probe train` reads what a server recorded."""

from __future__ import annotations

from pathlib import Path

from inspect_lens._shards import ShardWriter
from inspect_lens._vllm.sinks.process import _about
from inspect_lens._vllm.sinks.sink import SinkConfig
from inspect_lens.data import ActivationStore
from inspect_lens.probe import load_probe
from tests.kit.facts import engine_facts
from tests.kit.planted_store import HIDDEN, LAYER, plant
from tests.unit.cli.conftest import Run

FACTS = engine_facts(
    model="./ckpt", n_layers=8, hidden=HIDDEN, layers=(LAYER,), taps=(), max_step_tokens=32
)


def record(planted: str, uri: Path) -> str:
    """The samples of a store as two processes of a server would have recorded them."""
    config = SinkConfig(store=str(uri), layers=(LAYER,), label_meaning="a planted lie")
    samples = list(ActivationStore.open(planted).samples())
    for name, some in (("a" * 12, samples[::2]), ("b" * 12, samples[1::2])):
        writer = ShardWriter(str(uri), _about(uri.name, config, FACTS), name)
        for number in range(3):
            writer.write(number, some[number::3])
    return str(uri)


def test_a_probe_is_trained_on_recordings(run: Run, tmp_path: Path) -> None:
    labels = [i % 2 for i in range(100)]
    stores = [plant(tmp_path / f"planted-{i}", labels, seed=i) for i in range(2)]
    stores.append(plant(tmp_path / "planted-control", [0] * 80, seed=2))
    named = [record(s, tmp_path / f"live-{i}") for i, s in enumerate(stores)]
    run(
        "probe", "train", "--train", named[0], "--held-out", named[1], "--control", named[2],
        "--fpr", 0.05, "--out", tmp_path / "p",
    )  # fmt: skip
    card = load_probe(tmp_path / "p").card
    assert card.model is not None
    assert (card.model.name, card.description) == ("./ckpt", "a planted lie")
    auroc = card.evaluations[0].auroc
    assert auroc is not None
    assert auroc > 0.9
