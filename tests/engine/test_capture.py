"""Captured rows against a Hugging Face forward pass of the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import LAYERS, Engine, start, tokens
from tests.kit.reference import HuggingFace, max_relative_error

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4
"""float32, other kernels and another order of additions: measured near 3e-6."""

ALL = {"output_residual_stream": True}


def fed(output: Any, choice: int = 0) -> list[int]:
    """Tokens that were fed to the model: the last sampled one was not."""
    return list(output.prompt_token_ids) + list(output.outputs[choice].token_ids)[:-1]


def check_all(outputs: list[Any], reference: HuggingFace) -> None:
    for output in outputs:
        rows = output.activations["residual_stream"]
        expected = reference.residual_stream(fed(output))
        assert rows.dtype == torch.float32
        assert rows.shape == expected.shape
        assert max_relative_error(rows, expected) <= TOLERANCE


def test_a_batch_of_mixed_lengths_with_chunked_prefill_equals_hugging_face(
    engine: Engine, hugging_face: HuggingFace
) -> None:
    prompts = [tokens(n, seed=n) for n in (1, 2, 17, 63, 64, 65, 130, 200)]
    outputs = engine.run(prompts, ALL, max_tokens=9)
    check_all(outputs, hugging_face)
    receipt = outputs[-1].inspect_lens
    assert receipt.paths == ("compiled",)
    assert receipt.capture.rows == LAYERS * (200 + 9 - 1)
    assert (receipt.n_prompt, receipt.n_completion) == (200, 9)


def test_rows_of_a_cached_prefix_are_recomputed(engine: Engine, hugging_face: HuggingFace) -> None:
    prompt = tokens(160, seed=3)
    engine.run([prompt])
    assert engine.run([prompt])[0].num_cached_tokens >= 128
    outputs = engine.run([prompt], ALL)
    assert outputs[0].num_cached_tokens == 0
    check_all(outputs, hugging_face)


def test_completion_rows_keep_the_prefix_cache(engine: Engine, hugging_face: HuggingFace) -> None:
    prompt = tokens(160, seed=4)
    engine.run([prompt])
    request = {"inspect_lens": {"capture": {"layers": [2], "positions": "completion"}}}
    output = engine.run([prompt], request, max_tokens=6)[0]
    assert output.num_cached_tokens >= 128
    expected = hugging_face.residual_stream(fed(output))[2:3, 160:]
    rows = output.activations["residual_stream"]
    assert rows.shape == (1, 5, expected.shape[-1])
    assert max_relative_error(rows, expected) <= TOLERANCE
    assert output.inspect_lens.capture.first_position == 160


@pytest.mark.parametrize(
    ("positions", "index"),
    [
        ("prompt", list(range(100))),
        ("last_prompt", [99]),
        ([0, 63, 64, 103], [0, 63, 64, 103]),
        ([-1, -100], [0, 99]),
    ],
)
def test_selected_positions(
    engine: Engine, hugging_face: HuggingFace, positions: Any, index: list[int]
) -> None:
    request = {"inspect_lens": {"capture": {"layers": [0, 3], "positions": positions}}}
    output = engine.run([tokens(100)], request, max_tokens=6)[0]
    expected = hugging_face.residual_stream(fed(output))[[0, 3]][:, index]
    rows = output.activations["residual_stream"]
    assert rows.shape == expected.shape
    assert max_relative_error(rows, expected) <= TOLERANCE


def test_positions_where_no_token_was_fed_give_an_empty_tensor(engine: Engine) -> None:
    request = {"inspect_lens": {"capture": {"layers": [1], "positions": "completion"}}}
    output = engine.run([tokens(10)], request, max_tokens=1)[0]
    assert output.activations["residual_stream"].shape == (1, 0, 128)
    assert output.inspect_lens.capture.rows == 0


def test_each_of_several_choices_has_its_own_rows(
    engine: Engine, hugging_face: HuggingFace
) -> None:
    output = engine.run([tokens(33)], ALL, n=3, temperature=1.0)[0]
    sampled = {tuple(choice.token_ids) for choice in output.outputs}
    assert len(sampled) > 1
    for i, choice in enumerate(output.outputs):
        expected = hugging_face.residual_stream(fed(output, i))
        assert max_relative_error(choice.activations["residual_stream"], expected) <= TOLERANCE


def test_capture_next_to_plain_requests_changes_none_of_them(engine: Engine) -> None:
    prompts = [tokens(n, seed=n) for n in (50, 61, 72, 83)]
    plain = engine.run(prompts)
    mixed = engine.run(prompts, [ALL, None, ALL, None])
    assert [o.outputs[0].token_ids for o in mixed] == [o.outputs[0].token_ids for o in plain]
    assert not hasattr(mixed[1], "activations")
    assert not hasattr(mixed[1], "inspect_lens")


def test_chat_and_generate_leave_the_callers_parameters_alone(engine: Engine) -> None:
    from vllm import SamplingParams

    extra = {"output_residual_stream": [0]}
    params = SamplingParams(max_tokens=2, detokenize=False, extra_args=extra)
    engine.llm.generate([{"prompt_token_ids": tokens(5)}] * 2, params, use_tqdm=False)
    assert params.extra_args == {"output_residual_stream": [0]}
    assert params.skip_reading_prefix_cache in (None, False)


def test_a_seed_gives_one_answer_whether_its_prompt_takes_one_step_or_three(engine: Engine) -> None:
    """vLLM takes back what a step drew for a prompt that goes on, which ended it on a CPU."""
    from vllm import SamplingParams

    prompt = {"prompt_token_ids": tokens(160, seed=11)}
    params = SamplingParams(max_tokens=6, seed=5, detokenize=False, extra_args=ALL)
    plain = SamplingParams(max_tokens=6, seed=5, detokenize=False)
    chunked = engine.llm.generate([prompt], params, use_tqdm=False)[0]
    at_once = engine.llm.generate([prompt], plain, use_tqdm=False)[0]
    assert (chunked.num_cached_tokens, at_once.num_cached_tokens) == (0, 128)
    assert chunked.outputs[0].token_ids == at_once.outputs[0].token_ids


def test_nothing_is_left_behind(engine: Engine) -> None:
    from inspect_lens._vllm.frontend.state import front_end

    engine.run([tokens(20)], ALL)
    engine.run([tokens(20)])
    assert engine.stats() == {"requests": 0, "steering_rows": 0, "sum_rows": 0, "shared_bytes": 0}
    assert front_end().results.n_open == 0


def test_rows_survive_preemption(tiny_folder: Path, hugging_face: HuggingFace) -> None:
    from tests.engine.test_edits import check_gates_of_pre_empted_requests
    from tests.engine.test_reductions import check as check_reduced

    # 12 blocks of 32 tokens hold three of these requests, not eight.
    bytes_per_block = 2 * LAYERS * 32 * 64 * 4
    engine = start(
        tiny_folder,
        in_process=True,
        enforce_eager=True,
        kv_cache_memory_bytes=13 * bytes_per_block,
        max_model_len=256,
        enable_prefix_caching=False,
    )
    try:
        prompts = [tokens(60 + i, seed=i) for i in range(8)]
        whole = engine.run(prompts, ALL, max_tokens=60)
        assert (before := preemptions(engine)) >= 3
        check_all(whole, hugging_face)
        # What a pre-empted request reduced before is not counted twice.
        forms = [{"reduce": "mean"}, {"reduce": "max"}, {"reduce": "norm"}, {"positions": "last"}]
        native = [{"inspect_lens": {"capture": form}} for form in forms * 2]
        outputs = engine.run(prompts, native, max_tokens=60)
        assert preemptions(engine) >= before + 3
        for output, form in zip(outputs, forms * 2, strict=True):
            check_reduced(output, hugging_face, form)
        before = preemptions(engine)
        check_gates_of_pre_empted_requests(engine, prompts, whole, hugging_face)
        assert preemptions(engine) >= before + 3
    finally:
        engine.close()


def preemptions(engine: Engine) -> int:
    found = [m.value for m in engine.llm.get_metrics() if m.name == "vllm:num_preemptions"]
    return int(sum(found))
