"""What the fake server answers where hooks, steering, or queries and keys, were asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from inspect_lens.spec import (
    Gate,
    GateReceipt,
    LensRequest,
    QKSpec,
    SteerReceipt,
    TensorData,
    as_tensor_data,
    encode_saved,
)

__all__ = ["qk_of", "saved_of", "steering_of"]


def saved_of(request: LensRequest | None, index: int) -> dict[str, Any]:
    """What hooks of a choice would have saved, as a field of the response: none are run."""
    if request is None or not request.hooks:
        return {}
    values = {
        str(i): {
            "layers": list(hook.layer_indices),
            "choice": index,
            "rows": [TensorData(np.full((2, 3), i, np.float32), "float32")],
        }
        for i, hook in enumerate(request.hooks)
    }
    return {"hook_results": encode_saved(values)}


def qk_of(
    asked: QKSpec, n_fed: int, n_layers: int, encode: Callable[[TensorData, str], dict[str, Any]]
) -> dict[str, Any]:
    """Queries and keys that count up, as entries of `activations`."""
    layers = list(range(n_layers)) if asked.layers == "all" else list(asked.layers)
    shape = (len(layers), n_fed, 2, 4)
    rows = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    parts = {"attn_q": rows, "attn_k": rows[:, :, :1]}
    return {
        **{name: encode(as_tensor_data(part), asked.transport) for name, part in parts.items()},
        "qk_layers": {"__json__": layers},
        "qk_meta": {"__json__": [{"scale": 0.5} for _ in layers]},
    }


def steering_of(request: LensRequest, n_fed: int) -> SteerReceipt | None:
    """The receipt of vectors and edits: every token that was fed."""
    if not (request.edits or request.edits_named):
        return None
    at = [e.layers for e in request.edits]
    vectors = [
        *(use.name for use in request.edits_named),
        *(tensor.sha256 for edit in request.edits for tensor in edit.all_tensors),
    ]
    layers = tuple(sorted({layer for layers in at for layer in layers}))
    gates = tuple(_gate(gate, request) for edit in request.edits for gate in edit.gates)
    lasting = tuple(gate for gate in gates if gate is not None)
    return SteerReceipt(layers=layers, n_tokens=n_fed, vectors=tuple(vectors), gates=lasting)


def _gate(gate: Gate, request: LensRequest) -> GateReceipt | None:
    """Of a gate of a conversation: it opens by itself where its threshold is below 0."""
    if not gate.conversation:
        return None
    began = gate.key in request.open_gates
    fires = gate.threshold < 0
    return GateReceipt(
        layer=gate.layer,
        site=gate.site,
        fired_at=1,
        n_tokens=0,
        sha256=gate.key,
        began_open=began,
        key=gate.key if began or fires else None,
    )
