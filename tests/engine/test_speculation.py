"""Speculative decoding: rows and steering where drafts are accepted and rejected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inspect_lens import SteeringVector
from tests.engine.conftest import HIDDEN, Engine, start, tokens
from tests.engine.test_capture import ALL, TOLERANCE, fed
from tests.engine.test_conditions import check_schedules
from tests.engine.test_reductions import check, request
from tests.kit.reference import HuggingFace, max_relative_error
from tests.kit.streamed import joined, outputs_of

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def drafting(tiny_folder: Path) -> Iterator[Engine]:
    made = start(
        tiny_folder,
        enforce_eager=True,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 2,
        },
    )
    yield made
    made.close()


def drafts(engine: Engine) -> tuple[int, int]:
    """Draft tokens proposed and accepted so far."""
    found = {m.name: m.value for m in engine.llm.get_metrics() if hasattr(m, "value")}
    return (
        int(found["vllm:spec_decode_num_draft_tokens"]),
        int(found["vllm:spec_decode_num_accepted_tokens"]),
    )


def test_rows_equal_hugging_face(drafting: Engine, hugging_face: HuggingFace) -> None:
    before = drafts(drafting)
    prompts = [tokens(n, seed=n) for n in (20, 40, 90)] + [[5, 6, 7, 8] * 12]
    outputs = drafting.run(prompts, ALL, max_tokens=60)
    for output in outputs:
        rows = output.activations["residual_stream"]
        expected = hugging_face.residual_stream(fed(output))
        assert rows.shape == expected.shape
        assert max_relative_error(rows, expected) <= TOLERANCE
    proposed, accepted = (now - then for now, then in zip(drafts(drafting), before, strict=True))
    assert 0 < accepted < proposed


def test_one_position_of_the_completion(drafting: Engine, hugging_face: HuggingFace) -> None:
    for position in (55, 70, 98):
        request = {"inspect_lens": {"capture": {"layers": [2], "positions": [position]}}}
        output = drafting.run([[5, 6, 7, 8] * 10], request, max_tokens=60)[0]
        expected = hugging_face.residual_stream(fed(output))[2:3, position : position + 1]
        rows = output.activations["residual_stream"]
        assert max_relative_error(rows, expected) <= TOLERANCE


@pytest.mark.parametrize(
    "form",
    [{"reduce": "mean"}, {"reduce": "max", "phase": "decode"}, {"positions": "last"}],
)
def test_rejected_drafts_are_no_part_of_a_reduction(
    drafting: Engine, hugging_face: HuggingFace, form: dict[str, Any]
) -> None:
    before = drafts(drafting)
    prompts = [tokens(n, seed=n) for n in (20, 90)] + [[5, 6, 7, 8] * 12]
    for output in drafting.run(prompts, request(**form), max_tokens=60):
        check(output, hugging_face, form)
    proposed, accepted = (now - then for now, then in zip(drafts(drafting), before, strict=True))
    assert 0 < accepted < proposed


def test_steering_beside_plain_requests(drafting: Engine, hugging_face: HuggingFace) -> None:
    v = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(0))
    vector = SteeringVector(activations=v, layer_indices=[1], scale=3.0)
    request = {"apply_steering_vectors": [vector], **ALL}
    outputs = drafting.run(
        [tokens(50, seed=i) for i in range(4)], [request, None] * 2, max_tokens=50
    )
    for output in outputs[::2]:
        expected = hugging_face.residual_stream(fed(output), {1: lambda h: h + 3.0 * v[0]})
        assert max_relative_error(output.activations["residual_stream"], expected) <= TOLERANCE
        assert output.inspect_lens.steer.n_tokens == len(fed(output))


def test_rows_that_are_streamed_are_those_of_accepted_tokens(
    drafting: Engine, hugging_face: HuggingFace
) -> None:
    """What a rejected draft left is not sent, also where the next step has not corrected it."""
    before = drafts(drafting)
    prompts = [tokens(20, seed=20), tokens(90, seed=90), [5, 6, 7, 8] * 12]
    extra = {"inspect_lens": {"capture": {"layers": "all"}, "stream_results": True}}
    found = joined(outputs_of(drafting.llm, [(p, extra) for p in prompts], max_tokens=60))
    for i, prompt in enumerate(prompts):
        mine = found[i, 0]
        fed_tokens = [*prompt, *mine.token_ids[:-1]]
        rows = torch.from_numpy(mine.rows("residual_stream"))
        assert mine.positions("residual_stream") == list(range(len(fed_tokens)))
        assert max_relative_error(rows, hugging_face.residual_stream(fed_tokens)) <= TOLERANCE
        assert mine.sizes == [(n, len(prompt) + n - 1) for n, _ in mine.sizes]
    proposed, accepted = (now - then for now, then in zip(drafts(drafting), before, strict=True))
    assert 0 < accepted < proposed


def test_schedules_and_conditions_of_the_prompt_beside_drafts(
    drafting: Engine, hugging_face: HuggingFace
) -> None:
    before = drafts(drafting)
    check_schedules(drafting, hugging_face, max_tokens=60)
    proposed, accepted = (now - then for now, then in zip(drafts(drafting), before, strict=True))
    assert 0 < accepted < proposed
