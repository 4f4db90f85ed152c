"""What every probe has, whatever it computes; and neural probes: MLP, attention or MultiMax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens._base.artifact import Artifact, ArtifactKind, read_only
from inspect_lens.errors import ArtifactError, SpecError, UnsupportedError, did_you_mean
from inspect_lens.probe.card._card import ProbeCard, Statistic, Threshold
from inspect_lens.probe.card._files import PROBE, render_card
from inspect_lens.probe.pooling._pool import (
    HeadOutputs,
    HeadSpec,
    head_outputs,
    is_learned,
    parse_head_pool,
    pool_head,
    pool_scores,
    token_values,
)
from inspect_lens.spec import EngineProbe, Positions, Site, as_array

__all__ = ["NeuralProbe"]

Floats = NDArray[np.float64]


def require_finite(scores: Floats) -> None:
    """Refuse scores (tokens, ...) of activations that hold NaN or infinity."""
    if not np.isfinite(scores).all():
        wrong = ~np.isfinite(scores.reshape(len(scores), -1)).all(axis=1)
        raise SpecError(
            f"acts: {int(wrong.sum())} of {wrong.size} tokens hold NaN or infinity; allowed are "
            "finite numbers; rows that were not captured must be left out, not filled"
        )


class CardProbe(Artifact):
    """Base of `Probe` and `NeuralProbe`, which hold a card and tensors."""

    KIND: ClassVar[ArtifactKind] = PROBE
    card: ProbeCard

    def _render(self, digest: str) -> str:
        return render_card(self.card, sha256=digest)

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.card.hidden

    @property
    def site(self) -> Site:
        """Place in the block."""
        return self.card.site

    @property
    def positions(self) -> Positions:
        """Tokens that the probe reads."""
        return self.card.positions

    @property
    def pool(self) -> str:
        """How tokens become one score, such as `mean` or `attention`."""
        return self.card.pool

    @property
    def threshold(self) -> Threshold | None:
        """The first stored threshold for the probe's score of a whole answer."""
        return next(iter(self.card.thresholds_for(self.card.answer)), None)

    def with_card(self, **facts: object) -> Self:
        """The same probe with other facts on its card, which are not judged again.

        Raises:
            SpecError: the card has no such field.
        """
        for name in facts:
            if name not in ProbeCard.model_fields:
                way = did_you_mean(name, ProbeCard.model_fields)
                raise SpecError(f"{name}: is no field of a probe's card; {way}")
        return replace(self, card=self.card.model_copy(update=facts))  # type: ignore[type-var]

    def running_scores(
        self, acts: ArrayLike, layers: Sequence[int] | None = None, *, pool: str | None = None
    ) -> Floats:
        """What `Statistic.of` makes its number of, (tokens,) float64.

        It is the score of each token, and for a pool that a probe has learned, such as attention,
        the score of the text up to each token.

        Args:
            acts: as in `score_tokens`.
            layers: as in `score_tokens`.
            pool: of the statistic; the probe's own by default.
        """
        return self.score_tokens(acts, layers)

    def score_tokens(self, acts: ArrayLike, layers: Sequence[int] | None = None) -> Floats:
        """Score every token (tokens,) float64; larger means more of the concept.

        Args:
            acts: (layers, tokens, hidden), or (tokens, hidden) for one layer; the raw residual
                stream, unscaled.
            layers: layer of each row of the first axis (one layer for two axes); by default
                the layers of the probe, in order. More layers than the probe reads are fine.

        Raises:
            SpecError: wrong number of axes, wrong width, a layer is missing, or NaN.
        """
        raise NotImplementedError

    def score(
        self,
        acts: ArrayLike,
        layers: Sequence[int] | None = None,
        *,
        pool: str | None = None,
        ends: ArrayLike | None = None,
    ) -> float:
        """Score a sample: its tokens, then the pool.

        Args:
            acts: as in `score_tokens`, already cut to the positions to read.
            layers: as in `score_tokens`.
            pool: another pool than the probe's own; its thresholds do not hold for that.
            ends: (tokens,) bool, sentence ends, for the pool `sentence_mean_max`; see
                `sentence_ends`.

        Raises:
            SpecError: as `score_tokens`, there is no token, or no sentence ends where they are
                needed.
        """
        return pool_scores(self.score_tokens(acts, layers), pool or self.pool, ends=ends)

    def at(self, layer: int) -> Self:
        """The probe of one of its layers; what was set for or measured on several is dropped.

        Raises:
            ArtifactError: the probe does not read that layer.
        """
        if layer not in self.layers:
            raise ArtifactError(
                f"layer={layer}: probe {self.name!r} has directions at {list(self.layers)} only; "
                "they mean nothing elsewhere; choose one of these, or train a probe at that "
                "layer"
            )
        return self

    def for_engine(self) -> EngineProbe:
        """The probe as the engine runs it: of the same aggregated score, its scaler folded in.

        It has the card's threshold for an alarm on its pool, if there is one (`inspect-lens probe
        calibrate --for alarm`); without it a request's alarm has to bring a number.

        Raises:
            UnsupportedError: the engine has no form for it: a gate, more than one ReLU layer,
                attention behind a ReLU layer or with a slope over positions, squared units, a
                layer norm, or the pools `bipolar`, `rolling_attention` and, with several heads,
                `multimax`.
        """
        raise NotImplementedError

    def engine_forms(self) -> tuple[EngineProbe, EngineProbe | None]:
        """The engine's form whose token scores are those of `score_tokens`, and another.

        That is for the pool `attention`, of the score of the text up to each token; else None.

        Raises:
            UnsupportedError: the engine has no form for the tokens, or none for the pool.
        """
        return self.for_engine(), None

    def _picked(
        self, acts: ArrayLike, layers: Sequence[int] | None
    ) -> tuple[NDArray[Any], list[int]]:
        """Activations (layers, tokens, hidden), and the place of each layer of the probe there."""
        array = as_array(acts)
        if array.ndim == 2:
            array = array[None]
        if array.ndim != 3 or array.shape[2] != self.hidden:
            raise SpecError(
                f"acts: shape {np.shape(acts)}; probe {self.name!r} allows (layers, tokens, "
                f"{self.hidden}) or (tokens, {self.hidden}); use activations of "
                f"{self.card.model.name if self.card.model else 'the model it was trained on'}"
            )
        n = len(array)
        if layers is None and n == len(self.layers):
            return array, list(range(n))
        if layers is None or len(layers) != n:
            raise SpecError(
                f"layers={None if layers is None else list(layers)}: the activations have {n} "
                f"layers and probe {self.name!r} reads {list(self.layers)}; allowed is one layer "
                "number per row; pass layers="
            )
        missing = [layer for layer in self.layers if layer not in layers]
        if missing:
            raise SpecError(
                f"layers={list(layers)}: layer {missing[0]} is missing; probe {self.name!r} reads "
                f"{list(self.layers)}; capture these layers"
            )
        return array, [list(layers).index(layer) for layer in self.layers]


Tensors = Mapping[str, Floats]


def neural_form(tensors: Tensors, card: ProbeCard) -> EngineProbe:
    """The form whose aggregated score is that of the probe."""
    pool = parse_head_pool(card.pool)
    many = pool.name == "multimax" and len(tensors["value"]) > 1
    if pool.name == "attention":
        made = attention_form(tensors, card)
    elif pool.name in ("rolling_attention", "bipolar") or many:
        raise _unsupported(card, f"pool {card.pool} of {len(tensors['value'])} heads")
    else:
        made = token_form(tensors, card)
    aggregate = {"multimax": "max", "attention": "mean"}.get(pool.name, str(pool))
    return made.model_copy(update={"aggregate": aggregate, **alarm_fields(card)})


def alarm_fields(card: ProbeCard) -> dict[str, Any]:
    """The card's threshold for an alarm on its pool, as fields of an `EngineProbe`."""
    held = next(iter(card.thresholds_for(Statistic(over="alarm", pool=card.pool))), None)
    if held is None:
        return {}
    return {
        "threshold": held.value,
        "threshold_tokens": held.n_tokens[1] if held.n_tokens else None,
        "threshold_positions": card.positions,
        "threshold_numerics": card.numerics_of(held),
    }


def token_form(tensors: Tensors, card: ProbeCard) -> EngineProbe:
    """The form whose token scores are those of `NeuralProbe.score_tokens`."""
    _refuse_parts(tensors, card)
    if "w1" in tensors:
        raise _unsupported(card, "more than one ReLU layer")
    value, bias = tensors["value"].sum(axis=0), tensors["bias"][0]
    scale, mean = tensors["scale"], tensors["mean"]
    if "w0" not in tensors:
        weight = value / scale
        parts = {"weight": weight[None], "bias": bias - weight @ mean}
        return EngineProbe(layers=card.layers, site=card.site, tensors=parts)
    first = tensors["w0"] / scale
    parts = {"w1": first[None], "b1": tensors["b0"] - first @ mean, "w2": value, "b2": bias}
    return EngineProbe(kind="mlp", layers=card.layers, site=card.site, tensors=parts)


def attention_form(tensors: Tensors, card: ProbeCard) -> EngineProbe:
    """The form whose score at a token is the attention-weighted one of the text up to it."""
    _refuse_parts(tensors, card)
    for name, what in (("w0", "a ReLU layer before attention"), ("position", "a slope of the "
                       "attention logits over positions")):  # fmt: skip
        if name in tensors:
            raise _unsupported(card, what)
    spec, value = card.head or HeadSpec(), tensors["value"] / tensors["scale"]
    # Without queries every token counts alike.
    query = tensors.get("query", np.zeros_like(value)) * spec.temperature / tensors["scale"]
    bias = tensors["bias"][0] - (value @ tensors["mean"]).sum()
    parts = {"query": query, "value": value, "bias": bias}
    return EngineProbe(kind="attention", layers=card.layers, site=card.site, tensors=parts)


def _refuse_parts(tensors: Tensors, card: ProbeCard) -> None:
    head = card.head or HeadSpec()
    found = {
        "a tanh gate": head.gate,
        "a layer norm": head.layer_norm,
        "squared units": head.activation == "square" and "w0" in tensors,
        "gated values or values with a bias": bool({"gate", "value_bias", "output"} & set(tensors)),
    }
    for what, is_there in found.items():
        if is_there:
            raise _unsupported(card, what)


def _unsupported(card: ProbeCard, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"probe {card.name!r} has {what}, and the engine runs linear probes, one ReLU layer, and "
        "attention on the stream itself; capture its layers and score the rows instead"
    )


_CHUNK_TOKENS: Final = 1024


@dataclass(frozen=True, eq=False, kw_only=True)
class NeuralProbe(CardProbe):
    """Scores a sample with a small network on the tokens of one layer.

    A token becomes `z = (x - mean) / scale`, then passes layers if there are any; each head makes
    a value and, for attention, a logit of it; the pool of the card makes one number of the tokens.
    Arithmetic is float64 in numpy; torch is needed for training only.

    Args:
        tensors: float32; `mean`, `scale` (hidden,), `w0`, `b0`, … of layers, `t0`, … of a JumpReLU,
            `value` (heads, width), `bias` (1,), for attention `query` (heads, width) and `position`
            (heads,), for gated values `gate` (heads, width) and `gate_bias` (heads,), `value_bias`
            (heads,), and for the pool `bipolar` the `output` (2, heads).
        card: of kind `neural`, with one layer.
        path: folder that it was loaded from.

    Raises:
        SpecError: shapes disagree, or a value is NaN, infinite or a scale <= 0.
    """

    tensors: Mapping[str, NDArray[np.float32]]
    card: ProbeCard
    path: Path | None = field(default=None)

    def __post_init__(self) -> None:
        arrays = {name: read_only(name, given) for name, given in self.tensors.items()}
        object.__setattr__(self, "tensors", MappingProxyType(arrays))
        self._check()

    def _check(self) -> None:
        if self.card.kind != "neural" or len(self.card.layers) != 1 or self.card.head is None:
            raise SpecError(
                f"card: kind {self.card.kind!r} with layers {self.card.layers}; a NeuralProbe "
                "allows kind 'neural', one layer and a head; make it with to_probe of an estimator"
            )
        width, layer, wrong = self.card.hidden, 0, []
        expected: dict[str, tuple[int, ...]] = {"mean": (width,), "scale": (width,), "bias": (1,)}
        while f"w{layer}" in self.tensors:
            size = len(self.tensors[f"w{layer}"])
            expected |= {f"w{layer}": (size, width), f"b{layer}": (size,)}
            if f"t{layer}" in self.tensors:
                expected[f"t{layer}"] = (size,)
            width, layer = size, layer + 1
        heads = len(self.tensors.get("value", ()))
        expected["value"] = (heads, width)
        optional = {
            "query": (heads, width), "position": (heads,), "value_bias": (heads,),
            "gate": (heads, width), "gate_bias": (heads,), "output": (2, heads),
        }  # fmt: skip
        expected |= {name: shape for name, shape in optional.items() if name in self.tensors}
        if ("gate" in self.tensors) != ("gate_bias" in self.tensors):
            wrong.append("gate without gate_bias, or the other way round")
        if parse_head_pool(self.pool).name == "bipolar" and "output" not in self.tensors:
            wrong.append(f"no output (allowed: {(2, heads)}), which the pool bipolar needs")
        for name in sorted(expected.keys() | self.tensors.keys()):
            shape = self.tensors[name].shape if name in self.tensors else None
            if shape != expected.get(name):
                wrong.append(f"{name} {shape} (allowed: {expected.get(name)})")
        if wrong or not heads:
            raise SpecError(
                f"tensors: {', '.join(wrong) or 'no head'}; shapes have to fit each other and the "
                f"width {self.card.hidden} of the card; make the probe with to_probe"
            )
        if not (self.tensors["scale"] > 0).all():
            raise SpecError("scale: holds values <= 0; allowed are positive numbers")

    def for_engine(self) -> EngineProbe:
        """As in `CardProbe`: of kind `mlp`, `attention` or `linear`."""
        return neural_form(self._wide, self.card)

    def engine_forms(self) -> tuple[EngineProbe, EngineProbe | None]:
        """As in `CardProbe`."""
        pooled = neural_form(self._wide, self.card)
        attends = parse_head_pool(self.pool).name == "attention"
        return token_form(self._wide, self.card), pooled if attends else None

    def score_tokens(self, acts: ArrayLike, layers: Sequence[int] | None = None) -> Floats:
        """What the probe makes of each token alone: the sum of its heads plus the bias.

        For attention these are the values before they are weighted, so their mean is not the
        score of the sample. Arguments are those of `CardProbe`.
        """
        return np.asarray(token_values(self._outputs(acts, layers), self._wide))

    def running_scores(
        self, acts: ArrayLike, layers: Sequence[int] | None = None, *, pool: str | None = None
    ) -> Floats:
        """Of a learned pool, the score of the text so far. Arguments are those of `CardProbe`."""
        rule = parse_head_pool(pool or self.pool)
        if not is_learned(rule):
            return self.score_tokens(acts, layers)
        out = self._outputs(acts, layers)
        beginnings = (
            HeadOutputs(out.query[:n], out.value[:n]) for n in range(1, 1 + len(out.value))
        )
        return np.array([pool_head(b, rule, self._wide) for b in beginnings])

    def attention_weights(self, acts: ArrayLike, layers: Sequence[int] | None = None) -> Floats:
        """How much each token counts in each head of an attention pool, (tokens, heads) float64.

        Each head sums to 1. Arguments are those of `score_tokens`.
        """
        query = self._outputs(acts, layers).query
        if "position" in self._wide:
            query = query + np.arange(len(query))[:, None] * self._wide["position"]
        weights = np.exp(query - query.max(axis=0))
        return np.asarray(weights / weights.sum(axis=0))

    def score(
        self,
        acts: ArrayLike,
        layers: Sequence[int] | None = None,
        *,
        pool: str | None = None,
        ends: ArrayLike | None = None,
    ) -> float:
        """Score a sample. Arguments are those of `CardProbe`."""
        out = self._outputs(acts, layers)
        if not len(out.value):
            raise SpecError(
                "acts: no token; allowed is at least one; choose positions that exist in this "
                "sample, or leave it unscored"
            )
        rule = parse_head_pool(pool or self.pool)
        return pool_head(out, rule, self._wide, ends=ends)

    def _in_file(self) -> Mapping[str, NDArray[np.float32]]:
        return self.tensors

    @cached_property
    def _wide(self) -> dict[str, Floats]:
        return {name: tensor.astype(np.float64) for name, tensor in self.tensors.items()}

    def _outputs(self, acts: ArrayLike, layers: Sequence[int] | None) -> HeadOutputs:
        array, (place,) = self._picked(acts, layers)
        rows = array[place]
        spec = self.card.head or HeadSpec()
        parts = [
            head_outputs(self._wide, spec, rows[i : i + _CHUNK_TOKENS].astype(np.float64))
            for i in range(0, max(len(rows), 1), _CHUNK_TOKENS)
        ]
        query, value = (np.concatenate(side) for side in zip(*parts, strict=True))
        require_finite(value)
        return HeadOutputs(query, value)
