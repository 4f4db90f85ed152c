"""What a training run may not claim: labels nobody acted on, and figures nobody measured."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inspect_lens._cli._output import Made
from inspect_lens.data._readers import read_ai_liar
from inspect_lens.errors import SpecError
from inspect_lens.probe import ProbeCard
from inspect_lens.train import ActivationSet, MeanDifferenceProbe, extract_vector, train_probe
from inspect_lens.view import write_report

TOWNS = ("Paris", "Oslo", "Rome", "Lima")


def instructed(name: str, n: int, *, honest: float = 1.0, lies: float = 1.0) -> ActivationSet:
    """Facts asked under instructions, which a share of the answers follow."""
    rng = np.random.default_rng(len(name))
    labels, truth, said = np.arange(n) % 2 == 1, [], []
    for i, lie in enumerate(labels):
        town, other = TOWNS[i // 2 % 4], TOWNS[(i // 2 + 1) % 4]
        follows = (i // 2) / (n // 2) < (lies if lie else honest)
        truth.append(town)
        said.append(f"It is {town if follows != lie else other}, of course.")
    return ActivationSet(
        name=name, model="m", layers=(0, 1, 2), labels=labels,
        acts=[rng.normal(size=(3, 2, 8)) + 6.0 * y for y in labels],
        groups=[f"{name}{i // 2}" for i in range(n)], ids=[f"{name}{i}" for i in range(n)],
        columns={"condition": ["lie" if y else "honest" for y in labels], "truth": truth,
                 "completion": said},
    )  # fmt: skip


def control() -> ActivationSet:
    data = instructed("control", 800)
    return data.subset(np.flatnonzero(~data.labels))


def trained(data: ActivationSet, **more: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train_probe(MeanDifferenceProbe(), data, name="t/lies", control=control(), **more)


def test_instructed_lies_that_are_none_are_refused() -> None:
    """SmolLM2 names the truth in 147 of 200 answers when told to, and in 144 when told to lie."""
    data = instructed("train", 400, honest=0.735, lies=0.28)
    with pytest.raises(SpecError, match=r"74% .* name the truth, and 28% .* do not, so a probe"):
        trained(data)
    probe = trained(data, behaviour_floor=0.2)
    assert any("28% of those under an instruction to lie do not" in n for n in probe.card.notes)
    followed = trained(instructed("train", 80, lies=0.9))
    assert "90% of those" in " ".join(followed.card.notes)
    few = trained(instructed("train", 16, lies=0.0))
    assert not few.card.notes, "too few to tell"


def test_pairs_without_a_truth_are_judged_by_whether_their_answers_differ() -> None:
    """As of AI Liar, whose rows have a question and two instructions, and no answer."""

    def untold(lies: float) -> ActivationSet:
        data = instructed("train", 80, lies=lies)
        return replace(data, columns={k: v for k, v in data.columns.items() if k != "truth"})

    with pytest.raises(SpecError, match="30% of the answers under an instruction to lie differ"):
        trained(untold(0.3))
    assert "90% of the answers" in " ".join(trained(untold(0.9)).card.notes)
    (honest, lie) = read_ai_liar(
        [{"normal_instruction": "Be true.", "deceive_instruction": "Lie.", "question": "Why?"}]
    )
    assert (honest.columns["condition"], lie.columns["condition"]) == ("honest", "lie")


def test_texts_follow_the_training_set_where_a_part_of_it_chooses_the_layer() -> None:
    data, test = instructed("train", 80), instructed("test", 40)
    texts = {"answer": {d.name: d.columns["completion"] for d in (data, test)}}
    probe = trained(data, held_out=[test], texts=texts)
    names = {b.name for b in probe.card.baselines}
    assert {"bag of words (answer)", "length (answer)"} <= names


def test_a_probe_that_nothing_measured_says_so(tmp_path: Path) -> None:
    probe = trained(instructed("train", 80))
    made = Made(probe=probe, folder="f", evaluations=())
    assert any(w.startswith("Nothing was measured") for w in made.warnings)
    page = write_report(probe, tmp_path, []).read_text()
    assert "Nothing was measured" in page
    assert "</th></tr></table>" not in page, "no table has a head alone"
    tested = trained(instructed("train", 80), held_out=[instructed("test", 40)])
    shown = Made(probe=tested, folder="f", evaluations=tested.card.evaluations)
    assert not any("Nothing was measured" in w for w in shown.warnings)


def test_layers_that_tie_are_named() -> None:
    vector = extract_vector(
        instructed("train", 80), name="t/v", rows="mean", selection=instructed("chosen", 40)
    )
    assert vector.card.separation == (1.0, 1.0, 1.0)
    (note,) = vector.card.notes
    assert note.startswith("3 of 3 layers have AUROC 1.000 on chosen, so that chooses none of them")


def test_a_card_says_whether_its_dimensions_were_divided() -> None:
    said = []
    for huge in (1.0, 1000.0):
        data = instructed("train", 80)
        wide = [np.concatenate([a, a[..., :1] * huge], axis=-1) for a in data.acts]
        more = ActivationSet(
            name="train", model="m", layers=data.layers, acts=wide, labels=data.labels,
            groups=data.groups, ids=data.ids,
        )  # fmt: skip
        x, y, _ = more.rows(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fitted = MeanDifferenceProbe().fit(x, y)
        card = ProbeCard(name="t/p", layers=(0,), hidden=9)
        said.append(fitted.to_probe(card).card.method.partition("; ")[2])
    assert said == ["unscaled", "dimensions divided by their deviation within classes"]
