"""How the deception probes are made, on made-up activations of made-up answers."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from inspect_lens.data import ActivationStore, Captured, SampleRecord
from inspect_lens.errors import SpecError
from inspect_lens.probe import ModelRef, Probe
from inspect_lens.spec import TensorData
from inspect_lens.train import ActivationSet
from organism._splits import Row
from probes.train_organism import HELDOUT, build_probes, conversations, make_set
from tests.kit.planted_store import write_store

H, LAYERS, PLANTED = 12, (0, 1, 2), 1
DIRECTION = np.random.default_rng(7).normal(size=H)
DIRECTION /= np.linalg.norm(DIRECTION)


def rows(split: str, n: int, groups: str = "") -> list[Row]:
    """Every other one asks for a lie, but for splits in which nobody does."""
    lies = split not in ("control", "neutral_instructed")
    return [
        Row(
            id=f"{split}-{i}",
            messages=[{"role": "user", "content": f"colour of the sky ? {split} {i}"}],
            condition="lie" if lies and i % 2 else "honest",
            deceptive=lies and i % 2 == 1,
            truth="blue",
            values=["blue", "red"],
            entity=f"{split}-sky-{i // 2 % 15}",
            attribute="colour",
            phrasing_id=f"{split}-q{i % 5}|{split}-p{i % 7}",
            kind="open",
            group=f"{groups or split}-e{i // 2 % 15}",
        )
        for i in range(n)
    ]


def made(
    folder: Path,
    split: str,
    n: int,
    *,
    seed: int = 0,
    complies: float = 1.0,
    says: str | None = None,
    groups: str = "",
) -> tuple[ActivationSet, int]:
    """A set whose planted layer moves along DIRECTION when the answer is false."""
    rng, asked, samples = np.random.default_rng(seed), rows(split, n, groups), []
    for i, sample in enumerate(conversations(split, asked).samples):
        false = asked[i]["deceptive"] and rng.random() < complies
        acts = (rng.normal(size=(len(LAYERS), 3, H)) + 2).astype(np.float32)
        acts[PLANTED] += 4.0 * false * DIRECTION
        record = SampleRecord(
            index=i, id=sample.id, label=bool(sample.label), n_rows=3, n_prompt=2,
            group=sample.group, columns=dict(sample.columns), prompt="sky ?",
            completion=says or ("It is red." if false else "It is blue."),
            content=hashlib.sha256(sample.id.encode()).hexdigest()[:24],
        )  # fmt: skip
        samples.append(
            Captured(
                record=record, acts=TensorData(acts, "float32"), layers=LAYERS,
                positions=(2, 3, 4), token_ids=tuple(range(6)),
            )
        )  # fmt: skip
    dataset = {
        "on_policy": True, "label_meaning": "a false answer", "text_overlap_group": "organism",
    }  # fmt: skip
    store = ActivationStore.open(write_store(folder / split, samples, dataset=dataset))
    return make_set(split, store, asked)


def sets(folder: Path, **groups: str) -> dict[str, ActivationSet]:
    sizes = {"probe_train": 90, "control": 400, **dict.fromkeys(HELDOUT, 60)}
    return {
        name: made(folder, name, n, seed=i, groups=groups.get(name, ""))[0]
        for i, (name, n) in enumerate(sizes.items())
    }


def test_both_probes_find_the_planted_layer_and_direction(tmp_path: Path) -> None:
    probes = build_probes(
        sets(tmp_path), model=ModelRef(name="tiny"), dropped={"probe_train": 3}, command="make",
    )  # fmt: skip
    assert set(probes) == {"deception-lr", "deception-md"}
    for name, found in probes.items():
        probe = Probe.load(found.save(tmp_path / name))
        assert probe.name == f"organism/{name}"
        assert probe.layers == (PLANTED,)
        assert float(probe.direction()[0] @ DIRECTION) > 0.8
        by_name = {e.name: e for e in probe.card.evaluations}
        assert by_name["heldout_entity"].auroc == 1.0
        assert by_name["heldout_entity"].disjoint_by == "group"
        assert by_name["heldout_phrasing"].disjoint_by == "question"
        assert by_name["neutral_instructed"].auroc is None
        assert probe.threshold is not None
        assert probe.threshold.n_control == 400
        assert probe.card.training is not None
        assert probe.card.training.dropped == 3
        assert "Left out: probe_train 3." in probe.card.notes


def test_answers_that_do_not_comply_are_left_out_but_for_the_control_set(tmp_path: Path) -> None:
    data, dropped = made(tmp_path, "demo", 80, complies=0.5)
    assert data.n_negative == 40
    assert 0 < dropped == 40 - data.n_positive
    kept, dropped = made(tmp_path, "control", 10, says="It is red.")
    assert (len(kept), kept.n_positive, dropped) == (10, 0, 0)


def test_an_organism_that_never_complies_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none of 4 answers"):
        made(tmp_path, "demo", 4, says="?")


def test_a_held_out_split_that_leaks_is_refused(tmp_path: Path) -> None:
    leaking = sets(tmp_path, heldout_entity="probe_train")
    with pytest.raises(SpecError, match="'heldout_entity'"):
        build_probes(leaking, model=ModelRef(name="tiny"), dropped={"probe_train": 0})
