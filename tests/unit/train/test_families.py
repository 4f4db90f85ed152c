from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.probe import (
    HeadOutputs,
    HeadSpec,
    NeuralProbe,
    Probe,
    ProbeCard,
    auroc,
    delong_interval,
    head_outputs,
    parse_head_pool,
    pool_heads,
)
from inspect_lens.train import (
    EnsembleProbe,
    HeadProbe,
    LATProbe,
    LDAProbe,
    LogisticProbe,
    MassMeanProbe,
    MeanDifferenceProbe,
    SAEFeatureProbe,
    SklearnProbe,
    TorchLogisticProbe,
    make_estimator,
)
from inspect_lens.train.families._head import _coherent

H = 24
LINEAR: list[Any] = [
    LogisticProbe(), LogisticProbe(C=1e-3), LogisticProbe(fit_intercept=True),
    LogisticProbe(standardize=False), MeanDifferenceProbe(), MassMeanProbe(),
    MassMeanProbe(iid=True), LDAProbe(), LDAProbe(shrinkage=None), LDAProbe(shrinkage="ridge"),
    LATProbe(n_pairs=2000), TorchLogisticProbe(lr=0.02, epochs=200),
]  # fmt: skip


def planted(n: int, dprime: float, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two isotropic Gaussians `dprime` apart along a known unit direction."""
    rng = np.random.default_rng(seed)
    direction = np.random.default_rng(99).normal(size=H)
    direction /= np.linalg.norm(direction)
    y = np.repeat([0, 1], n)
    x = rng.normal(size=(2 * n, H)) + 5.0 + np.outer(y, dprime * direction)
    return x.astype(np.float32), y, direction


def card(layers: tuple[int, ...] = (3,), hidden: int = H, **more: Any) -> ProbeCard:
    return ProbeCard(name="t/p", layers=layers, hidden=hidden, **more)


@pytest.mark.parametrize("estimator", LINEAR, ids=str)
def test_it_finds_the_planted_direction_and_its_area(estimator: Any) -> None:
    # Unsupervised families need the planted direction to be where the data vary most.
    dprime = 4.0 if isinstance(estimator, LATProbe) else 1.5
    x, y, direction = planted(4000, dprime)
    fitted = clone(estimator).fit(x, y)
    probe = fitted.to_probe(card())
    assert float(probe.direction()[0] @ direction) >= 0.95
    # What the direction that was found can do at best is known in closed form.
    d = dprime * float(probe.direction()[0].astype(np.float64) @ direction)
    truth = 0.5 * (1.0 + math.erf(d / 2.0))
    fresh, labels, _ = planted(3000, dprime, seed=7)
    scores = fitted.decision_function(fresh)
    interval = delong_interval(labels, scores, confidence=0.999)
    assert interval.low <= truth <= interval.high
    np.testing.assert_allclose(probe.score_tokens(fresh[:50]), scores[:50], rtol=2e-3, atol=2e-3)
    proba = fitted.predict_proba(fresh)
    assert ((proba[:, 1] > 0.5) == (fitted.predict(fresh) == 1)).all()


def test_logistic_and_discriminant_equal_scikit_learn() -> None:
    x, y, _ = planted(300, 1.0)
    wide = x.astype(np.float64)
    for c in (0.1, 1e-3):
        z = StandardScaler().fit_transform(wide)
        reference = LogisticRegression(C=c, fit_intercept=False, max_iter=1000).fit(z, y)
        ours = LogisticProbe(C=c).fit(wide, y)
        np.testing.assert_allclose(
            ours.decision_function(wide), reference.decision_function(z), atol=1e-6
        )
    # Their form of a ridge of 0.01 mean variances, but for the length of the direction.
    own = {"ledoit-wolf": "auto", "ridge": 0.01 / 1.01}
    for shrinkage in ("ledoit-wolf", "ridge", 0.3, None):
        reference = LinearDiscriminantAnalysis(
            solver="lsqr",
            shrinkage=own.get(shrinkage, shrinkage),  # type: ignore[arg-type]
        ).fit(wide, y)
        if shrinkage == "ridge":
            reference.coef_, reference.intercept_ = (
                v / 1.01 for v in (reference.coef_, reference.intercept_)
            )
        ours = LDAProbe(shrinkage=shrinkage).fit(wide, y)
        np.testing.assert_allclose(
            ours.decision_function(wide), reference.decision_function(wide), atol=1e-6
        )


def test_mean_families_equal_their_closed_forms() -> None:
    x, y, _ = planted(200, 1.0)
    x = x.astype(np.float64)
    high, low = x[y == 1].mean(axis=0), x[y == 0].mean(axis=0)
    theta = high - low
    sigma = (np.cov(x[y == 1].T, bias=True) + np.cov(x[y == 0].T, bias=True)) / 2
    centred = x - (high + low) / 2
    forms = {
        MeanDifferenceProbe(): theta,
        MassMeanProbe(): theta,
        MassMeanProbe(iid=True): np.linalg.pinv(sigma, hermitian=True) @ theta,
        LDAProbe(shrinkage="ridge"): np.linalg.solve(
            sigma + 0.01 * np.trace(sigma) / H * np.eye(H), theta
        ),
    }
    for estimator, w in forms.items():
        fitted = estimator.fit(x, y)
        np.testing.assert_allclose(fitted.decision_function(x), centred @ w, atol=1e-6)
        np.testing.assert_allclose(
            fitted.predict_proba(x)[:, 1], 1 / (1 + np.exp(-(centred @ w))), atol=1e-6
        )


def test_activations_too_small_for_the_sources_atol_are_told() -> None:
    """Embeddings of some models have a variance below 1e-3: the direction would be zero."""
    x, y, _ = planted(100, 2.0)
    small = (x - 5.0).astype(np.float64) / 100.0
    with pytest.warns(UserWarning, match=r"atol=0.001: all variances lie below it"):
        assert not MassMeanProbe(iid=True).fit(small, y).coef_.any()
    assert MassMeanProbe(iid=True, atol=1e-9).fit(small, y).score(small, y) > 0.8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MassMeanProbe(iid=True).fit(x, y)
        # Rows that are all the same have no direction, and no warning either.
        LATProbe().fit(np.ones((8, 3)), np.arange(8) % 2)


def test_torch_logistic_minimises_the_same_loss() -> None:
    x, y, _ = planted(300, 1.0)
    ours = TorchLogisticProbe(lr=0.05, weight_decay=0.0, epochs=1500).fit(x, y)
    z = x.astype(np.float64) - x.mean(axis=0, dtype=np.float64)
    reference = LogisticRegression(C=1e12, fit_intercept=False, max_iter=2000, tol=1e-10).fit(z, y)
    np.testing.assert_allclose(ours.coef_, reference.coef_[0], atol=1e-3)


def test_pairs_of_groups_and_the_sign_rule() -> None:
    x, y, direction = planted(200, 2.0)
    # A nuisance direction that varies between groups and not within them.
    groups = np.tile(np.arange(200), 2)
    nuisance = np.zeros(H)
    nuisance[0] = 20.0
    x = x + np.outer(np.random.default_rng(1).normal(size=200)[groups], nuisance)
    paired = LATProbe(scaling="none").fit(x, y, groups).to_probe(card()).direction()[0]
    blind = LATProbe(scaling="none").fit(x, y).to_probe(card()).direction()[0]
    assert abs(float(paired @ direction)) > 0.6 > abs(float(blind @ direction))
    estimator = LATProbe(scaling="standard")
    straight = clone(estimator).fit(x, y, groups)
    turned = clone(estimator).fit(x, 1 - y, groups)
    assert straight.score(x, y) > 0.5 < turned.score(x, 1 - y)


def ragged(
    n: int, *, seed: int, marker: Callable[[np.ndarray, int], None]
) -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    y = np.arange(n) % 2
    made = []
    for label in y:
        x = rng.normal(size=(int(rng.integers(5, 14)), 8))
        marker(x, label)
        made.append(x.astype(np.float32))
    return made, y


def needle(x: np.ndarray, label: int) -> None:
    """One token of the positives is far out; every sequence has decoys of another kind."""
    x[1, 2] += 4.0
    if label:
        x[-2, 3] += 6.0


NEURAL: list[Any] = [
    make_estimator("attention", heads=2, lr=0.02, steps=250),
    make_estimator("attention-lite", lr=0.02, steps=250),
    make_estimator(
        "attention", heads=2, gate=True, mlp_sizes=(8,), dropout=0.1, lr=0.02, steps=250
    ),
    make_estimator("attention-gdm", heads=2, mlp_sizes=(16, 16), lr=3e-3, steps=250),
    make_estimator("multimax", heads=2, mlp_sizes=(16,), lr=5e-3, steps=250),
    make_estimator(
        "rolling-attention",
        pool="rolling_attention:3",
        heads=2,
        mlp_sizes=(16,),
        lr=5e-3,
        steps=250,
    ),
    make_estimator("gated-bipolar", heads=4, mlp_sizes=(16,), lr=5e-3, steps=250),
]


@pytest.mark.parametrize(
    "estimator",
    NEURAL,
    ids=str,
)
def test_neural_families_find_a_needle(estimator: HeadProbe) -> None:
    x, y = ragged(240, seed=1, marker=needle)
    fresh, labels = ragged(200, seed=2, marker=needle)
    fitted = clone(estimator).fit(x, y, np.arange(240) // 2)
    scores = fitted.decision_function(fresh)
    assert fitted.score(fresh, labels) > 0.85
    probe = fitted.to_probe(card(hidden=8))
    np.testing.assert_allclose([probe.score(s) for s in fresh[:20]], scores[:20], rtol=1e-6)
    short = clone(estimator).set_params(steps=30)
    twice = [clone(short).fit(x, y, np.arange(240) // 2).decision_function(fresh) for _ in "ab"]
    np.testing.assert_array_equal(*twice)


def written_out(w: dict[str, np.ndarray], x: np.ndarray, pool: str) -> float:
    """The network of the next test for one sample, in plain loops."""
    z = np.maximum(x @ w["w0"].T + w["b0"], 0.0)
    value = np.tanh(z @ w["value"].T)
    if pool == "bipolar":
        z = np.stack([(row - row.mean()) / math.sqrt(row.var() + 1e-5) for row in x])
        z = (z @ w["w0"].T + w["b0"]) ** 2
        value = z @ w["value"].T + w["value_bias"]
        value = value * np.log1p(np.exp(z @ w["gate"].T + w["gate_bias"]))
    query = 0.5 * z @ w["query"].T + np.arange(len(x))[:, None] * w["position"]

    def attend(part: slice) -> float:
        total = 0.0
        for h in range(value.shape[1]):
            weight = np.exp(query[part, h])
            total += float((weight * value[part, h]).sum() / weight.sum())
        return total

    width = min(3, len(x))
    total = {
        "attention": lambda: attend(slice(None)),
        "multimax": lambda: sum(max(value[:, h]) for h in range(value.shape[1])),
        "rolling_attention:3": lambda: max(
            attend(slice(i, i + width)) for i in range(len(x) - width + 1)
        ),
        "mean": lambda: value.sum() / len(x),
        "bipolar": lambda: sum(
            w["output"][0, h] * max(value[:, h]) - w["output"][1, h] * min(value[:, h])
            for h in range(value.shape[1])
        ),
    }[pool]()
    return float(total + w["bias"][0])


@pytest.mark.parametrize(
    "pool", ["attention", "multimax", "rolling_attention:3", "mean", "bipolar"]
)
def test_torch_and_numpy_compute_the_same_padded_or_alone(pool: str) -> None:
    rng = np.random.default_rng(0)
    spec = HeadSpec(gate=True, temperature=0.5)
    weights = {
        "w0": rng.normal(size=(5, 8)), "b0": rng.normal(size=5), "query": rng.normal(size=(3, 5)),
        "value": rng.normal(size=(3, 5)), "position": rng.normal(size=3) / 5,
        "bias": rng.normal(size=1),
    }  # fmt: skip
    if pool == "bipolar":
        spec = HeadSpec(activation="square", layer_norm=True)
        weights |= {
            "gate": rng.normal(size=(3, 5)) / 9, "gate_bias": rng.normal(size=3),
            "value_bias": rng.normal(size=3), "output": rng.normal(size=(2, 3)),
        }  # fmt: skip
    weights = {k: v.astype(np.float32).astype(np.float64) for k, v in weights.items()}
    probe = NeuralProbe(
        tensors=weights | {"mean": np.zeros(8), "scale": np.ones(8)},
        card=card(hidden=8, kind="neural", pool=pool, head=spec),
    )
    sequences = [rng.normal(size=(n, 8)) for n in (1, 2, 3, 7)]
    truth = [written_out(weights, s, pool) for s in sequences]
    np.testing.assert_allclose([probe.score(s) for s in sequences], truth, rtol=1e-12)
    alone = [written_out(weights, row[None], pool) for row in sequences[3]]
    np.testing.assert_allclose(probe.score_tokens(sequences[3]), alone, rtol=1e-12)
    x, mask = np.zeros((4, 7, 8)), np.zeros((4, 7), dtype=bool)
    for i, s in enumerate(sequences):
        x[i, : len(s)], mask[i, : len(s)] = s, True
    for xp, of in ((np, np.asarray), (torch, torch.from_numpy)):
        w = {k: of(v) for k, v in weights.items()}
        scores = pool_heads(
            head_outputs(w, spec, of(x), xp=xp), parse_head_pool(pool), w, of(mask), xp=xp
        )  # fmt: skip
        np.testing.assert_allclose(np.asarray(scores), truth, rtol=1e-12)


def test_the_smooth_maximum_reaches_every_token_and_no_padding() -> None:
    rng = np.random.default_rng(0)
    values, mask = torch.from_numpy(rng.normal(size=(2, 4, 3))), torch.ones(2, 4, dtype=torch.bool)
    mask[0, 3] = False
    values.requires_grad_()
    rule, out = parse_head_pool("multimax"), HeadOutputs(0.0 * values, values)
    tensors = {"bias": torch.zeros(1)}
    pool_heads(out, rule, tensors, mask, xp=torch, sharpness=1.0).sum().backward()
    assert values.grad is not None
    assert ((values.grad.abs() > 1e-6) == mask[..., None]).all()
    sharp = pool_heads(out, rule, tensors, mask, xp=torch, sharpness=1e4)
    plain = pool_heads(out, rule, tensors, mask, xp=torch)
    np.testing.assert_allclose(sharp.detach().numpy(), plain.detach().numpy(), rtol=1e-4)


def test_an_mlp_learns_what_no_direction_can() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1500, 4))
    y = (x[:, 0] * x[:, 1] > 0).astype(int)
    mlp = make_estimator("mlp", mlp_sizes=(32,), lr=0.01, steps=250).fit(x[:1000], y[:1000])
    assert mlp.score(x[1000:], y[1000:]) > 0.9
    assert LogisticProbe().fit(x[:1000], y[:1000]).score(x[1000:], y[1000:]) < 0.6
    probe = mlp.to_probe(card(hidden=4, pool="max"))
    assert probe.pool == "max"
    tokens = mlp.decision_function(x[:5])
    assert probe.score(x[:5]) == pytest.approx(tokens.max())


def test_a_bilinear_probe_learns_what_no_direction_can_and_the_engine_refuses_it() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1500, 6)) + 3.0
    y = ((x[:, 0] - 3) * (x[:, 1] - 3) > 0).astype(int)
    fitted = make_estimator("bilinear", lr=0.01, steps=250).fit(x[:1000], y[:1000])
    assert fitted.score(x[1000:], y[1000:]) > 0.9
    probe = fitted.to_probe(card(hidden=6))
    # A quadratic form: its second difference along any line is the same everywhere.
    line = np.outer(np.arange(5.0), rng.normal(size=6)) + rng.normal(size=6)
    second = np.diff(probe.score_tokens(line), 2)
    np.testing.assert_allclose(second, second[0], rtol=1e-6)
    with pytest.raises(UnsupportedError, match="squared units, and the engine runs linear"):
        probe.for_engine()
    bipolar = make_estimator("gated-bipolar", heads=2, steps=2).fit(
        *ragged(20, seed=0, marker=needle)
    )
    with pytest.raises(UnsupportedError, match="pool bipolar of 2 heads"):
        bipolar.to_probe(card(hidden=8)).for_engine()


def sustained(x: np.ndarray, label: int) -> None:
    """Positives hold some evidence in many tokens; the others hold much of it in one."""
    if label:
        x[-30:, 2] += 3.0
    else:
        x[len(x) // 2, 2] += 9.0


def spans(n: int, *, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    y = np.arange(n) % 2
    made = [rng.normal(size=(int(rng.integers(40, 60)), 8)).astype(np.float32) for _ in y]
    for x, label in zip(made, y, strict=True):
        sustained(x, int(label))
    return made, y


def test_evidence_that_stays_counts_and_a_spike_does_not() -> None:
    x, y = spans(200, seed=1)
    fresh, labels = spans(200, seed=2)
    estimator = make_estimator("segment-coherence", lr=0.02, steps=300)
    fitted = estimator.fit(x, y)
    scores = fitted.decision_function(fresh)
    spiky = make_estimator("multimax", heads=1, mlp_sizes=(), lr=0.02, steps=300).fit(x, y)
    assert auroc(labels, scores) > 0.95
    assert auroc(labels, spiky.decision_function(fresh)) < 0.9
    probe = fitted.to_probe(card(hidden=8))
    assert probe.pool == "ema_max:0.1"
    form = probe.for_engine()
    assert (form.kind, form.aggregate) == ("linear", "ema_max:0.1")
    weight, bias = (form.tensors[name].to_float32() for name in ("weight", "bias"))
    token_scores = fresh[0] @ weight[0] + bias
    state, largest = token_scores[0], token_scores[0]
    for score in token_scores[1:]:
        state = 0.1 * score + 0.9 * state
        largest = max(largest, state)
    assert scores[0] == pytest.approx(largest, rel=1e-4)


def test_a_segment_is_scored_as_the_paper_writes_it() -> None:
    rng = np.random.default_rng(0)
    how = HeadProbe(pool="ema_max:0.1", segment=3, n_segments=2, segment_variance=0.5)
    lengths = (2, 3, 9)
    tokens, mask = torch.zeros(3, 9), torch.zeros(3, 9, dtype=torch.bool)
    rows = [rng.normal(size=n) for n in lengths]
    for i, row in enumerate(rows):
        tokens[i, : len(row)], mask[i, : len(row)] = torch.from_numpy(row), True
    score, spread = _coherent(tokens.requires_grad_(), mask, how)
    for i, row in enumerate(rows):
        windows = [row[j : j + 3].mean() for j in range(len(row) - 2)]
        if not windows:
            assert float(score[i]) == pytest.approx(row.mean(), abs=1e-6)
            assert float(spread[i]) == 0.0
            continue
        assert float(score[i]) == pytest.approx(np.mean(sorted(windows)[-2:]), abs=1e-6)
        share = 1 / (1 + np.exp(-np.array(windows) / 2))
        centre = np.average(windows, weights=share)
        wanted = np.average((np.array(windows) - centre) ** 2, weights=share)
        assert float(spread[i]) == pytest.approx(wanted, abs=1e-6)
    (score.sum() + spread.sum()).backward()
    assert tokens.grad is not None
    assert torch.isfinite(tokens.grad).all()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pool": "max"}, "segment=0, pool='max'"),
        ({"pool": "attention", "segment": 4}, "segment=4, pool='attention'"),
        ({"pool": "", "segment": 4}, "segment=4, pool=''"),
        ({"segment_variance": 0.1}, "give segment, their length"),
        ({"activation": "gelu"}, "allowed are relu, square"),
        ({"activation": "square"}, "of layers; give mlp_sizes"),
        ({"queries": "ones"}, "allowed are zeros, random"),
        ({"heads": 0}, "1 or more"),
        ({"steps": 0}, "steps=0; allowed is 1 or more"),
        ({"batch": 0}, "batch=0; allowed is 1 or more"),
        ({"mlp_sizes": 16}, "widths above 0"),
        ({"pool": "mean", "position": True, "dropout": 0.5}, "position, dropout: of attention"),
    ],
)
def test_settings_that_nothing_acts_on_are_refused(settings: dict[str, Any], said: str) -> None:
    x, y = ragged(20, seed=0, marker=needle)
    with pytest.raises(SpecError, match=said):
        HeadProbe(**{"steps": 2, **settings}).fit(x, y)


def test_sequences_that_do_not_fit_are_refused() -> None:
    x, y = ragged(20, seed=0, marker=needle)
    with pytest.raises(SpecError, match="at least one token"):
        make_estimator("attention-lite", steps=2).fit([*x[:-1], np.zeros((0, 8))], y)
    with pytest.raises(SpecError, match="NaN"):
        make_estimator("attention-lite", steps=2).fit([*x[:-1], np.full((2, 8), np.nan)], y)
    fitted = make_estimator("attention-lite", steps=2).fit(x, y)
    with pytest.raises(SpecError, match="expecting 8 features"):
        fitted.decision_function([np.zeros((2, 9))])
    with pytest.raises(SpecError, match="width 8"):
        fitted.to_probe(card(hidden=9))


@pytest.mark.parametrize("stack", ["mean", "lr"])
def test_an_ensemble_weighs_layers_by_what_they_can_say(stack: str) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(600) % 2
    # The second layer says less, and says it a thousand times louder.
    good = rng.normal(size=(600, 6)) + np.outer(y, [2.0, 0, 0, 0, 0, 0])
    loud = 1000 * (rng.normal(size=(600, 6)) + np.outer(y, [0.2, 0, 0, 0, 0, 0]))
    x = np.concatenate([good, loud], axis=1)
    ensemble = EnsembleProbe(base=MeanDifferenceProbe(), n_layers=2, stack=stack)
    fitted = ensemble.fit(x[:400], y[:400], np.arange(400) // 2)
    assert fitted.score(x[400:], y[400:]) > 0.8
    probe = fitted.to_probe(card(layers=(1, 4), hidden=6))
    assert isinstance(probe, Probe)
    both = np.stack([good[400:], loud[400:]])
    np.testing.assert_allclose(
        probe.score_tokens(both), fitted.decision_function(x[400:]), rtol=1e-3, atol=1e-4
    )
    with pytest.raises(SpecError, match="allowed is a multiple"):
        EnsembleProbe(n_layers=5).fit(x, y)


def test_the_card_has_to_fit() -> None:
    x, y, _ = planted(20, 1.0)
    fitted = MeanDifferenceProbe().fit(x, y)
    with pytest.raises(SpecError, match="one layer of width 24"):
        fitted.to_probe(card(hidden=H + 1))
    with pytest.raises(SpecError, match="one layer"):
        fitted.to_probe(card(layers=(1, 2)))
    assert "normalize=False" in fitted.to_probe(card()).card.method
    assert fitted.to_probe(card()).card.source == "arXiv:2310.06824"


def test_mean_difference_is_zero_at_the_midpoint() -> None:
    x, y, _ = planted(300, 2.0)
    x = x + np.float32(500.0)
    fitted = MeanDifferenceProbe().fit(x, y)
    high, low = x[y == 1].mean(0, dtype=np.float64), x[y == 0].mean(0, dtype=np.float64)
    np.testing.assert_allclose(fitted.coef_, high - low)
    assert fitted.decision_function([(high + low) / 2])[0] == pytest.approx(0.0, abs=1e-6)
    gap = fitted.decision_function([high])[0] - fitted.decision_function([low])[0]
    assert gap == pytest.approx(float(np.sum((high - low) ** 2)))


WEIGHTED: list[Any] = [
    LogisticProbe(), LogisticProbe(fit_intercept=True), MeanDifferenceProbe(),
    MassMeanProbe(iid=True), LDAProbe(shrinkage="ridge"),
    LDAProbe(shrinkage=None, equal_priors=False), make_estimator("lr-pressure"),
    TorchLogisticProbe(epochs=20), SAEFeatureProbe(k=4), SAEFeatureProbe(raw=True),
    EnsembleProbe(base=MeanDifferenceProbe(), folds=2, stack="lr"),
    SklearnProbe(LogisticRegression(tol=1e-9)),
]  # fmt: skip


@pytest.mark.parametrize("estimator", WEIGHTED, ids=str)
def test_a_weight_of_two_is_a_row_twice_and_of_none_no_row(estimator: Any) -> None:
    # Few rows: heads hold none back, and an ensemble is calibrated on what it was fitted on.
    x, y, _ = planted(15, 1.0)
    counts = np.random.default_rng(0).integers(0, 3, len(y))
    if isinstance(estimator, EnsembleProbe):
        estimator = clone(estimator).set_params(folds=1)
    ours = clone(estimator).fit(x, y, sample_weight=counts.astype(float))
    again = clone(estimator).fit(np.repeat(x, counts, axis=0), np.repeat(y, counts))
    plain = clone(estimator).fit(x, y)
    a, b, c = (e.decision_function(x) for e in (ours, again, plain))
    np.testing.assert_allclose(a, b, atol=2e-2 * np.abs(b).max())
    assert np.abs(a - b).max() < 0.3 * np.abs(b - c).max()


def test_weights_without_a_meaning_are_refused() -> None:
    x, y, _ = planted(20, 1.0)
    for estimator in (LATProbe(), LDAProbe(), EnsembleProbe(base=LATProbe(), folds=2)):
        with pytest.raises(SpecError, match=r"sample_weight: .* allowed with weights are"):
            estimator.fit(x, y, sample_weight=np.ones(40))
    wrong = (np.ones(39), -np.ones(40), np.full(40, np.nan), np.zeros(40), np.ones((40, 2)))
    for weight in wrong:
        with pytest.raises(SpecError, match="sample_weight: "):
            MeanDifferenceProbe().fit(x, y, sample_weight=weight)
