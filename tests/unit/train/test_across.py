"""A probe carried to another model finds what it found, if the two streams hold the same."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler

from inspect_lens.errors import SpecError
from inspect_lens.probe import CaptureFacts, NeuralProbe, Probe, ProbeCard, auroc
from inspect_lens.train import (
    ActivationSet,
    LogisticProbe,
    evaluate_probe,
    fit_on,
    make_estimator,
    train_probe,
    transfer_probe,
)

LATENT, SOURCE, TARGET = 12, 24, 40
RNG = np.random.default_rng(5)
MIX = {SOURCE: RNG.normal(size=(LATENT, SOURCE)), TARGET: RNG.normal(size=(LATENT, TARGET))}
MODELS = {SOURCE: "org/first", TARGET: "org/second"}


def texts(name: str, n: int, seed: int) -> tuple[str, NDArray[np.float64], NDArray[np.bool_]]:
    """What both models read: the same latents, of which the first holds the label."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % 2 == 1
    z = rng.normal(size=(n, LATENT))
    z[:, 0] += 3.0 * labels
    return name, z, labels


def read(
    made: tuple[str, NDArray[np.float64], NDArray[np.bool_]], hidden: int, *, alike: bool = True
) -> ActivationSet:
    """The stream of one model; where not alike, one that holds nothing of the texts."""
    name, z, labels = made
    rng = np.random.default_rng([hidden, len(z)])
    latent = z if alike else rng.normal(size=z.shape)
    acts = tuple(
        ((row @ MIX[hidden])[None, None] + rng.normal(size=(2, 5, hidden))).astype(np.float32)
        for row in latent
    )
    return ActivationSet(
        name=name, model=MODELS[hidden], layers=(3, 7), acts=acts, labels=labels,
        groups=[f"{name}-{i // 2}" for i in range(len(z))],
        capture=CaptureFacts(engine=f"engine of {MODELS[hidden]}"),
        ids=[f"{name}-{i}" for i in range(len(z))],
        contents=[f"{name} {i}" for i in range(len(z))],
    )  # fmt: skip


@pytest.fixture(scope="module")
def probe() -> Probe:
    made = train_probe(
        LogisticProbe(), read(texts("train", 200, 0), SOURCE), name="org/first/label",
        control=read(texts("control", 800, 1), SOURCE),
    )  # fmt: skip
    assert isinstance(made, Probe)
    return made


PAIRS, TEST, HARMLESS = texts("pairs", 400, 2), texts("test", 300, 3), texts("harmless", 900, 4)


def test_it_finds_on_the_other_model_what_it_found(probe: Probe) -> None:
    made = transfer_probe(
        probe, read(PAIRS, SOURCE), read(PAIRS, TARGET), layer=7, control=read(HARMLESS, TARGET)
    )
    assert made.r2 > 0.9
    assert (made.n_pairs, made.n_held) == (400, 80)
    test = read(TEST, TARGET)
    ours = auroc(TEST[2], read(TEST, SOURCE).scores(probe))
    assert abs(auroc(TEST[2], test.scores(made.probe)) - ours) < 0.02
    found = evaluate_probe(made.probe, test, control=read(HARMLESS, TARGET))
    assert found.recall is not None
    assert found.recall > 0.3
    assert found.fpr is not None
    assert found.fpr < 0.05
    card = made.probe.card
    assert (card.name, card.layers, card.hidden) == ("second/label", (7,), TARGET)
    assert card.capture == CaptureFacts(engine="engine of org/second")
    assert card.model is not None
    assert card.model.name == "org/second"
    assert "Carried over from org/first/label of org/first" in card.notes[-1]
    assert (card.sweep, card.evaluations, card.calibration) == ((), (), None)
    assert card.thresholds[0].control == "harmless"
    # What trained the first probe still counts as seen, and so does what set the threshold.
    for name, n in (("train", 200), ("harmless", 900)):
        with pytest.raises(SpecError, match=r"samples were in training|set the threshold"):
            evaluate_probe(made.probe, read(texts(name, n, 9), TARGET))


def test_it_is_the_probe_read_through_a_ridge_map_of_the_whole_stream(probe: Probe) -> None:
    source, target = read(PAIRS, SOURCE), read(PAIRS, TARGET)
    made = transfer_probe(probe, source, target, layer=7, penalties=[10.0])
    x, y = target.pooled(7, "mean"), source.pooled(probe.layers[0], "mean")
    scaler = StandardScaler().fit(x.astype(np.float64))
    whole = Ridge(alpha=10.0).fit(scaler.transform(x.astype(np.float64)), y.astype(np.float64))
    fresh = read(TEST, TARGET)
    mapped = whole.predict(scaler.transform(fresh.pooled(7, "mean").astype(np.float64)))
    expected = [probe.score(row[None, None].astype(np.float32), probe.layers) for row in mapped]
    np.testing.assert_allclose(fresh.scores(made.probe), expected, atol=2e-4)


def test_streams_that_share_nothing_are_told(probe: Probe) -> None:
    with pytest.warns(UserWarning, match="explains? little"):
        made = transfer_probe(probe, read(PAIRS, SOURCE), read(PAIRS, TARGET, alike=False), layer=7)
    assert made.r2 < 0.1
    area = auroc(TEST[2], read(TEST, TARGET).scores(made.probe))
    assert abs(area - 0.5) < 0.35, "a direction by chance"
    assert made.probe.threshold is None


def test_what_does_not_pair_is_refused(probe: Probe) -> None:
    source, target = read(PAIRS, SOURCE), read(PAIRS, TARGET)
    with pytest.raises(SpecError, match="not those of 'pairs', by content"):
        transfer_probe(probe, source, read(TEST, TARGET), layer=7)
    with pytest.raises(SpecError, match=r"layer=4.*holds \[3, 7\]"):
        transfer_probe(probe, source, target, layer=4)
    few = range(30)
    with pytest.raises(SpecError, match="15 groups; allowed are 20"):
        transfer_probe(probe, source.subset(few), target.subset(few), layer=7)
    with pytest.raises(SpecError, match="model 'org/first'"):
        transfer_probe(probe, source, target, layer=7, control=read(HARMLESS, SOURCE))
    with pytest.raises(SpecError, match="are in 'pairs' and in 'pairs'"):
        transfer_probe(probe, source, target, layer=7, control=target)
    neural = fit_on(make_estimator("attention-lite", steps=2), source, 7).to_probe(
        ProbeCard(name="a/b", layers=(7,), hidden=SOURCE)
    )
    assert isinstance(neural, NeuralProbe)
    with pytest.raises(SpecError, match="allowed is a linear probe of one layer"):
        transfer_probe(neural, source, target, layer=7)  # type: ignore[arg-type]
