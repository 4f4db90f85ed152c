"""Detectors of IBM's vLLM-Hook: logistic probes of the last token of a prompt.

| detector | `NAME.npz`, beside `weights` and `bias` | `NAME.json` |
|---|---|---|
| hallucinations (H-Node) | `scaler_mean`, `scaler_scale`, `best_layer` | `model_name` |
| risky tool calls | `mean`, `scale`, `layer` | `model_name`, `threshold` |

Layers count from 1 there. The score is the log odds, of which they show the logistic function.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from inspect_lens._base.untrusted import parse_json, read_npz, read_regular
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe.card._card import ProbeCard

from ._linear import Probe
from ._probelab import where_it_reads

_JSON_BYTES: Final = 1 << 20
_H_NODE: Final = "H-Node, hallucinations"
_TOOL_CALLS: Final = "risky tool calls"
_NAMES: Final[Mapping[str, tuple[str, str, str]]] = {
    _H_NODE: ("scaler_mean", "scaler_scale", "best_layer"),
    _TOOL_CALLS: ("mean", "scale", "layer"),
}
"""Of each detector, how the standardiser and the layer are called."""
_LARGE: Final[Mapping[str, str]] = {
    _H_NODE: "A large score means a hallucinated answer, as its authors label them.",
    _TOOL_CALLS: "A large score means that the next action follows an injection, as its authors "
    "label them.",
}
_PAPERS: Final[Mapping[str, str]] = {_H_NODE: ", arXiv:2603.26045", _TOOL_CALLS: ""}


def read_vllm_hook(file: Path, *, name: str, layer: int | None, model: str | None) -> Probe:
    """The probe in a `.npz` file of vLLM-Hook; arguments are those of `import_probe`."""
    try:
        arrays = read_npz(file)
        beside: Any = parse_json(read_regular(file.with_suffix(".json"), most=_JSON_BYTES))
        kind = next(k for k, names in _NAMES.items() if {"weights", "bias", *names} <= set(arrays))
        whose = model or str(beside["model_name"])
        flag = float(beside.get("threshold", 0.5))
        mean, scale, at = (arrays[key] for key in _NAMES[kind])
        said = int(at.reshape(())) - 1
        if said < 0:
            raise ValueError(f"layer {said + 1}, and layers count from 1 there")
        if not 0.0 < flag < 1.0:
            raise ValueError(f"threshold {flag:g} is no probability")
    except StopIteration:
        raise ArtifactError(
            f"{file}: has the arrays {sorted(arrays)}; read are detectors of vLLM-Hook, with "
            "weights and bias, and mean, scale and layer, or scaler_mean, scaler_scale and "
            "best_layer"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{file}: not a detector of vLLM-Hook ({type(error).__name__}: {error}); needed are "
            f"its .npz file and {file.with_suffix('.json').name} beside it"
        ) from None
    if layer is not None and layer != said:
        raise SpecError(
            f"layer={layer}: the file says layer {said + 1}, counted from 1, which is layer {said} "
            "here; leave layer out"
        )
    try:
        card = ProbeCard(
            name=name,
            description=_LARGE[kind],
            method=f"imported from {file.name} (vLLM-Hook, {kind})",
            source=f"IBM vLLM-Hook (Apache-2.0){_PAPERS[kind]}",
            hidden=arrays["weights"].size,
            positions="last_prompt",
            pool="last",
            **where_it_reads(said, whose, f"{file} names no layer"),
            notes=(
                f"vLLM-Hook flags a probability of {flag:g} and more, which is a score of "
                f"{math.log(flag / (1.0 - flag)):.5g}; pass it as threshold= if you want that. No "
                "rate is stated for it, and no rate or AUROC was measured here.",
                "It reads the last token of the prompt, before anything is sampled.",
                *(("The excess of its H-nodes is not computed.",) if kind == _H_NODE else ()),
            ),
        )
        # What does not vary is left as it is there, too.
        return Probe(
            weight=arrays["weights"].reshape(1, -1),
            bias=arrays["bias"].reshape(1),
            mean=mean.reshape(1, -1),
            scale=np.where(scale == 0, np.float32(1), scale).reshape(1, -1),
            card=card,
        )
    except (SpecError, ValueError) as error:
        raise ArtifactError(f"{file}: {error}") from None
