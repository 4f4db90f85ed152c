from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe import Probe, ProbeCard
from inspect_lens.probe.card._files import render_card
from inspect_lens.train import (
    ActivationSet,
    EnsembleProbe,
    LogisticProbe,
    MeanDifferenceProbe,
    evaluate_probe,
    fit_on,
    fit_threshold,
    make_estimator,
    require_disjoint,
    select_layer,
    split_by_group,
    train_probe,
)

H, LAYERS = 16, (0, 2, 5)
DIRECTION = np.random.default_rng(99).normal(size=H)
DIRECTION /= np.linalg.norm(DIRECTION)


def planted(
    name: str,
    n: int = 80,
    *,
    seed: int,
    strength: tuple[float, ...] = (0.0, 1.5, 0.4),
    positive: float = 0.5,
    tokens: int = 4,
    groups: int = 20,
) -> ActivationSet:
    """Samples whose every token moves along DIRECTION by `strength` of its layer."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) < n * positive
    acts = []
    for label in labels:
        noise = rng.normal(size=(len(LAYERS), tokens + int(rng.integers(3)), H))
        shift = np.array(strength)[:, None, None] * DIRECTION
        acts.append((noise + 3.0 + label * shift).astype(np.float32))
    return ActivationSet(
        name=name,
        model="tiny",
        layers=LAYERS,
        acts=tuple(acts),
        labels=labels,
        groups=tuple(f"{name}-g{i % groups}" for i in range(n)),
        ids=tuple(f"{name}-{i}" for i in range(n)),
        columns={"phrasing": tuple(f"{name}-p{i % 3}" for i in range(n))},
    )


def control(n: int = 400, seed: int = 50) -> ActivationSet:
    return planted("control", n, seed=seed, positive=0.0)


class TestActivationSet:
    def test_save_then_load_is_bit_equal(self, tmp_path: Path) -> None:
        data = planted("a", 7, seed=1)
        loaded = ActivationSet.load(data.save(tmp_path / "sub" / "a.safetensors"))
        assert all(np.array_equal(x, y) for x, y in zip(loaded.acts, data.acts, strict=True))
        assert loaded.labels.tolist() == data.labels.tolist()
        facts = ("name", "model", "layers", "groups", "ids", "columns", "sha256")
        assert [getattr(loaded, f) for f in facts] == [getattr(data, f) for f in facts]

    def test_the_hash_sees_values_labels_and_groups(self) -> None:
        data = planted("a", 8, seed=1)
        assert planted("a", 8, seed=1).sha256 == data.sha256
        assert planted("a", 8, seed=2).sha256 != data.sha256
        assert planted("a", 8, seed=1, positive=0.25).sha256 != data.sha256
        assert planted("a", 8, seed=1, groups=2).sha256 != data.sha256

    def test_a_damaged_file_is_refused(self, tmp_path: Path) -> None:
        file = planted("a", 3, seed=1).save(tmp_path / "a.safetensors")
        file.write_bytes(file.read_bytes()[:-9])
        with pytest.raises(ArtifactError, match="not an activation set"):
            ActivationSet.load(file)
        with pytest.raises(ArtifactError, match="none: cannot be read"):
            ActivationSet.load(tmp_path / "none")

    def test_rows_are_the_selected_tokens(self) -> None:
        acts = [np.full((1, 3, 2), i, dtype=np.float32) for i in range(2)]
        data = ActivationSet(
            name="a", model="m", layers=(4,), acts=acts, labels=[0, 1], groups=["x", "y"],
            mask=([True, False, True], [False, True, False]),
        )  # fmt: skip
        x, y, groups = data.rows(4)
        assert x[:, 0].tolist() == [0, 0, 1]
        assert y.tolist() == [False, False, True]
        assert groups.tolist() == ["x", "x", "y"]
        with pytest.raises(SpecError, match="holds \\[4\\]"):
            data.rows(3)

    def test_scores_read_the_selected_tokens_only(self) -> None:
        acts = np.zeros((1, 3, 2), dtype=np.float32)
        acts[0, 1] = 100.0
        data = ActivationSet(
            name="a", model="m", layers=(4,), acts=(acts,), labels=[0], groups=["x"],
            mask=([True, False, True],),
        )  # fmt: skip
        card = ProbeCard(name="t/p", layers=(4,), hidden=2, pool="max")
        assert data.scores(Probe.from_direction([1.0, 1.0], card=card)).tolist() == [0.0]

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"labels": [0]}, "1 values for 2 samples"),
            ({"labels": [0, 2]}, "0 and 1"),
            ({"groups": ["x"]}, "groups: 1 values"),
            ({"columns": {"k": ["x"]}}, "k: 1 values"),
            ({"layers": (5, 4)}, "ascending"),
            ({"layers": (4, 5)}, "capture the same layers"),
            ({"mask": ([True] * 3, [False] * 3)}, "0 tokens selected"),
            ({"mask": ([True] * 3, [True] * 2)}, "one bool per token"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, change: dict[str, object], match: str) -> None:
        acts = (np.zeros((1, 3, 2)), np.ones((1, 3, 2)))
        base = {"labels": [0, 1], "groups": ["x", "y"], "layers": (4,), "acts": acts}
        with pytest.raises(SpecError, match=match):
            ActivationSet(name="a", model="m", **{**base, **change})

    def test_nan_is_refused(self) -> None:
        with pytest.raises(SpecError, match="NaN"):
            ActivationSet(
                name="a", model="m", layers=(4,), acts=(np.full((1, 1, 2), np.nan),), labels=[0],
                groups=["x"],
            )  # fmt: skip


class TestSplits:
    def test_no_group_straddles_and_both_classes_are_on_both_sides(self) -> None:
        rest, part = split_by_group(planted("a", 80, seed=1), fraction=0.25)
        assert len(rest) + len(part) == 80
        assert 12 <= len(part) <= 28
        require_disjoint(rest, part)
        assert min(rest.n_positive, rest.n_negative, part.n_positive, part.n_negative) > 0

    def test_a_straddling_group_is_refused(self) -> None:
        a = planted("a", 80, seed=1)
        with pytest.raises(SpecError, match="20 values are in 'a' and in 'a'"):
            require_disjoint(a, a.subset(range(40)))
        with pytest.raises(SpecError, match="has no key 'scenario'"):
            require_disjoint(a, a, key="scenario")

    def test_too_few_groups_are_refused(self) -> None:
        with pytest.raises(SpecError, match="2 groups"):
            split_by_group(planted("a", 80, seed=1, groups=2))


class TestSelection:
    def test_the_planted_layer_is_chosen(self) -> None:
        card = ProbeCard(name="t/p", layers=(0,), hidden=H)
        choice = select_layer(
            MeanDifferenceProbe(), planted("a", 80, seed=1), planted("b", 60, seed=2), card=card
        )
        assert choice.probe.layers == (2,)
        assert [s.layer for s in choice.sweep] == list(LAYERS)
        assert max(choice.sweep, key=lambda s: s.auroc).layer == 2

    def test_ties_go_to_the_widest_separation(self) -> None:
        strong = (40.0, 80.0, 60.0)
        card = ProbeCard(name="t/p", layers=(0,), hidden=H)
        choice = select_layer(
            MeanDifferenceProbe(),
            planted("a", 40, seed=1, strength=strong),
            planted("b", 40, seed=2, strength=strong),
            card=card,
        )
        assert [s.auroc for s in choice.sweep] == [1.0, 1.0, 1.0]
        assert choice.probe.layers == (2,)

    def test_shared_groups_and_missing_classes_are_refused(self) -> None:
        a, card = planted("a", 80, seed=1), ProbeCard(name="t/p", layers=(0,), hidden=H)
        with pytest.raises(SpecError, match="are in 'a' and in"):
            select_layer(MeanDifferenceProbe(), a, a, card=card)
        b = planted("b", seed=3)
        for data in (a, b):  # low scores of what was fitted would make any layer look good
            with pytest.raises(SpecError, match=r"id: .* are in"):
                select_layer(MeanDifferenceProbe(), a, b, card=card, control=data.negatives())
        own = planted("c", seed=4)
        ids = tuple(i if y else j for i, j, y in zip(a.ids, own.ids, own.labels, strict=True))
        mixed = replace(own, ids=ids)  # of which the positives do not count
        assert select_layer(MeanDifferenceProbe(), a, b, card=card, control=mixed).sweep
        with pytest.raises(SpecError, match="both classes"):
            select_layer(MeanDifferenceProbe(), a, control(50), card=card)
        with pytest.raises(SpecError, match="names at least one"):
            select_layer(MeanDifferenceProbe(), a, planted("b", seed=3), card=card, layers=[])


class TestThreshold:
    def test_it_records_what_it_did(self) -> None:
        threshold = fit_threshold(np.arange(500.0), 0.01, control="alpaca")
        assert threshold.value == 495.0
        assert (threshold.n_control, threshold.n_above) == (500, 4)
        assert threshold.interval.low < 4 / 500 < threshold.interval.high

    def test_a_small_control_set_is_refused_unless_allowed(self) -> None:
        with pytest.raises(SpecError, match="300 or more"):
            fit_threshold(np.arange(299.0), 0.01)
        assert fit_threshold(np.arange(299.0), 0.01, allow_few=True).n_above == 2


class TestTrainProbe:
    @pytest.mark.parametrize("estimator", [LogisticProbe(), MeanDifferenceProbe()], ids=str)
    def test_from_sets_to_a_saved_probe(self, estimator: LogisticProbe, tmp_path: Path) -> None:
        train, held = planted("train", 120, seed=1), planted("held", 100, seed=2)
        # Same groups as the training set, kept apart by the phrasing.
        twin = ActivationSet(
            name="twin", model="tiny", layers=LAYERS, acts=held.acts, labels=held.labels,
            groups=train.groups[:100], ids=[f"twin-{i}" for i in range(100)],
            columns={"phrasing": held.columns["phrasing"]},
        )  # fmt: skip
        made = train_probe(
            estimator, train, name="tiny/p", control=control(), held_out=[held, twin],
            disjoint={"twin": "phrasing"}, command="make probe",
            notes=["planted"],
        )  # fmt: skip
        probe = Probe.load(made.save(tmp_path / "tiny" / "p"))
        card = probe.card
        assert probe.layers == (2,)
        assert float(probe.direction()[0] @ DIRECTION) > 0.8
        assert card.training is not None
        assert (
            card.training.selection_n + card.training.n_positive + card.training.n_negative == 120
        )
        assert card.training.n_groups < 20
        assert [e.name for e in card.evaluations] == ["held", "twin"]
        evaluation = card.evaluations[0]
        assert evaluation.auroc is not None
        assert evaluation.auroc > 0.95
        assert evaluation.auroc_interval is not None
        assert evaluation.auroc_interval.low < evaluation.auroc
        assert evaluation.fpr is not None
        assert evaluation.fpr < 0.1
        assert probe.threshold is not None
        assert probe.threshold.control_sha256 == control().sha256
        assert card.command == "make probe"
        assert card == made.card

    def test_the_same_input_gives_the_same_file(self) -> None:
        def build() -> str:
            return train_probe(
                LogisticProbe(), planted("train", 80, seed=1), name="t/p", control=control(),
            ).sha256  # fmt: skip

        assert build() == build()

    def test_labels_of_the_heldout_set_do_not_move_the_probe(self) -> None:
        def build(held: ActivationSet) -> str:
            return train_probe(
                MeanDifferenceProbe(), planted("train", 80, seed=1), name="t/p",
                control=control(), held_out=[held],
            ).sha256  # fmt: skip

        flipped = planted("held", 60, seed=2, strength=(3.0, -3.0, 0.0))
        assert build(planted("held", 60, seed=2)) == build(flipped)

    @pytest.mark.parametrize(
        ("of", "shared", "said"),
        [
            ("train", "groups", "group: 15 values are in"),
            ("train", "acts", "activations: 30 of 40 samples of 'held' are also in 'train' under"),
            ("train", "ids", "id: 30 values are in 'train' and in 'held'"),
            # A threshold may not see what it is judged on.
            ("control", "ids", "id: 40 values are in 'control' and in 'held'"),
        ],
    )
    def test_what_stands_in_two_sets_is_refused(self, of: str, shared: str, said: str) -> None:
        sets = {"train": planted("train", 80, seed=1), "control": control()}
        twice, n = sets[of], 40
        own = {"groups": [f"h{i}" for i in range(n)], "ids": [f"h{i}" for i in range(n)]}
        held = ActivationSet(
            name="held", model="tiny", layers=LAYERS, labels=twice.labels[:n],
            **{"acts": planted("h", n, seed=9).acts} | own | {shared: getattr(twice, shared)[:n]},
        )  # fmt: skip
        with pytest.raises(SpecError, match=said):
            train_probe(MeanDifferenceProbe(), **sets, name="t/p", held_out=[held])

    def test_sets_of_another_model_and_unknown_names_are_refused(self) -> None:
        train, other = planted("train", 80, seed=1), planted("held", 40, seed=2)
        object.__setattr__(other, "model", "bigger")
        with pytest.raises(SpecError, match="'bigger'"):
            train_probe(
                MeanDifferenceProbe(), train, name="t/p", control=control(), held_out=[other]
            )
        with pytest.raises(SpecError, match="disjoint="):
            train_probe(
                MeanDifferenceProbe(), train, name="t/p", control=control(),
                disjoint={"nope": "group"},
            )  # fmt: skip

    def test_evaluation_of_one_class_says_so(self) -> None:
        probe = train_probe(
            MeanDifferenceProbe(), planted("train", 80, seed=1), name="t/p", control=control(),
        )  # fmt: skip
        measured = evaluate_probe(probe, control(100, seed=60))
        assert measured.auroc is None
        assert measured.recall is None
        assert measured.fpr is not None


def test_a_family_takes_the_rows_of_its_source_and_the_card_says_which() -> None:
    """The stakes probe is trained on means; on tokens it is another probe under its name."""
    train, held = planted("train", 80, seed=1), control()

    def card(family: str, **how: object) -> ProbeCard:
        estimator = make_estimator(family, **({} if family.startswith("lr") else {"steps": 2}))
        return train_probe(
            estimator, train, name="t/p", control=held, layers=[2],
            **how,  # type: ignore[arg-type]
        ).card  # fmt: skip

    facts = {f: card(f) for f in ("lr", "lr-pressure", "attention-lite")}
    rows = {f: c.training.rows for f, c in facts.items() if c.training}
    assert rows == {"lr": "tokens", "lr-pressure": "mean", "attention-lite": None}
    assert [c.source for c in facts.values()][:2] == ["arXiv:2502.03407", "arXiv:2506.10805"]
    assert "one per sample, the mean of its tokens" in render_card(facts["lr-pressure"], sha256="")
    named = card("lr", rows="mean")
    assert named.training is not None
    assert named.training.rows == "mean"
    assert "tokens" not in named.method
    # Equal to a regression on the means, whatever the name.
    fitted = fit_on(make_estimator("lr-pressure"), train, 2)
    means = np.stack([s.mean(axis=0) for s in train.sequences(2)])
    plain = make_estimator("lr", C=1e-3, max_iter=10_000).fit(means, train.labels)
    np.testing.assert_array_equal(fitted.coef_, plain.coef_)
    joint = fit_on(EnsembleProbe(base=make_estimator("lr-pressure"), n_layers=2), train, (0, 2))
    assert joint.n_features_in_ == 2 * H
