"""A captured prompt is computed once: later captures read the prefix cache, with the same rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inspect_lens.spec import Add, LensRequest
from tests.engine.conftest import BLOCK, HIDDEN, Engine, tokens
from tests.kit.reference import HuggingFace, max_relative_error

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4
ALL = {"output_residual_stream": True}
NEW = iter(range(1000, 2000))


def prompt_of(n: int) -> list[int]:
    """A prompt that no other test has fed."""
    return tokens(n, seed=next(NEW))


def kept(engine: Engine) -> Any:
    """Wait until the front-end has put away what it keeps."""
    from inspect_lens._vllm.frontend.state import front_end

    caches = front_end().row_caches
    for cache in caches:
        cache.settle()
    return max(cache.n_bytes for cache in caches)


def captured(engine: Engine, prompt: list[int], asked: Any = ALL, n: int = 6) -> Any:
    output = engine.run([prompt], asked, max_tokens=n)[0]
    kept(engine)
    return output


def check(output: Any, reference: HuggingFace) -> None:
    fed = [*output.prompt_token_ids, *list(output.outputs[0].token_ids)[:-1]]
    rows = output.activations["residual_stream"]
    expected = reference.residual_stream(fed)
    assert rows.shape == expected.shape
    assert max_relative_error(rows, expected) <= TOLERANCE
    receipt = output.inspect_lens.capture
    assert (receipt.first_position, receipt.n_positions) == (0, len(fed))


def test_the_third_time_a_prompt_is_not_computed_again(
    engine: Engine, hugging_face: HuggingFace
) -> None:
    prompt = prompt_of(150)
    outputs = [captured(engine, prompt) for _ in range(3)]
    for output in outputs:
        check(output, hugging_face)
        assert output.outputs[0].token_ids == outputs[0].outputs[0].token_ids
    # Offline, a block is kept when it comes the second time; the last token is always computed.
    known = [output.inspect_lens.capture.cached_positions for output in outputs]
    assert known == [0, 0, 144]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 144 // BLOCK * BLOCK]
    first, again = (o.activations["residual_stream"][:, :144] for o in outputs[1:])
    assert torch.equal(first, again)


def test_turns_of_an_agent_compute_what_is_new(engine: Engine, hugging_face: HuggingFace) -> None:
    prompt, computed, known = prompt_of(100), [], []
    for turn in range(5):
        output = captured(engine, prompt)
        check(output, hugging_face)
        computed.append(len(prompt) - (output.num_cached_tokens or 0))
        known.append(output.inspect_lens.capture.cached_positions)
        prompt = [*prompt, *output.outputs[0].token_ids, *tokens(26, seed=turn)]
    # By the second time a beginning is met; what a turn adds is two blocks at most.
    assert known == [0, 0, 96, 128, 160]
    assert computed == [100, 132, 164 - 96, 196 - 128, 228 - 160]


def test_blocks_of_requests_that_captured_nothing_are_computed(
    engine: Engine, hugging_face: HuggingFace
) -> None:
    prompt = prompt_of(130)
    engine.run([prompt])
    again = engine.run([prompt])[0]
    assert again.num_cached_tokens == 128
    output = captured(engine, prompt)
    assert output.num_cached_tokens == 0
    check(output, hugging_face)


def test_hits_end_where_rows_end(engine: Engine, hugging_face: HuggingFace) -> None:
    prompt = prompt_of(180)
    for _ in range(2):
        captured(engine, prompt[:70])
    engine.run([prompt])  # the prefix cache has all of it, and there are rows of 64 tokens
    output = captured(engine, prompt)
    assert output.inspect_lens.capture.cached_positions == 64
    assert output.num_cached_tokens == 64
    check(output, hugging_face)


def test_other_layers_and_other_steering_have_rows_of_their_own(
    engine: Engine, hugging_face: HuggingFace
) -> None:
    prompt = prompt_of(100)
    for _ in range(3):
        whole = captured(engine, prompt)
    assert whole.inspect_lens.capture.cached_positions == 96
    one = captured(engine, prompt, {"output_residual_stream": [2]})
    assert one.inspect_lens.capture.cached_positions == 0
    assert (
        max_relative_error(
            one.activations["residual_stream"][0], whole.activations["residual_stream"][2]
        )
        <= TOLERANCE
    )

    push = torch.ones(HIDDEN).numpy()
    request = LensRequest(
        capture={"layers": "all"}, edits=[Add(vector=push, layers=[1], scale=0.5)]
    )
    edited = [captured(engine, prompt, {"inspect_lens": request}) for _ in range(3)]
    assert [o.inspect_lens.capture.cached_positions for o in edited] == [0, 0, 96]
    rows = [o.activations["residual_stream"] for o in edited]
    assert max_relative_error(rows[2], rows[0]) <= TOLERANCE
    assert max_relative_error(rows[0][1], whole.activations["residual_stream"][1]) > 1e-3
    assert edited[2].inspect_lens.steer.cached_tokens == 96


def test_rows_go_with_the_prefix_cache(engine: Engine, hugging_face: HuggingFace) -> None:
    prompt = prompt_of(100)
    for _ in range(2):
        captured(engine, prompt)
    assert kept(engine) > 0
    assert engine.llm.reset_prefix_cache()
    assert kept(engine) == 0
    output = captured(engine, prompt)
    assert (output.inspect_lens.capture.cached_positions, output.num_cached_tokens) == (0, 0)
    check(output, hugging_face)


def test_a_batch_takes_rows_of_its_own_prompts(engine: Engine, hugging_face: HuggingFace) -> None:
    shared = prompt_of(64)
    prompts = [[*shared, *tokens(n, seed=n)] for n in (1, 17, 40, 90)]
    for _ in range(3):
        outputs = engine.run([*prompts, tokens(33, seed=5)], [ALL] * 4 + [None], max_tokens=5)
        kept(engine)
        for output in outputs[:4]:
            check(output, hugging_face)
    assert [o.inspect_lens.capture.cached_positions for o in outputs[:4]] == [64, 80, 96, 144]


def test_who_does_not_want_it_says_so(engine: Engine, hugging_face: HuggingFace) -> None:
    prompt = prompt_of(100)
    for _ in range(2):
        captured(engine, prompt)
    output = captured(engine, prompt, {**ALL, "skip_reading_prefix_cache": True})
    assert (output.inspect_lens.capture.cached_positions, output.num_cached_tokens) == (0, 0)
    check(output, hugging_face)
