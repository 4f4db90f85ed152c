"""How the truth probe is made, on made-up activations of the real claims."""

from __future__ import annotations

import numpy as np

from evals.organism_truth import claims
from inspect_lens.train import ActivationSet
from organism._splits import read_split
from probes.train_truth import CONTROL, HELDOUT, TRAIN, build_truth_probe

HIDDEN, PLANTED = 8, 3


def planted(split: str, seed: int) -> ActivationSet:
    """The truth moves the first coordinate of the planted layer."""
    rng, samples = np.random.default_rng(seed), claims(split, read_split(split)).samples
    acts = rng.normal(size=(len(samples), 2, 1, HIDDEN)).astype(np.float32)
    acts[:, 1, 0, 0] += [4.0 * bool(s.label) for s in samples]
    columns = {key: tuple(s.columns[key] for s in samples) for key in ("question", "prompt")}
    return ActivationSet(
        name=split, model="organism", layers=(1, PLANTED), acts=tuple(acts),
        labels=[bool(s.label) for s in samples], groups=[s.group for s in samples],
        ids=[s.id for s in samples], contents=[s.content_id for s in samples],
        columns={**columns, "prompt_text": tuple(s.messages[-1].content for s in samples)},
    )  # fmt: skip


def test_the_truth_probe_has_baselines_beside_it() -> None:
    sets = {split: planted(split, i) for i, split in enumerate((TRAIN, CONTROL, *HELDOUT))}
    card = build_truth_probe(sets).card
    assert card.layers == (PLANTED,)
    assert all(e.auroc is not None and e.auroc > 0.97 for e in card.evaluations)
    assert {(b.set, b.name) for b in card.baselines} == {
        (split, name)
        for split in HELDOUT
        for name in (
            "bag of words (prompt)",
            "length (prompt)",
            "length",
            "random direction",
        )
    }
    threshold = card.thresholds[0]
    assert threshold.n_control == sets[CONTROL].n_negative
    assert threshold.n_left_out == sets[CONTROL].n_positive > 0
