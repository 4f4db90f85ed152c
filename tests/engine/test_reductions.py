"""Reduced captures of a real engine against the unreduced one and against Hugging Face."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens import CaptureSpec, SteeringVector
from inspect_lens.spec import as_tensor_data
from tests.engine.conftest import HIDDEN, LAYERS, Engine, tokens
from tests.engine.test_capture import TOLERANCE, fed
from tests.kit.reduced import reduced, selected
from tests.kit.reference import HuggingFace, max_relative_error

pytestmark = pytest.mark.engine

FORMS: list[dict[str, Any]] = [
    {"reduce": "mean"},
    {"reduce": "mean", "positions": "prompt", "layers": [1, 3]},
    {"reduce": "max", "phase": "prefill"},
    {"reduce": "max", "positions": "completion"},
    {"reduce": "last"},
    {"reduce": "norm"},
    {"reduce": "norm", "positions": "last"},
    {"reduce": "mean", "positions": [0, 63, 64, 65, -1, 104]},
    {"positions": "last"},
    {"positions": "last_prompt"},
    {"positions": [i % 7 == 3 for i in range(100)]},
    {"reduce": "mean", "positions": [i % 3 == 0 for i in range(100)], "dtype": "float16"},
    {"phase": "decode", "dtype": "bfloat16"},
    {},
]


def request(**capture: Any) -> dict[str, Any]:
    return {"inspect_lens": {"capture": capture}}


def check(output: Any, reference: HuggingFace, form: dict[str, Any], choice: int = 0) -> None:
    """Compare a result with the reduction of Hugging Face's rows."""
    capture, ids = CaptureSpec(**form), fed(output, choice)
    layers = list(range(LAYERS)) if capture.layers == "all" else list(capture.layers)
    where = sorted(selected(capture, len(output.prompt_token_ids), len(ids)))
    expected = reduced(as_tensor_data(reference.residual_stream(ids)[layers][:, where]), capture)
    found = output.outputs[choice].activations["residual_stream"]
    assert str(found.dtype) == f"torch.{expected.dtype}"
    assert tuple(found.shape) == expected.shape
    if found.numel():
        wide = torch.from_numpy(expected.to_float32())
        rounding = {"float32": 0.0, "float16": 2**-10, "bfloat16": 2**-7}[expected.dtype]
        assert max_relative_error(found.float(), wide) <= TOLERANCE + rounding
    receipt = output.outputs[choice].inspect_lens.capture
    assert (receipt.reduce, receipt.dtype) == (capture.reduce, expected.dtype)
    assert receipt.n_positions == len(where)
    assert receipt.n_rows == expected.shape[1]


def test_every_form_in_one_batch_with_chunked_prefill(
    engine: Engine, hugging_face: HuggingFace
) -> None:
    prompts = [tokens(100, seed=i) for i in range(len(FORMS))]
    outputs = engine.run(prompts, [request(**form) for form in FORMS], max_tokens=9)
    for output, form in zip(outputs, FORMS, strict=True):
        check(output, hugging_face, form)


def test_a_reduction_is_that_of_the_rows_that_a_plain_capture_brings(engine: Engine) -> None:
    # A prompt of this test's own: `last` reads the prefix cache, and keys and values that another
    # test computed in other steps (eager ones, say) differ in their last bits.
    prompt = tokens(150, seed=105)
    whole = engine.run([prompt], request(), max_tokens=12)[0].activations["residual_stream"]
    for name, truth in {
        "mean": whole.double().mean(dim=1, keepdim=True),
        "max": whole.amax(dim=1, keepdim=True).double(),
        "last": whole[:, -1:].double(),
        "norm": whole.double().norm(dim=-1, keepdim=True),
    }.items():
        found = engine.run([prompt], request(reduce=name), max_tokens=12)[0]
        rows = found.activations["residual_stream"].double()
        assert rows.shape == truth.shape
        torch.testing.assert_close(rows, truth, rtol=1e-5, atol=1e-6)


def test_a_prompt_in_the_prefix_cache_is_reduced_whole(
    engine: Engine, hugging_face: HuggingFace
) -> None:
    prompt = tokens(160, seed=6)
    engine.run([prompt])
    form = {"reduce": "mean", "positions": "prompt"}
    output = engine.run([prompt], request(**form), max_tokens=4)[0]
    assert output.num_cached_tokens == 0
    check(output, hugging_face, form)
    # The last token alone needs no other one computed again.
    for form in ({"reduce": "last"}, {"positions": "last"}, {"reduce": "mean", "phase": "decode"}):
        output = engine.run([prompt], request(**form), max_tokens=4)[0]
        assert output.num_cached_tokens >= 128
        check(output, hugging_face, form)


def test_sampled_tokens_stay_on_the_device_until_the_end(
    engine: Engine, hugging_face: HuggingFace
) -> None:
    # More requests than run at once.
    forms: list[dict[str, Any]] = [{"reduce": r} for r in ("mean", "max", "last")] * 4
    prompts = [tokens(20 + 3 * i, seed=i) for i in range(len(forms))]
    outputs = engine.run(prompts, [request(**form) for form in forms], max_tokens=40)
    for output, form in zip(outputs, forms, strict=True):
        check(output, hugging_face, form)
    assert engine.stats()["sum_rows"] == 0


def test_each_of_several_choices_is_reduced_alone(
    engine: Engine, hugging_face: HuggingFace
) -> None:
    form = {"reduce": "mean"}
    output = engine.run([tokens(80)], request(**form), n=3, temperature=1.0)[0]
    assert len({tuple(choice.token_ids) for choice in output.outputs}) > 1
    for i in range(3):
        check(output, hugging_face, form, choice=i)


@pytest.mark.parametrize("reduce", ["mean", "max", "last"])
def test_of_no_token_there_is_no_row(engine: Engine, reduce: str) -> None:
    output = engine.run([tokens(9)], request(reduce=reduce, phase="decode"), max_tokens=1)[0]
    assert output.activations["residual_stream"].shape == (LAYERS, 0, HIDDEN)
    assert output.inspect_lens.capture.n_positions == 0


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_one_phase_is_steered_as_hugging_face_would(
    engine: Engine, hugging_face: HuggingFace, phase: Any
) -> None:
    prompt = tokens(100, seed=7)
    v = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(7))
    vector = SteeringVector(activations=v, layer_indices=[1], scale=3.0, phase=phase)
    n = len(prompt)

    def edit(h: torch.Tensor) -> torch.Tensor:
        out = h.clone()
        out[slice(None, n) if phase == "prefill" else slice(n, None)] += 3.0 * v[0]
        return out

    lens = {"inspect_lens": {"capture": {}, "edits": [vector]}}
    output = engine.run([prompt], lens, max_tokens=12)[0]
    found = output.activations["residual_stream"]
    expected = hugging_face.residual_stream(fed(output), {1: edit})
    assert max_relative_error(found, expected) <= TOLERANCE
    done = output.inspect_lens.steer
    assert done.n_tokens == (n if phase == "prefill" else 11)
    # What was sampled under one phase is a prompt of another request, with another cache key.
    longer = fed(output)
    again = engine.run([longer], lens, max_tokens=2)[0]
    n = len(longer)
    expected = hugging_face.residual_stream(fed(again), {1: edit})
    assert max_relative_error(again.activations["residual_stream"], expected) <= TOLERANCE
    alone = engine.run([longer], {"inspect_lens": {"edits": [vector]}}, max_tokens=2)[0]
    assert alone.outputs[0].token_ids == again.outputs[0].token_ids


def test_the_wire_holds_no_more_than_was_asked_for(engine: Engine) -> None:
    from inspect_lens._vllm.http.bodies import as_json

    entry = engine.run([tokens(120)], request(reduce="mean", dtype="float16"), max_tokens=3)[0]
    sent = as_json(entry.outputs[0], [])["activations"]["residual_stream"]
    assert sent["shape"] == [LAYERS, 1, HIDDEN]
    assert np.dtype(sent["dtype"]) == np.float16
