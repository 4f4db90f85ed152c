"""A neural probe in the forms that the engine runs: linear, one ReLU layer, or attention.

Standardisation folds into the weights. Of attention it adds a constant to the logits of a head,
which its softmax does not see, and one to each value, which stands in the bias.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import UnsupportedError
from inspect_lens.probe.card._card import ProbeCard
from inspect_lens.probe.pooling._head import HeadSpec, parse_head_pool
from inspect_lens.spec import EngineProbe

__all__ = ["attention_form", "neural_form", "token_form"]

Tensors = Mapping[str, NDArray[np.float32]]


def neural_form(tensors: Tensors, card: ProbeCard) -> EngineProbe:
    """The form whose aggregated score is that of the probe.

    Args:
        tensors: of a `NeuralProbe`.
        card: its card.

    Returns:
        The engine's probe, with pool and lowest threshold of the card.

    Raises:
        UnsupportedError: the engine has none; the message says what it cannot do.
    """
    pool = parse_head_pool(card.pool)
    if pool.name == "attention":
        made = attention_form(tensors, card)
    elif pool.name == "rolling_attention" or (
        pool.name == "multimax" and len(tensors["value"]) > 1
    ):
        raise _unsupported(card, f"pool {card.pool} of {len(tensors['value'])} heads")
    else:
        made = token_form(tensors, card)
    lowest = min(card.thresholds, key=lambda t: t.fpr, default=None)
    aggregate = {"multimax": "max", "attention": "mean"}.get(pool.name, str(pool))
    threshold = None if lowest is None else lowest.value
    return made.model_copy(update={"aggregate": aggregate, "threshold": threshold})


def token_form(tensors: Tensors, card: ProbeCard) -> EngineProbe:
    """The form whose token scores are those of `NeuralProbe.score_tokens`.

    Args:
        tensors: of a `NeuralProbe`.
        card: its card.

    Returns:
        A linear probe, or an `mlp` where there is a ReLU layer.

    Raises:
        UnsupportedError: there is a gate, or more than one ReLU layer.
    """
    _refuse_gate(card)
    if "w1" in tensors:
        raise _unsupported(card, "more than one ReLU layer")
    value = _wide(tensors["value"]).sum(axis=0)
    bias = float(tensors["bias"][0])
    scale, mean = _wide(tensors["scale"]), _wide(tensors["mean"])
    if "w0" not in tensors:
        weight = value / scale
        parts = {"weight": _narrow(weight[None]), "bias": _narrow(bias - weight @ mean)}
        return EngineProbe(layers=card.layers, site=card.site, tensors=parts)
    first = _wide(tensors["w0"]) / scale
    parts = {
        "w1": _narrow(first[None]),
        "b1": _narrow(_wide(tensors["b0"]) - first @ mean),
        "w2": _narrow(value),
        "b2": _narrow(bias),
    }
    return EngineProbe(kind="mlp", layers=card.layers, site=card.site, tensors=parts)


def attention_form(tensors: Tensors, card: ProbeCard) -> EngineProbe:
    """The form whose score at a token is the attention-weighted one of the text up to it.

    Args:
        tensors: of a `NeuralProbe`.
        card: its card.

    Returns:
        A probe of kind `attention`.

    Raises:
        UnsupportedError: there is a gate, a ReLU layer, or a slope over positions.
    """
    _refuse_gate(card)
    for name, what in (("w0", "a ReLU layer before attention"), ("position", "a slope of the "
                       "attention logits over positions")):  # fmt: skip
        if name in tensors:
            raise _unsupported(card, what)
    spec, scale = card.head or HeadSpec(), _wide(tensors["scale"])
    value = _wide(tensors["value"]) / scale
    # Without queries every token counts alike.
    query = _wide(tensors.get("query", np.zeros_like(tensors["value"]))) * spec.temperature / scale
    bias = float(tensors["bias"][0]) - float((value @ _wide(tensors["mean"])).sum())
    parts = {"query": _narrow(query), "value": _narrow(value), "bias": _narrow(bias)}
    return EngineProbe(kind="attention", layers=card.layers, site=card.site, tensors=parts)


def _refuse_gate(card: ProbeCard) -> None:
    if card.head is not None and card.head.gate:
        raise _unsupported(card, "a tanh gate")


def _unsupported(card: ProbeCard, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"probe {card.name!r} has {what}, and the engine runs linear probes, one ReLU layer, and "
        "attention on the stream itself; capture its layers and score the rows instead"
    )


def _wide(array: NDArray[np.float32]) -> NDArray[np.float64]:
    return array.astype(np.float64)


def _narrow(value: NDArray[np.float64] | float) -> NDArray[np.float32]:
    return np.asarray(value, dtype=np.float32)
