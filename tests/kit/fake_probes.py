"""The fake server's registry of probes: applied to the rows that it would capture."""

from __future__ import annotations

from typing import Any

import numpy as np

from inspect_lens.errors import SpecError
from inspect_lens.probe import pool_scores
from inspect_lens.spec import EngineProbe, ProbeReceipt, ProbeUse, resolve_positions

from .fake_rows import at_site, residual

__all__ = ["canned", "register", "run_probe"]


def register(body: dict[str, Any], *, n_layers: int, hidden: int) -> tuple[str, EngineProbe]:
    """Read what is registered; the fake model has taps behind its blocks only."""
    unknown = set(body) - {"name", "probe"}
    if unknown:
        raise SpecError(f"the body has {sorted(body)}; it has to have 'name' and 'probe'")
    probe = EngineProbe.model_validate(body["probe"])
    if probe.site != "resid_post":
        raise SpecError(f"probe {body['name']!r}: site {probe.site} is not served")
    if max(probe.layers) >= n_layers or probe.hidden != hidden:
        raise SpecError(f"probe {body['name']!r}: the model has layers 0 to {n_layers - 1}")
    return str(body["name"]), probe


def run_probe(
    probe: EngineProbe, use: ProbeUse, prompt: list[int], done: list[int]
) -> ProbeReceipt:
    """What a probe says of the tokens that it reads, by the formulas of `EngineProbe`."""
    tokens, n_prompt = prompt + done, len(prompt)
    n_max = len(tokens) - 1
    read = resolve_positions(use.positions, n_prompt=n_prompt, n_max=n_max, field="positions")
    rows = at_site(residual(tokens, probe.layers, list(read), probe.hidden), probe.site)
    scores = _scores(probe, rows.to_float32().astype(np.float64)).astype(np.float32).tolist()
    return ProbeReceipt(
        name=use.name,
        sha256=probe.sha256,
        aggregate="attention" if probe.kind == "attention" else "mean",
        score=pool_scores(scores) if scores else None,
        n_tokens=len(scores),
        first_position=read[0] if len(read) else None,
        tokens=tuple(scores) if use.tokens else None,
    )


def canned(use: ProbeUse, score: float, n_fed: int) -> ProbeReceipt:
    """What a probe says that a test gave a score."""
    threshold = use.threshold or 0.0
    alarm = use.alarm is not None and score > threshold
    return ProbeReceipt(
        name=use.name,
        sha256="0" * 64,
        aggregate="mean",
        score=score,
        n_tokens=1,
        threshold=threshold,
        alarm_position=n_fed - 1 if alarm else None,
        stopped=alarm and use.alarm == "stop",
    )


def _scores(probe: EngineProbe, x: np.ndarray) -> np.ndarray:
    t = {name: tensor.to_float32().astype(np.float64) for name, tensor in probe.tensors.items()}
    if probe.kind == "linear":
        return np.asarray(np.einsum("lth,lh->t", x, t["weight"]) + probe.bias("bias"))
    if probe.kind == "mlp":
        middle = np.maximum(x[0] @ t["w1"][0].T + t["b1"], 0)
        return np.asarray(middle @ t["w2"] + probe.bias("b2"))
    logits, values = x[0] @ t["query"].T, x[0] @ t["value"].T
    out = []
    for n in range(1, len(logits) + 1):
        weight = np.exp(logits[:n] - logits[:n].max(axis=0))
        out.append(float(((weight * values[:n]).sum(axis=0) / weight.sum(axis=0)).sum()))
    return np.array(out) + probe.bias("bias")
