"""The layer that a threshold asks for, and verdicts that see more than the probe."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from benchmarks.probe_statistics import FALSE_TRANSFERS, WORLDS, verdicts
from inspect_lens.errors import SpecError
from inspect_lens.probe import ProbeCard, recall_draws, required_negatives, smallest_rate
from inspect_lens.probe.card._files import render_card
from inspect_lens.train import (
    ActivationSet,
    MeanDifferenceProbe,
    evaluate_probe,
    select_layer,
    train_probe,
    transfer_statement,
)
from inspect_lens.train.judging._select import SelectBy
from inspect_lens.train.sets._splits import near_copies, split_control

LAYERS = (0, 1)


def plain() -> MeanDifferenceProbe:
    return MeanDifferenceProbe(scaling="none")


def two_layers(name: str, n: int, *, seed: int, harmless: bool = False) -> ActivationSet:
    """Layer 0 orders better, but 5% of harmless samples are far out; layer 1 is the other way."""
    rng = np.random.default_rng(seed)
    y = np.zeros(n, dtype=bool) if harmless else np.arange(n) % 2 == 1
    first = rng.normal(size=n) + 3.5 * y
    # Samples unlike those of the training set: not deceptive, and far along the direction.
    odd = rng.random(n) < (0.05 if harmless else 0.0)
    first[odd] += 8.0
    second = np.where(y & (rng.random(n) < 0.6), 6.0, 0.0) + rng.normal(size=n)
    noise = 0.3 * rng.normal(size=(2, n, 1, 12))
    noise[..., 0] = np.stack([first, second])[:, :, None]
    return ActivationSet(
        name=name, model="m", layers=LAYERS, labels=y,
        acts=tuple(noise[:, i] for i in range(n)),
        groups=[f"{name}-{i // 2}" for i in range(n)], ids=[f"{name}-{i}" for i in range(n)],
    )  # fmt: skip


def test_the_layer_is_the_one_that_the_threshold_asks_for() -> None:
    """17 of 20 simulated sets chose a layer of recall 0.09 over one of 0.47, by the AUROC."""
    right = 0
    for seed in range(20):
        train, selection = (two_layers(n, 200, seed=seed + k) for n, k in (("t", 0), ("s", 100)))
        control = two_layers("c", 400, seed=seed + 200, harmless=True)
        card = ProbeCard(name="t/p", layers=(0,), hidden=12)
        by_area = select_layer(plain(), train, selection, card=card)
        chosen = select_layer(plain(), train, selection, card=card, control=control)
        assert (by_area.by, chosen.by) == ("auroc", "recall")
        assert by_area.probe.layers == (0,)
        right += chosen.probe.layers == (1,)
        first, second = chosen.sweep
        assert first.auroc > second.auroc
        assert first.recall is not None
        assert second.recall is not None
        assert second.recall_interval is not None
        assert second.recall_interval.low <= second.recall <= second.recall_interval.high
        assert second.recall > first.recall + 0.2
    assert right == 20
    with pytest.raises(SpecError, match="there is no control set"):
        select_layer(plain(), train, selection, card=card, select_by="recall")


def thirty_layers(name: str, n: int, *, seed: int, harmless: bool = False) -> ActivationSet:
    """Layers 10 to 19 tell the classes equally well, and the others less."""
    rng = np.random.default_rng(seed)
    y = np.zeros(n, dtype=bool) if harmless else np.arange(n) % 2 == 1
    gap = np.where((np.arange(30) >= 10) & (np.arange(30) < 20), 3.0, 0.6)
    acts = rng.normal(size=(n, 30, 1, 4))
    acts[..., 0, 0] += gap * y[:, None]
    return ActivationSet(
        name=name, model="m", layers=tuple(range(30)), labels=y, acts=tuple(acts),
        groups=[f"{name}-{i}" for i in range(n)], ids=[f"{name}-{i}" for i in range(n)],
    )  # fmt: skip


@pytest.mark.parametrize("by", ["recall", "auroc"])
def test_layers_that_a_few_samples_do_not_tell_apart_are_named(by: SelectBy) -> None:
    for seed in range(5):
        train, selection = (thirty_layers(n, k, seed=seed + k) for n, k in (("t", 150), ("s", 50)))
        control = thirty_layers("c", 200, seed=seed + 500, harmless=True)
        chosen = select_layer(
            plain(), train, selection, fpr=0.05, select_by=by, control=control,
            card=ProbeCard(name="t/p", layers=(0,), hidden=4),
        )  # fmt: skip
        assert chosen.probe.layers[0] in range(10, 20)
        assert chosen.probe.layers[0] not in chosen.tied
        assert chosen.tied, "noise of fifty samples tells few of ten equal layers apart"
        assert not set(chosen.tied) - set(range(10, 20))


def test_near_one_a_layer_that_is_shown_to_be_worse_is_no_tie() -> None:
    y = np.arange(50) % 2 == 1

    def one(name: str, seed: int) -> ActivationSet:
        rng = np.random.default_rng(seed)
        noise = rng.normal(size=50)
        acts = [
            (gap * y + 0.7 * noise + 0.7 * rng.normal(size=50)).reshape(50, 1, 1)
            for gap in (3.2, 1.8)
        ]
        return ActivationSet(
            name=name, model="m", layers=(0, 1), labels=y,
            acts=tuple(np.stack(acts, axis=1)),
            groups=[f"{name}-{i}" for i in range(50)], ids=[f"{name}-{i}" for i in range(50)],
        )  # fmt: skip

    choice = select_layer(
        plain(), one("t", 0), one("s", 5), card=ProbeCard(name="t/p", layers=(0,), hidden=1)
    )
    assert choice.sweep[0].auroc > 0.98
    assert 0.92 < choice.sweep[1].auroc < 0.93
    assert choice.tied == ()


def test_a_small_control_set_is_told_its_rate_and_a_card_its_ties() -> None:
    train, small = thirty_layers("t", 200, seed=3), thirty_layers("c", 60, seed=9, harmless=True)
    with pytest.raises(SpecError, match=r"ask for fpr=0\.05, the smallest rate that 60 can show"):
        train_probe(plain(), train, name="t/p", control=small)
    probe = train_probe(plain(), train, name="t/p", control=small, fpr=0.05)
    facts = probe.card.training
    assert facts is not None
    assert facts.tied_layers
    assert facts.ties in render_card(probe.card, sha256="0")


@pytest.mark.parametrize("n", [4, 59, 60, 124, 299, 300, 301, 5000])
def test_the_smallest_rate_is_one_that_can_be_shown(n: int) -> None:
    rate = smallest_rate(n)
    assert required_negatives(rate) <= n
    assert rate <= 1.1 * 3 / n + 1e-12


def test_a_pool_is_chosen_with_the_layer() -> None:
    def one_token(name: str, n: int, seed: int, *, harmless: bool = False) -> ActivationSet:
        rng = np.random.default_rng(seed)
        y = np.zeros(n, dtype=bool) if harmless else np.arange(n) % 2 == 1
        acts = []
        for mark in y:
            # One word of many tells; how high all of them lie differs from sample to sample.
            rows = 0.3 * rng.normal(size=(1, 20, 4)) + rng.normal(size=4) * 0.4
            rows[0, 7, 0] += 5.0 * mark
            acts.append(rows)
        return ActivationSet(
            name=name, model="m", layers=(0,), labels=y, acts=tuple(acts),
            groups=[f"{name}-{i}" for i in range(n)], ids=[f"{name}-{i}" for i in range(n)],
        )  # fmt: skip

    sets = [one_token(name, 200, k) for k, name in enumerate("ts")]
    control = one_token("c", 400, 9, harmless=True)
    card = ProbeCard(name="t/p", layers=(0,), hidden=4)
    chosen = select_layer(
        plain(),
        *sets,
        card=card,
        control=control,
        pools=("mean", "max"),
    )
    assert chosen.probe.pool == "max"
    assert [s.pool for s in chosen.sweep] == ["mean", "max"]
    recalls = [s.recall or 0.0 for s in chosen.sweep]
    assert recalls[1] > recalls[0] + 0.2


def test_draws_of_recall_vary_as_recall_does() -> None:
    rng, truth = np.random.default_rng(0), 0.0
    found = []
    for seed in range(150):
        positive, control = rng.normal(size=80) + 3.0, rng.normal(size=400)
        made = recall_draws(positive, control, 0.05, n_draws=200, seed=seed)
        # Of a threshold of exactly that rate: P(N(3, 1) > 1.645).
        low, high = np.quantile(made, [0.025, 0.975])
        found.append(low <= 0.9123 <= high)
        truth += made.mean() / 150
    assert np.mean(found) > 0.88
    assert truth == pytest.approx(0.91, abs=0.02)
    few = recall_draws(np.ones(5), np.zeros(20), 0.01)
    assert few.mean() == 1.0, "too few control samples: the largest score is the threshold"


def test_control_samples_choose_or_set_the_threshold() -> None:
    large = two_layers("c", 1000, seed=0, harmless=True)
    one, other = split_control(large, 0.01)
    assert not set(one.groups) & set(other.groups)
    assert len(other) >= 600
    small = two_layers("c", 400, seed=0, harmless=True)
    assert split_control(small, 0.01) == (small, small)


def test_a_card_has_what_a_user_of_a_threshold_asks() -> None:
    train, test = two_layers("t", 240, seed=1), two_layers("h", 160, seed=3)
    control = two_layers("c", 400, seed=2, harmless=True)
    with pytest.warns(UserWarning, match="misses .* of the positives of h at its threshold"):
        probe = train_probe(
            plain(), train, name="t/p", control=control,
            held_out=[test], layers=[0],
        )  # fmt: skip
    found = probe.card.evaluations[0]
    assert [r.fpr for r in found.recalls] == [0.01, 0.05]
    assert found.recalls[0].recall < found.recalls[1].recall
    assert found.auroc is not None
    assert found.auroc_control is not None
    assert found.auroc_control < found.auroc, "harmless samples lie far out"
    assert found.control_shift is not None
    assert found.partial_auroc is not None
    assert found.average_precision is not None
    assert found.balanced_accuracy == pytest.approx(
        ((found.recall or 0) + 1 - (found.fpr or 0)) / 2
    )
    assert probe.card.thresholds[0].selected_on
    assert "no promise for this very threshold" in probe.card.thresholds[0].guarantee
    assert "the probe misses" in " ".join(probe.card.warnings).lower()
    with warnings.catch_warnings():
        # Of twelve dimensions a random direction reads the concept, too, and that is said.
        warnings.filterwarnings("ignore", message=".*random direction")
        quiet = train_probe(
            plain(), train, name="t/p", control=control,
            held_out=[test],
        )  # fmt: skip
    assert quiet.layers == (1,)
    assert not any("misses" in text for text in quiet.card.warnings)
    assert (quiet.card.evaluations[0].recall or 0.0) > 0.5
    # Without the training set, length and words of the set itself stand beside it, and no verdict.
    alone = evaluate_probe(quiet, test)
    assert [b.name for b in alone.baselines] == ["length"]
    assert transfer_statement("t", found).transfers is not None


@pytest.mark.slow
@pytest.mark.parametrize("world", ["topic explains all", "length explains all, unequal groups"])
def test_what_a_baseline_explains_does_not_transfer(world: str) -> None:
    """The light version of `benchmarks.probe_statistics`: the probe has 0.95 to 1.0 here."""
    (row,) = verdicts(6, worlds=[world])
    assert not WORLDS[world][1]
    assert row.found <= FALSE_TRANSFERS, row


def test_copies_with_jitter_or_other_spelling_are_found() -> None:
    rng = np.random.default_rng(0)

    def made(name: str, acts: list[np.ndarray], texts: list[str]) -> ActivationSet:
        n = len(acts)
        return ActivationSet(
            name=name, model="m", layers=(0,), acts=tuple(acts), labels=np.arange(n) % 2,
            groups=[f"{name}{i}" for i in range(n)], ids=[f"{name}{i}" for i in range(n)],
            columns={"completion": texts, "prompt_text": ["Say."] * n},
        )  # fmt: skip

    acts = [rng.normal(size=(1, 5, 16)) for _ in range(60)]
    fresh = [rng.normal(size=(1, 5, 16)) for _ in range(60)]
    first = made("t", acts, [f"answer {i}" for i in range(60)])
    probe = plain().fit(*first.rows(0)[:2])
    frozen = probe.to_probe(ProbeCard(name="t/p", layers=(0,), hidden=16))
    other = made("h", fresh, [f"reply {i + 60}" for i in range(60)])
    assert near_copies(frozen, [first], [other]) == {}
    jittered = [a + 0.003 * rng.normal(size=a.shape) for a in acts[:7]]
    copied = made("h", [*jittered, *fresh[7:]], [f"reply {i + 60}" for i in range(60)])
    ((said,),) = near_copies(frozen, [first], [copied]).values()
    assert said.startswith("7 of 60 samples of 'h' are all but copies of samples of 't'")
    again = made("h", fresh, [f"Answer  {i}!" if i < 3 else f"reply {i + 60}" for i in range(60)])
    ((said,),) = near_copies(frozen, [first], [again]).values()
    assert said.startswith("3 of 60")


def sentences(n: int, rng: np.random.Generator) -> list[list[str]]:
    return [[f"w{k}" for k in rng.zipf(1.3, size=12) % 2000] for _ in range(n)]


def copied_sets(kind: str, seed: int) -> tuple[ActivationSet, ActivationSet]:
    """A set, and another one that is altered copies of it, or is not."""
    rng = np.random.default_rng(seed)
    n, hidden = 120, 24
    mixing, labels = rng.normal(size=(6, hidden)), rng.integers(0, 2, n)

    def rows() -> list[np.ndarray]:
        noise = 0.3 * rng.normal(size=(n, hidden))
        return list((rng.normal(size=(n, 6)) @ mixing + noise)[:, None, None])

    texts, acts = sentences(n, rng), rows()
    if kind == "words":
        other, fresh = [list(text) for text in texts], rows()
        for text, new in zip(other, sentences(n, rng), strict=True):
            for at in rng.permutation(12)[:6]:
                text[at] = new[at]
    else:
        other = sentences(n, rng)
        fresh = [a + 0.02 * np.std(acts) * rng.normal(size=a.shape) for a in acts]
        fresh = rows() if kind == "clean" else fresh

    def made(name: str, acts: list[np.ndarray], texts: list[list[str]]) -> ActivationSet:
        columns = {"completion": [" ".join(t) for t in texts], "prompt_text": [""] * n}
        # Token counts differ where an answer was written anew.
        return ActivationSet(
            name=name, model="m", layers=(0,), acts=[a.repeat(len(name), 1) for a in acts],
            labels=labels, groups=[f"{name}{i}" for i in range(n)],
            ids=[f"{name}{i}" for i in range(n)], columns={} if kind == "jitter" else columns,
        )  # fmt: skip

    return made("fit", acts, texts), made("held", fresh, other)


def templated(name: str, frames: range, *, shared: bool) -> ActivationSet:
    """Questions in some frames about sixty entities, whose activations tell the entity."""
    rng, fixed = np.random.default_rng(frames.start), np.random.default_rng(0)
    entities = fixed.normal(size=(60, 24))
    about = [(frame, entity) for frame in frames for entity in rng.permutation(60)[:6].tolist()]
    return ActivationSet(
        name=name, model="m", layers=(0,), labels=np.arange(len(about)) % 2,
        acts=[(entities[e] + 0.3 * rng.normal(size=24))[None, None] for _, e in about],
        groups=[f"{'' if shared else name}e{e}" for _, e in about],
        ids=[f"{name}{i}" for i in range(len(about))],
        columns={"question": [f"q{f}" for f, _ in about], "prompt_text": [""] * len(about),
                 "completion": [f"frame{f} asks for town{e} here" for f, e in about]},
    )  # fmt: skip


def test_templates_that_share_their_entities_openly_are_no_copies() -> None:
    """Each question of the first set is about other entities; the second asks of all again."""
    every = templated("t", range(40), shared=True)
    # One frame for each entity: none of its own has a counterpart, and each of the others has.
    first = every.subset(np.unique(every.groups, return_index=True)[1])
    probe = plain().fit(*first.rows(0)[:2]).to_probe(ProbeCard(name="t/p", layers=(0,), hidden=24))
    again = templated("h", range(100, 140), shared=True)
    by_question = {"h": "question"}
    assert near_copies(probe, [first], [again], disjoint=by_question) == {}
    hidden = templated("h", range(100, 140), shared=False)
    assert near_copies(probe, [first], [hidden], disjoint=by_question)


@pytest.mark.parametrize("kind", ["words", "jitter", "clean"])
def test_altered_copies_are_found_by_their_number_and_nothing_else_is(kind: str) -> None:
    """Half of all words changed, or a jitter of .02 standard deviations: labels are random."""
    found = 0
    for seed in range(4 if kind != "clean" else 20):
        first, second = copied_sets(kind, seed)
        probe = (
            plain().fit(*first.rows(0)[:2]).to_probe(ProbeCard(name="t/p", layers=(0,), hidden=24))
        )
        said = near_copies(probe, [first], [second])
        found += bool(said)
        for (text,) in said.values():
            assert {"words": "by its words", "jitter": "by its activ"}.get(kind, "?") in text
            verdict = transfer_statement(
                "fit", evaluate_probe(probe, second, train=first), copies=(text,)
            )
            assert verdict.transfers is None
            assert "copies of training samples" in verdict.statement
    assert found == (0 if kind == "clean" else 4)
