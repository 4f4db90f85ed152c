"""The forms in which the engine runs a probe say what the probe says of the same rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inspect_lens.errors import UnsupportedError
from inspect_lens.probe import HeadSpec, Interval, NeuralProbe, Probe, ProbeCard, Threshold
from inspect_lens.spec import EngineProbe

H, HEADS, LAYER = 6, 3, 2


def probe(
    pool: str, *, relu: int = 0, heads: int = HEADS, seed: int = 0, **more: Any
) -> NeuralProbe:
    rng = np.random.default_rng(seed)
    tensors, width = {"mean": rng.normal(size=H), "scale": rng.uniform(0.5, 2, size=H)}, H
    for i in range(relu):
        tensors |= {f"w{i}": rng.normal(size=(5, width)), f"b{i}": rng.normal(size=5)}
        width = 5
    tensors |= {"value": rng.normal(size=(heads, width)), "bias": rng.normal(size=1)}
    if pool == "attention":
        tensors["query"] = rng.normal(size=(heads, width))
    tensors |= {k: np.asarray(v) for k, v in more.pop("tensors", {}).items()}
    interval = Interval(low=0.0, high=0.02, method="m")
    thresholds = tuple(
        Threshold(value=v, fpr=f, control="c", n_control=99, n_above=1, interval=interval)
        for v, f in ((0.25, 0.05), (0.75, 0.01))
    )
    card = ProbeCard(
        name="t/n", layers=(LAYER,), hidden=H, kind="neural", pool=pool, head=HeadSpec(**more),
        thresholds=thresholds,
    )  # fmt: skip
    return NeuralProbe(tensors=tensors, card=card)


def applied(form: EngineProbe, x: np.ndarray) -> np.ndarray:
    """The formulas of `EngineProbe`, token by token."""
    t = {name: tensor.to_float32().astype(np.float64) for name, tensor in form.tensors.items()}
    if form.kind == "linear":
        return x @ t["weight"][0] + form.bias("bias")
    if form.kind == "mlp":
        return np.maximum(x @ t["w1"][0].T + t["b1"], 0) @ t["w2"] + form.bias("b2")
    logits, values = x @ t["query"].T, x @ t["value"].T
    out = []
    for n in range(1, len(x) + 1):
        weight = np.exp(logits[:n] - logits[:n].max(axis=0))
        out.append(((weight * values[:n]).sum(axis=0) / weight.sum(axis=0)).sum())
    return np.array(out) + form.bias("bias")


@given(seed=st.integers(0, 99), tokens=st.integers(1, 20), relu=st.integers(0, 1))
def test_token_scores_are_those_of_the_probe(seed: int, tokens: int, relu: int) -> None:
    made = probe("mean", relu=relu, seed=seed)
    x = np.random.default_rng(seed + 1).normal(size=(tokens, H)) * 3 + 1
    form, pooled = made.engine_forms()
    assert pooled is None
    assert form.kind == ("mlp" if relu else "linear")
    np.testing.assert_allclose(applied(form, x), made.score_tokens(x), rtol=1e-5, atol=1e-5)
    whole = made.for_engine()
    assert (whole.sha256, whole.aggregate, whole.threshold) == (form.sha256, "mean", None)


@given(seed=st.integers(0, 99), tokens=st.integers(1, 20))
def test_attention_at_a_token_is_the_score_of_the_text_up_to_it(seed: int, tokens: int) -> None:
    made = probe("attention", seed=seed, temperature=0.5)
    x = np.random.default_rng(seed + 1).normal(size=(tokens, H)) * 3 + 1
    form, pooled = made.engine_forms()
    assert pooled is not None
    assert (form.kind, pooled.kind, made.for_engine().sha256) == (
        "linear", "attention", pooled.sha256,
    )  # fmt: skip
    truth = [made.score(x[: n + 1]) for n in range(tokens)]
    np.testing.assert_allclose(applied(pooled, x), truth, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(applied(form, x), made.score_tokens(x), rtol=1e-5, atol=1e-5)


def test_multimax_of_one_head_is_the_largest_token() -> None:
    made = probe("multimax", heads=1)
    x = np.random.default_rng(1).normal(size=(7, H))
    assert made.for_engine().aggregate == "max"
    assert applied(made.for_engine(), x).max() == pytest.approx(made.score(x), rel=1e-5)


@pytest.mark.parametrize(
    ("pool", "more", "why"),
    [
        ("mean", {"relu": 2}, "more than one ReLU"),
        ("mean", {"gate": True}, "gate"),
        ("attention", {"relu": 1}, "ReLU layer before attention"),
        ("attention", {"tensors": {"position": np.ones(HEADS)}}, "slope"),
        ("multimax", {}, "multimax of 3 heads"),
        ("rolling_attention:3", {}, "rolling_attention"),
    ],
)
def test_what_the_engine_cannot_run_is_refused_by_name(
    pool: str, more: dict[str, Any], why: str
) -> None:
    made = probe(pool, **more)
    for form in (made.for_engine, made.engine_forms):
        with pytest.raises(UnsupportedError, match=why):
            form()


@given(seed=st.integers(0, 999), tokens=st.integers(2, 40), hidden=st.sampled_from([8, 300, 9000]))
def test_a_linear_score_is_of_its_own_row_and_close_to_exact(
    seed: int, tokens: int, hidden: int
) -> None:
    rng = np.random.default_rng(seed)
    card = ProbeCard(name="t/l", layers=(0, 1), hidden=hidden)
    mean, scale = rng.normal(size=(2, hidden)), rng.uniform(0.5, 2, size=(2, hidden))
    made = Probe(
        weight=rng.normal(size=(2, hidden)), bias=np.ones(2), mean=mean, scale=scale, card=card
    )
    x = rng.normal(size=(2, tokens, hidden)).astype(np.float32) * 5
    found = made.score_tokens(x)
    alone = [made.score_tokens(x[:, i : i + 1])[0] for i in range(tokens)]
    assert found.tolist() == alone  # to the bit: neighbours do not count
    exact = made.score_tokens(x.astype(np.float64))
    size = np.abs((x - made.mean[:, None]) * (made.weight / made.scale)[:, None]).sum(axis=(0, 2))
    assert np.all(abs(found - exact) <= 3e-7 * size)
    form, _ = made.engine_forms()
    w = form.tensors["weight"].to_float32().astype(np.float64)
    assert np.all(abs(np.einsum("lth,lh->t", x, w) + form.bias("bias") - exact) <= 1e-6 * size)
