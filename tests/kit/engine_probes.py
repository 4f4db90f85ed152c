"""Probes of an engine in bfloat16, against the formula over the rows of the same request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inspect_lens.engine import register, unregister
from inspect_lens.spec import EngineProbe


def check_probes(llm: Any, run: Any, prompts: list[list[int]], hidden: int, layers: int) -> Any:
    """Register a linear and an attention probe and an MLP, read them, and return the outputs.

    `run(prompts, extra_args, max_tokens=...)` generates. The linear probe and the MLP read the
    first, a middle and the last layer, so that every stage of a pipeline has a share.
    """
    rng = np.random.default_rng(0)
    read = (0, layers // 2, layers - 1)
    linear = rng.normal(size=(3, hidden)).astype(np.float32)
    heads = {n: rng.normal(size=(2, hidden)).astype(np.float32) for n in ("query", "value")}
    w1 = rng.normal(size=(3, 4, hidden)).astype(np.float32)
    w2 = rng.normal(size=4).astype(np.float32)
    probes = {
        "linear": EngineProbe(layers=read, tensors={"weight": linear, "bias": np.float32(1)}),
        "heads": EngineProbe(kind="attention", layers=(layers // 2,), tensors=heads),
        "mlp": EngineProbe(kind="mlp", layers=read, tensors={"w1": w1, "w2": w2}),
    }
    for name, probe in probes.items():
        register(llm, name, probe)
    streamed: list[dict[str, Any]] = [
        {"name": name, "positions": "all", "tokens": True} for name in probes
    ]
    # What most ask for goes another way: one mean, and nothing of the tokens.
    mean: list[dict[str, Any]] = [{"name": "linear", "positions": "all"}]
    asked = [
        {"inspect_lens": {"probes": mean if i % 2 else streamed, "capture": {}}}
        for i in range(len(prompts))
    ]
    try:
        outputs = run(prompts, asked, max_tokens=20)
    finally:
        for name in probes:
            unregister(llm, name)
    for i, output in enumerate(outputs):
        x = output.activations["residual_stream"].double().numpy()
        parts = [x[layer] * w for layer, w in zip(read, linear.astype(float), strict=True)]
        scores = sum(part.sum(axis=-1) for part in parts)
        # In float32, of products that are exact: the sizes of what is summed tell the error.
        sizes = sum(abs(part).sum(axis=-1) for part in parts)
        found = output.inspect_lens.probes[0]
        assert abs(found.score - (scores.mean() + 1)) <= 1e-6 * sizes.max()
        assert found.n_tokens == len(scores)
        if i % 2 == 0:
            assert np.all(abs(np.asarray(found.tokens) - scores - 1) <= 1e-6 * sizes)
            logits, values = (x[layers // 2] @ heads[n].astype(float).T for n in heads)
            weight = np.exp(logits - logits.max(axis=0))
            expected = ((weight * values).sum(axis=0) / weight.sum(axis=0)).sum()
            assert output.inspect_lens.probes[1].score == pytest.approx(
                expected, rel=1e-3, abs=1e-2
            )
            units = sum(x[layer] @ w.T for layer, w in zip(read, w1.astype(float), strict=True))
            truth = np.maximum(units, 0) @ w2
            # Units and their sum are of float32.
            np.testing.assert_allclose(
                output.inspect_lens.probes[2].tokens, truth, rtol=1e-3, atol=1e-3 * abs(units).max()
            )
    return outputs
