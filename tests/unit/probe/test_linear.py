from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe import Evaluation, Interval, Probe, ProbeCard, Threshold, Transfer

H = 16


def make(layers: tuple[int, ...] = (3,), *, seed: int = 0, **card: object) -> Probe:
    rng = np.random.default_rng(seed)
    shape = (len(layers), H)
    return Probe(
        weight=rng.normal(size=shape),
        bias=rng.normal(size=len(layers)),
        mean=rng.normal(size=shape),
        scale=rng.uniform(0.5, 2.0, size=shape),
        card=ProbeCard(name="tiny/test", layers=layers, hidden=H, **card),
    )


def acts(layers: int = 1, tokens: int = 7, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(layers, tokens, H)).astype(np.float32)


def test_score_is_the_formula() -> None:
    probe, x = make((1, 4)), acts(2)
    per_layer = [
        ((x[i].astype(np.float64) - probe.mean[i]) / probe.scale[i]) @ probe.weight[i]
        + probe.bias[i]
        for i in range(2)
    ]
    np.testing.assert_allclose(probe.score_tokens(x), np.mean(per_layer, axis=0), rtol=1e-6)
    assert probe.score(x) == pytest.approx(np.mean(per_layer), rel=1e-6)


def test_layers_are_picked_by_number() -> None:
    probe, x = make((1, 4)), acts(4)
    expected = probe.score_tokens(x[[3, 0]])
    np.testing.assert_array_equal(probe.score_tokens(x, layers=[4, 2, 3, 1]), expected)


def test_two_axes_are_one_layer() -> None:
    probe, x = make(), acts()
    np.testing.assert_array_equal(probe.score_tokens(x[0]), probe.score_tokens(x))
    np.testing.assert_array_equal(probe.score_tokens(x[0], [3]), probe.score_tokens(x))


def test_a_token_scores_the_same_alone_in_any_order_and_in_any_batch() -> None:
    probe, x = make((1, 4)), acts(2, tokens=3000)
    scores = probe.score_tokens(x)
    order = np.random.default_rng(0).permutation(3000)
    np.testing.assert_array_equal(probe.score_tokens(x[:, order]), scores[order])
    np.testing.assert_array_equal(probe.score_tokens(x[:, 1700:1701]), scores[1700:1701])


def test_a_large_common_offset_does_not_eat_the_digits() -> None:
    probe = make()
    shifted = Probe(
        weight=probe.weight, bias=probe.bias, mean=probe.mean + 4096.0, scale=probe.scale,
        card=probe.card,
    )  # fmt: skip
    x = np.round(acts() * 64) / 64  # exact in float32 after the shift
    mean = (shifted.mean - 4096.0).astype(np.float32)
    base = Probe(
        weight=probe.weight, bias=probe.bias, mean=mean, scale=probe.scale, card=probe.card
    )
    np.testing.assert_allclose(
        shifted.score_tokens((x + 4096).astype(np.float32)), base.score_tokens(x), atol=1e-9
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_are_refused(bad: float) -> None:
    x = acts()
    x[0, 2, 5] = bad
    with pytest.raises(SpecError, match="1 of 7 tokens hold NaN"):
        make().score_tokens(x)


@pytest.mark.parametrize("shape", [(1, 7, H + 1), (7, H - 1), (H,), (1, 1, 7, H)])
def test_wrong_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(SpecError, match="allows"):
        make().score_tokens(np.zeros(shape))


def test_a_missing_layer_is_refused_and_never_guessed() -> None:
    with pytest.raises(SpecError, match="layer 3 is missing"):
        make().score_tokens(acts(2), layers=[1, 2])
    with pytest.raises(SpecError, match="pass layers="):
        make().score_tokens(acts(2))
    with pytest.raises(SpecError, match="one layer number per row"):
        make().score_tokens(acts(2), layers=[3])


def test_no_token_is_refused() -> None:
    with pytest.raises(SpecError, match="at least one token"):
        make().score(acts(tokens=0))


def test_pool_can_be_overridden() -> None:
    probe, x = make(), acts()
    assert probe.score(x, pool="max") == probe.score_tokens(x).max()


def test_other_facts_on_the_card_leave_the_tensors_as_they_are() -> None:
    probe = make()
    other = probe.with_card(pool="max", notes=("new",))
    assert (other.pool, other.card.notes, probe.card.notes) == ("max", ("new",), ())
    np.testing.assert_array_equal(other.score_tokens(acts()), probe.score_tokens(acts()))
    assert other.score(acts()) == probe.score(acts(), pool="max")
    with pytest.raises(
        SpecError, match="note: is no field of a probe's card; did you mean 'notes'"
    ):
        probe.with_card(note=("new",))


def test_direction_is_the_gradient() -> None:
    probe = make((1, 4))
    raw = probe.weight / probe.scale
    unit = probe.direction()
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(unit, raw / np.linalg.norm(raw, axis=1, keepdims=True), rtol=1e-5)


def test_at_takes_one_layer_and_drops_a_threshold_of_several() -> None:
    threshold = Threshold(
        value=0.5, fpr=0.01, control="c", n_control=300, n_above=2,
        interval=Interval(low=0, high=1, method="m"),
    )  # fmt: skip
    measured = Evaluation(
        name="held", sha256="0", n_positive=9, n_negative=9, disjoint_by="group", auroc=0.9
    )
    verdict = Transfer(set="held", transfers=True, bar=0.8, statement="it does")
    judged: dict[str, Any] = {"evaluations": (measured,), "transfers": (verdict,)}
    probe, x = make((1, 4), thresholds=(threshold,), **judged), acts(2)
    one = probe.at(4)
    assert one.layers == (4,)
    assert one.threshold is None
    assert (one.card.evaluations, one.card.transfers) == ((), ()), "they are of both layers"
    both = [probe.at(layer).score_tokens(x, [1, 4]) for layer in (1, 4)]
    np.testing.assert_allclose(np.mean(both, axis=0), probe.score_tokens(x))
    alone = make((3,), thresholds=(threshold,), **judged).at(3)
    assert alone.threshold == threshold
    assert alone.card.evaluations == judged["evaluations"]
    with pytest.raises(ArtifactError, match="directions at"):
        probe.at(2)


def test_from_direction_projects() -> None:
    card = ProbeCard(name="t/d", layers=(3,), hidden=H)
    direction = np.eye(H)[2]
    probe = Probe.from_direction(direction, card=card, bias=-1.0)
    x = acts()
    np.testing.assert_allclose(probe.score_tokens(x), x[0, :, 2] - 1.0)


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("weight", np.zeros((1, H + 1)), "weight: shape"),
        ("bias", np.zeros(2), "bias: shape"),
        ("mean", np.full((1, H), np.nan), "mean: holds NaN"),
        ("scale", np.zeros((1, H)), "scale: holds values <= 0"),
    ],
)
def test_wrong_fields_are_refused(field: str, value: np.ndarray, match: str) -> None:
    base = make()
    fields = {k: getattr(base, k) for k in ("weight", "bias", "mean", "scale", "card")}
    with pytest.raises(SpecError, match=match):
        Probe(**{**fields, field: value})


def test_a_probe_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        make().weight[0, 0] = 1.0


@pytest.mark.parametrize(
    "bad", [{"layers": (4, 1)}, {"layers": (1, 1)}, {"layers": ()}, {"layers": (-1,)},
            {"pool": "median"}, {"positions": "assistant"}, {"hidden": 0}, {"name": ""}]
)  # fmt: skip
def test_wrong_cards_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        ProbeCard.model_validate({"name": "t/d", "layers": (3,), "hidden": H, **bad})
