"""Rows, edits, lenses and patterns of real weights against a Hugging Face forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens import SteeringVector
from inspect_lens.attention import QueriesKeys
from inspect_lens.spec import Ablate, Add, Replace, result_name
from tests.engine.test_capture import fed
from tests.kit.reference import max_relative_error

from .conftest import BLOCK, PROMPTS, SITES, STEP_TOKENS, Served

pytestmark = pytest.mark.real

Measured = Callable[[str, float, float], None]

TOLERANCE = 1e-4
"""Of rows in float32: the norm of a row's difference over the norm of the row."""
LOGPROB = 2e-3
"""Of log-probabilities in float32, which add up what a row of hidden numbers is off."""
PATTERN = 1e-4
"""Of one weight of attention, which is at most 1."""


def capture(*sites: str, **more: Any) -> dict[str, Any]:
    return {"inspect_lens": {"capture": {"site": list(sites)}, **more}}


def worst(output: Any, expected: dict[str, torch.Tensor]) -> float:
    """The largest error of a row of any site and layer."""
    errors = []
    for site, wanted in expected.items():
        rows = output.activations[result_name(site)]  # type: ignore[arg-type]
        assert rows.shape == wanted.shape, site
        errors.append(max_relative_error(rows.float(), wanted))
    return max(errors)


def test_ten_sites_of_all_layers(served: Served, measured: Measured) -> None:
    prompts = {which: served.prompt(which) for which in PROMPTS}
    assert len(prompts["long"]) > 2 * STEP_TOKENS, "it is fed in chunks"
    outputs = served.engine.run(
        list(prompts.values()), capture(*SITES, skip_reading_prefix_cache=True), max_tokens=4
    )
    for which, output in zip(prompts, outputs, strict=True):
        assert output.inspect_lens.capture.site == SITES
        error = worst(output, served.expected(fed(output)))
        measured(f"rows at ten sites of all layers, {which} prompt", error, TOLERANCE)
    # Another layer could not pass.
    stream = outputs[0].activations["residual_stream"]
    assert max_relative_error(stream[1:], stream[:-1]) > 0.1


def test_a_cached_prefix(served: Served, measured: Measured) -> None:
    """What is computed behind a prefix that the cache has equals a pass over the whole text."""
    # Within Gemma's window: vLLM drops what lies before it, and then finds only the same prompt.
    prompt = served.prompt("long")[:400]
    whole = len(prompt) // BLOCK * BLOCK - BLOCK
    served.engine.run([prompt], max_tokens=1)
    request = capture("resid_post", "attn_out")
    request["inspect_lens"]["capture"]["positions"] = "completion"
    (output,) = served.engine.run([[*prompt[:-20], 9, 11, 13]], request, max_tokens=4)
    assert output.num_cached_tokens >= whole - BLOCK
    rows = served.reference.sites(fed(output), sites=("resid_post", "attn_out"))
    expected = {site: found[:, len(output.prompt_token_ids) :] for site, found in rows.items()}
    measured("rows behind a cached prefix", worst(output, expected), TOLERANCE)
    # Steered requests have entries of their own, which equal steering shares.
    edit = Add(vector=np.ones(served.hidden), layers=[1], scale=0.1).model_dump(mode="json")
    cached = [
        served.engine.run([prompt], {"inspect_lens": {"edits": [edit]}}, max_tokens=1)[0]
        for _ in range(2)
    ]
    assert cached[0].num_cached_tokens == 0
    assert cached[1].num_cached_tokens >= whole


def edits_of(served: Served, ids: list[int]) -> dict[str, tuple[Any, Any, int]]:
    """By name: an edit, the same as a function of rows, and its layer."""
    layer = served.layers // 2
    rows = served.reference.residual_stream(ids)[layer]
    direction = torch.randn(served.hidden, generator=torch.Generator().manual_seed(0))
    unit = direction / direction.norm()
    large = 0.2 * float(rows[1:].norm(dim=-1).median()) * unit
    donor = served.reference.residual_stream(served.prompt("code"))[layer, 5]
    at = {"layers": [layer]}
    where = [3, len(ids) - 1]

    def replaced(h: torch.Tensor) -> torch.Tensor:
        out = h.clone()
        out[where] = donor
        return out

    matched = SteeringVector(
        activations=direction[None], layer_indices=[layer], scale=0.2, norm_match=True
    )
    return {
        "add": (Add(vector=large.numpy(), **at), lambda h: h + large, layer),
        "add, matched to the norm": (
            matched,
            lambda h: h + 0.2 * h.norm(dim=-1, keepdim=True) * unit,
            layer,
        ),
        "ablate": (
            Ablate(direction=direction.numpy(), **at),
            lambda h: h - (h @ unit)[:, None] * unit,
            layer,
        ),
        "replace": (Replace(rows=donor.numpy(), positions=where, **at), replaced, layer),
    }


def test_edits(served: Served, measured: Measured) -> None:
    ids = served.prompt("multi-byte")
    cases = edits_of(served, ids)
    asks = [
        capture("resid_post", edits=[edit.model_dump(mode="json")]) for edit, _, _ in cases.values()
    ]
    outputs = served.engine.run([ids] * len(asks), asks, max_tokens=4)
    for (name, (_, change, layer)), output in zip(cases.items(), outputs, strict=True):
        expected = served.reference.residual_stream(fed(output), {layer: change})
        measured(f"edit: {name}", worst(output, {"resid_post": expected}), TOLERANCE)
        plain = served.reference.residual_stream(fed(output))
        assert max_relative_error(plain, expected) > 100 * TOLERANCE, "it is to change something"


def test_logit_lens(served: Served, measured: Measured) -> None:
    answer = int(served.tokenizer(" Paris", add_special_tokens=False)["input_ids"][0])
    request = {"inspect_lens": {"lens": {"layers": "all", "top_k": 5, "tokens": [answer]}}}
    (output,) = served.engine.run([served.prompt("plain")], request, max_tokens=4)
    found = output.inspect_lens.lens.result(output.activations)
    rows = served.reference.residual_stream(fed(output))
    with torch.no_grad():
        model = served.reference.model
        logits = model.lm_head(model.model.norm(rows)).double()
    truth = logits.log_softmax(dim=-1).transpose(0, 1).numpy()
    own = np.take_along_axis(truth, found.token_ids, axis=-1)
    best = -np.sort(-truth, axis=-1)[..., :5]
    target = np.abs(found.target_logprobs[..., 0] - truth[..., answer]).max()
    error = max(np.abs(found.logprobs - own).max(), np.abs(found.logprobs - best).max(), target)
    measured("logit lens: log-probabilities of all layers", float(error), LOGPROB)
    n = len(output.prompt_token_ids)
    sampled = list(output.outputs[0].token_ids)
    assert found.token_ids[n - 1 :, -1, 0].tolist() == sampled


def test_attention_patterns(served: Served, measured: Measured) -> None:
    # Behind Gemma's window, where its layers are of two kinds.
    config = served.reference.model.config
    which = "long" if getattr(config, "sliding_window", None) else "multi-byte"
    prompt = served.prompt(which)
    (output,) = served.engine.run([prompt], {"output_qk": True}, max_tokens=1)
    captured = QueriesKeys.of(output.activations)
    assert tuple(captured.layers) == tuple(range(served.layers))
    truth = served.reference.attentions(prompt)
    errors = [
        float((torch.from_numpy(captured.patterns(layer)) - truth[layer]).abs().max())
        for layer in captured.layers
    ]
    measured("attention patterns of all heads", max(errors), PATTERN)
