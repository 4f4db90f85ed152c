from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from inspect_lens.data import load_dataset, planted_activations
from inspect_lens.errors import SpecError
from inspect_lens.probe import AnyProbe, load_probe
from inspect_lens.train import (
    ActivationSet,
    MeanDifferenceProbe,
    evaluate_probe,
    refuse_seen,
    train_probe,
)
from inspect_lens.train.sets._splits import count_seen
from tests.kit.repository import ROOT

H = 8


def made(name: str, n: int, seed: int, *, told: bool, **change: object) -> ActivationSet:
    planted = planted_activations(n=n, hidden=H, seed=seed)
    data = ActivationSet(
        name=name, model="m", layers=(0, 1, 2), acts=planted.acts, labels=planted.labels,
        groups=tuple(f"{name}-{g}" for g in planted.groups),
        ids=tuple(f"{name}-{i}" for i in range(n)),
        contents=tuple(f"what is shown in {seed}, {i}" for i in range(n)) if told else (),
    )  # fmt: skip
    return replace(data, **change)  # type: ignore[arg-type]


def renamed(data: ActivationSet, name: str, *, n: int) -> ActivationSet:
    """Some samples of a set under other names."""
    part = data.subset(range(n), name=name)
    ids, groups = (tuple(f"{name}:{i}" for i in values) for values in (part.ids, part.groups))
    return replace(part, ids=ids, groups=groups)


def trained(*, told: bool) -> tuple[AnyProbe, dict[str, ActivationSet]]:
    sets = {
        "train": made("train", 40, 1, told=told), "selection": made("selection", 30, 2, told=told),
        "control": made("control", 24, 3, told=told, labels=np.zeros(24, dtype=bool)),
        "new": made("new", 20, 4, told=told),
    }  # fmt: skip
    probe = train_probe(
        MeanDifferenceProbe(), sets["train"], selection=sets["selection"],
        control=sets["control"], held_out=[sets["new"]], name="t/p", fpr=0.2,
    )  # fmt: skip
    return probe, sets


@pytest.mark.parametrize("told", [True, False])
def test_a_probe_is_not_judged_on_what_it_knows(told: bool, tmp_path: Path) -> None:
    probe, sets = trained(told=told)
    probe = load_probe(probe.save(tmp_path / "p"))
    seen = probe.card.seen
    assert seen is not None
    assert seen.by == ("content" if told else "activations")
    assert [seen.count(r) for r in ("training", "selection", "control")] == [40, 30, 24]
    assert [e.n_seen for e in probe.card.evaluations] == [0]
    for name, done in (
        ("train", "were in training"), ("selection", "chose the layer"),
        ("control", "set the threshold"),
    ):  # fmt: skip
        other = renamed(sets[name], "other", n=7)
        mixed = ActivationSet(
            name="mixed", model="m", layers=(0, 1, 2), acts=other.acts + sets["new"].acts,
            labels=np.concatenate([other.labels, sets["new"].labels]),
            groups=other.groups + sets["new"].groups, ids=other.ids + sets["new"].ids,
            contents=other.contents + sets["new"].contents,
        )  # fmt: skip
        refusal = f"mixed: 7 of 27 samples {done}, such as 'other:{name}"
        with pytest.raises(SpecError, match=refusal):
            evaluate_probe(probe, mixed)
        assert evaluate_probe(probe, mixed, allow_seen=True).n_seen == 7
        assert count_seen(probe, mixed) == 7
    refuse_seen(probe, sets["control"], roles=("training", "selection"))
    assert evaluate_probe(probe, made("else", 20, 5, told=told)).n_seen == 0


def test_a_card_without_a_list_cannot_tell() -> None:
    probe, sets = trained(told=True)
    old = replace(probe, card=probe.card.model_copy(update={"seen": None}))
    assert evaluate_probe(old, sets["train"]).n_seen is None
    # Neither can a set whose contents are not known, beside a card that lists contents.
    assert evaluate_probe(probe, replace(sets["train"], contents=())).n_seen is None


def test_activations_are_compared_where_the_probe_reads() -> None:
    probe, sets = trained(told=False)
    (layer,) = probe.layers
    index = sets["train"].layers.index(layer)
    narrow = replace(
        sets["train"], layers=(layer,), acts=tuple(a[[index]] for a in sets["train"].acts), mask=()
    )
    assert count_seen(probe, narrow) == 40


def test_sets_that_share_a_sample_under_another_name_are_refused() -> None:
    _, sets = trained(told=True)
    twin = renamed(sets["train"], "twin", n=3)
    base = {"name": "t/p", "fpr": 0.2, "selection": sets["selection"]}
    with pytest.raises(SpecError, match="3 of 3 samples of 'twin' are also in 'train'"):
        train_probe(
            MeanDifferenceProbe(), sets["train"], control=sets["control"], held_out=[twin], **base  # type: ignore[arg-type]
        )  # fmt: skip
    with pytest.raises(SpecError, match="'train-0' and 'twin:train-0'"):
        train_probe(MeanDifferenceProbe(), sets["train"], control=twin, **base)  # type: ignore[arg-type]


def test_files_and_parts_of_a_set_keep_what_tells_samples_apart(tmp_path: Path) -> None:
    data = made("a", 6, 1, told=True)
    loaded = ActivationSet.load(data.save(tmp_path / "a.safetensors"))
    assert loaded.contents == data.contents == loaded.key("content")
    assert data.subset([4, 1]).contents == (data.contents[4], data.contents[1])
    assert data.sha256 != replace(data, contents=()).sha256
    with pytest.raises(SpecError, match="contents: 1 values for 6"):
        replace(data, contents=("x",))


@pytest.mark.parametrize("name", ["deception-lr", "deception-md", "truth-mm"])
def test_the_probes_of_the_organism_know_what_they_were_made_of(name: str) -> None:
    def content(split: str) -> list[bytes]:
        path = str(ROOT / f"organism/data/{split}.jsonl")
        samples = load_dataset("organism", path=path).samples
        return [s.content_id.encode() for s in samples]

    card = load_probe(ROOT / "probes/organism" / name).card
    assert card.seen is not None
    assert card.training is not None
    counts = [card.seen.count(r) for r in ("training", "selection", "control")]
    facts = card.training
    assert counts[:2] == [facts.n_positive + facts.n_negative, facts.selection_n]
    assert counts[2] == card.thresholds[0].n_control
    found = card.seen.find(content("probe_train"))
    assert [len(found[r]) for r in ("training", "selection")] == counts[:2]
    assert len(card.seen.find(content("control"))["control"]) == counts[2]
    for evaluation in card.evaluations:
        assert (card.seen.find(content(evaluation.name)), evaluation.n_seen) == ({}, 0)
