"""Requests whose own steering or hooks overflow: neighbours keep their bits, then and later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens import Hook, SteeringVector
from inspect_lens.errors import HookError, SpecError
from tests.engine.conftest import HIDDEN, LAYERS, Engine, start, tokens

pytestmark = pytest.mark.engine

AT_ONCE = 32
MOST = 12
"""Tokens of an innocent request; others end after 3, in a step in which no innocent does."""


@pytest.fixture(scope="module")
def crowded(tiny_folder: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("INSPECT_LENS_ALLOW_CODE", "1")
        made = start(
            tiny_folder,
            enforce_eager=True,
            enable_prefix_caching=False,
            max_num_seqs=AT_ONCE,
            max_num_batched_tokens=2048,
            # Few blocks: what one request leaves behind another one gets.
            num_gpu_blocks_override=2 * AT_ONCE + 2,
        )
    yield made
    made.close()


def vector(scale: float) -> dict[str, Any]:
    """Each layer multiplies the norm of the stream by so much."""
    v = torch.randn(LAYERS, HIDDEN, generator=torch.Generator().manual_seed(1))
    steer = SteeringVector(
        activations=v, layer_indices=list(range(LAYERS)), scale=scale, norm_match=True
    )
    return {"apply_steering_vectors": [steer]}


def spoiling(value: float) -> dict[str, Any]:
    def spoil(ctx: Any, h: Any) -> Any:
        return h * value

    return {"apply_hooks": [Hook(fn=spoil, layer_indices=[1])]}


def crowd(engine: Engine, other: dict[str, Any]) -> tuple[list[Any], list[Exception]]:
    """Innocent requests, every second one captured, beside as many others, at once.

    Returns:
        Token ids, log-probabilities and rows of the innocent ones; errors of the others.
    """
    from vllm import SamplingParams

    llm = engine.llm.llm_engine
    for i in range(AT_ONCE):
        is_other = i % 2 == 1
        extra = other if is_other else {"output_residual_stream": True} if i % 4 == 0 else None
        params = SamplingParams(
            max_tokens=3 if is_other else MOST,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            logprobs=3,
            extra_args=extra,
        )
        llm.add_request(
            f"{'o' if is_other else 'i'}{i}", {"prompt_token_ids": tokens(37, i)}, params
        )
    found: dict[str, Any] = {}
    errors: list[Exception] = []
    while llm.has_unfinished_requests():
        try:
            outputs = llm.step()
        except (SpecError, HookError) as error:
            errors.append(error)
            continue
        for output in outputs:
            if output.finished and output.request_id.startswith("i"):
                one = output.outputs[0]
                rows = getattr(output, "activations", {}).get("residual_stream")
                logprobs = [{k: v.logprob for k, v in step.items()} for step in one.logprobs]
                found[output.request_id] = (
                    list(one.token_ids),
                    logprobs,
                    None if rows is None else np.asarray(rows.float()).tobytes(),
                )
    assert len(found) == AT_ONCE // 2
    return [found[key] for key in sorted(found)], errors


@pytest.mark.parametrize(
    ("calm", "wild", "error"),
    [
        (vector(0.1), vector(3e9), (SpecError, "a steered row would have been too large")),
        (spoiling(1.0), spoiling(float("nan")), (HookError, "spoil after layer 1 gave back rows")),
        (spoiling(1.0), spoiling(3e38), (HookError, "spoil after layer 1 gave back rows")),
    ],
    ids=["steering", "nan of a hook", "large rows of a hook"],
)
def test_neighbours_keep_their_bits(
    crowded: Engine, calm: Any, wild: Any, error: tuple[type[Exception], str]
) -> None:
    expected, none = crowd(crowded, calm)
    assert not none
    for _ in range(2):
        found, errors = crowd(crowded, wild)
        assert found == expected
        assert errors
        assert all(isinstance(e, error[0]) and error[1] in str(e) for e in errors)
    # And those who get the blocks afterwards.
    found, none = crowd(crowded, calm)
    assert found == expected
    assert not none
    assert crowded.stats()["requests"] == 0
