"""Probes of the package probelab: what its `save` writes, by class.

A file is a torch archive with `class`, `init_kwargs` and `state_dict`, plain values and tensors. A
layer norm's weights, and a linear layer behind the ReLU, are multiplied into their neighbours: each
product is that of the original up to rounding. No file names a layer, a site or a threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe.card._card import ModelRef, ProbeCard
from inspect_lens.probe.pooling._pool import HeadSpec

from ._linear import Probe
from ._load import fingerprint_model
from ._neural import NeuralProbe

Arrays: TypeAlias = dict[str, NDArray[np.float64]]


class _Network(NamedTuple):
    """Tensors of a `NeuralProbe`, and the settings that go with them."""

    tensors: Arrays
    pool: str = "mean"
    spec: HeadSpec = HeadSpec()


def is_probelab(loaded: Any) -> bool:
    """Whether the content of a file is that of probelab."""
    return isinstance(loaded, Mapping) and {"class", "init_kwargs", "state_dict"} <= set(loaded)


def read_probelab(
    loaded: Mapping[str, Any], file: Path, *, name: str, layer: int | None, model: str | None
) -> Probe | NeuralProbe:
    """The probe that a file of probelab holds; arguments are those of `import_probe`."""
    family = loaded["class"]
    if not isinstance(family, str) or family not in _READERS:
        raise ArtifactError(
            f"{file}: a probe of the class {str(family)[:80]!r} of probelab; read are "
            f"{', '.join(sorted(_READERS))}; the others compute what no probe here does"
        )
    about: dict[str, Any] = {
        "name": name,
        "method": f"imported from {file.name} (probelab, {family})",
        "source": "probelab (MIT)",
        **where_it_reads(layer, model, "files of probelab name no layer"),
        "notes": (
            "Not stated: the model, its site, the tokens that were read, and any threshold. No "
            "rate or AUROC was measured here. The score is the log odds, of which probelab's "
            "`predict` gives the logistic function.",
        ),
    }
    try:
        settings = dict(loaded["init_kwargs"])
        made = _READERS[family](arrays_of(loaded), settings)
        if isinstance(made, _Network):
            card = ProbeCard(
                hidden=made.tensors["mean"].size, kind="neural", head=made.spec, pool=made.pool,
                **about,
            )  # fmt: skip
            return NeuralProbe(tensors=_narrow(made.tensors), card=card)
        card = ProbeCard(hidden=made["weight"].size, **about)
        return Probe(card=card, **_narrow({key: np.atleast_2d(v) for key, v in made.items()}))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ArtifactError(
            f"{file}: not a {family} of probelab 0.1 ({type(error).__name__}: {error})"
        ) from None


def where_it_reads(layer: object, model: str | None, unknown: str) -> dict[str, Any]:
    """Layer and model of an imported probe, as fields of its card."""
    if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
        raise SpecError(
            f"layer={layer!r}: {unknown}; pass layer=, the block (from 0) whose output the probe "
            "reads"
        )
    whose = None if model is None else ModelRef(name=model, sha256=fingerprint_model(model))
    return {"layers": (layer,), "model": whose}


def arrays_of(loaded: Mapping[str, Any]) -> Arrays:
    """The tensors of a torch file."""
    state = loaded["state_dict"]
    return {str(key): np.asarray(value.detach().double().numpy()) for key, value in state.items()}


def _narrow(arrays: Arrays) -> dict[str, Any]:
    made: dict[str, Any] = {key: value.astype(np.float32) for key, value in arrays.items()}
    return made | ({"bias": made["bias"].reshape(1)} if "bias" in made else {})


def _logistic(state: Arrays, settings: Mapping[str, Any]) -> Arrays:
    return {
        "weight": state["linear.weight"], "bias": state["linear.bias"],
        "mean": state["scaler_mean"], "scale": state["scaler_std"],
    }  # fmt: skip


def _mass_mean(state: Arrays, settings: Mapping[str, Any]) -> Arrays:
    direction = state["direction"]
    return {
        "weight": direction, "bias": state["bias"], "mean": state["global_mean"],
        "scale": np.ones_like(direction),
    }  # fmt: skip


def _mlp(state: Arrays, settings: Mapping[str, Any]) -> _Network:
    if settings["activation"] != "relu":
        raise ValueError(f"activation {str(settings['activation'])[:40]!r}; relu is read")
    return _Network(
        _unscaled(state["fc1.weight"].shape[1])
        | {"w0": state["fc1.weight"], "b0": state["fc1.bias"]}
        | {"value": state["fc2.weight"], "bias": state["fc2.bias"]}
    )


def _bilinear(state: Arrays, settings: Mapping[str, Any]) -> _Network:
    factors = state["U.weight"]
    return _Network(
        {"mean": state["scaler_mean"], "scale": state["scaler_std"], "w0": factors,
         "b0": np.zeros(len(factors)), "value": state["lam"][None], "bias": state["bias"]},
        spec=HeadSpec(activation="square"),
    )  # fmt: skip


def _gated_bipolar(state: Arrays, settings: Mapping[str, Any]) -> _Network:
    made, last, offset = _normed(state)
    for name, theirs in (("value", "W_proj"), ("gate", "W_gate")):
        weight = state[f"{theirs}.weight"]
        made[name] = weight @ last
        made[f"{name}_bias"] = weight @ offset + state[f"{theirs}.bias"]
    made |= {"output": state["output.weight"].reshape(2, -1), "bias": state["output.bias"]}
    return _Network(made, "bipolar", HeadSpec(layer_norm=True))


def _multimax(state: Arrays, settings: Mapping[str, Any]) -> _Network:
    made, last, offset = _normed(state)
    weight, output = state["head_projection.weight"], state["output.weight"]
    made |= {"value": weight @ last,
             "value_bias": weight @ offset + state["head_projection.bias"],
             "output": np.concatenate([output, np.zeros_like(output)]),
             "bias": state["output.bias"]}  # fmt: skip
    return _Network(made, "bipolar", HeadSpec(layer_norm=True))


def _soft_attention(state: Arrays, settings: Mapping[str, Any]) -> _Network:
    made, last, offset = _normed(state)
    value = state["output.weight"].reshape(-1, 1) * state["values"]
    # What a query gives every token alike changes no share of attention.
    made |= {"value": value @ last, "query": state["queries"] @ last,
             "bias": state["output.bias"] + (value @ offset).sum()}  # fmt: skip
    return _Network(made, "attention", HeadSpec(layer_norm=True))


def _positional_attention(state: Arrays, settings: Mapping[str, Any]) -> _Network:
    return _Network(
        _unscaled(len(state["query_proj"]))
        | {"query": state["query_proj"].T, "value": state["value_proj"].T}
        | {"position": state["position_weights"], "bias": state["bias"]},
        "attention",
    )


def _normed(state: Arrays) -> tuple[Arrays, NDArray[np.float64], NDArray[np.float64]]:
    """The first layer with its norm's weights in it, and the linear layer behind the ReLU."""
    first = state["mlp.0.weight"]
    made = _unscaled(first.shape[1])
    made |= {"w0": first * state["norm.weight"],
             "b0": state["mlp.0.bias"] + first @ state["norm.bias"]}  # fmt: skip
    return made, state["mlp.3.weight"], state["mlp.3.bias"]


def _unscaled(hidden: int) -> Arrays:
    return {"mean": np.zeros(hidden), "scale": np.ones(hidden)}


_READERS: Final[Mapping[str, Callable[[Arrays, Mapping[str, Any]], Arrays | _Network]]] = {
    "Bilinear": _bilinear,
    "GatedBipolar": _gated_bipolar,
    "Logistic": _logistic,
    "MLP": _mlp,
    "MassMean": _mass_mean,
    "MultiMax": _multimax,
    "PositionalAttention": _positional_attention,
    "SoftAttention": _soft_attention,
}
"""By class of probelab, what makes arrays of a linear `Probe` or a network of its tensors."""
