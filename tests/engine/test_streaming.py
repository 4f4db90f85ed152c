"""Rows that come with their tokens: the bits of those that come at the end, and each in time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens.errors import SpecError
from inspect_lens.spec import LENS_NAME, Add, Gate
from tests.engine.conftest import HIDDEN, LAYERS, Engine, tokens
from tests.engine.test_cached_rows import captured
from tests.engine.test_capture import TOLERANCE
from tests.kit.reference import HuggingFace, max_relative_error
from tests.kit.streamed import joined, outputs_of

pytestmark = pytest.mark.engine


def asking(**fields: Any) -> dict[str, Any]:
    return {"inspect_lens": {**fields, "stream_results": True}}


def test_streamed_rows_are_those_of_a_hugging_face_forward_and_of_the_whole_result(
    engine: Engine, hugging_face: HuggingFace
) -> None:
    """Prompts in several chunks beside short ones, and requests without streaming beside them."""
    prompts = [tokens(n, seed=n) for n in (1, 17, 64, 150)]
    extra = asking(capture={"layers": "all"})
    plain = {"output_residual_stream": True}
    asked = [(p, extra) for p in prompts] + [(p, plain) for p in prompts]
    found = joined(outputs_of(engine.llm, asked, max_tokens=9))
    for i, prompt in enumerate(prompts):
        mine, other = found[i, 0], found[i + len(prompts), 0]
        assert mine.sizes == [(n, len(prompt) + n - 1) for n in range(1, 10)], "each with its token"
        assert mine.positions("residual_stream") == list(range(len(prompt) + 8))
        whole = mine.last.activations["residual_stream"]
        rows = torch.from_numpy(mine.rows("residual_stream"))
        assert torch.equal(rows, whole)
        assert torch.equal(rows, other.last.activations["residual_stream"])
        assert not other.parts
        expected = hugging_face.residual_stream([*prompt, *mine.token_ids[:-1]])
        assert max_relative_error(rows, expected) <= TOLERANCE
        assert mine.last.inspect_lens == other.last.inspect_lens
        assert mine.last.inspect_lens.capture.rows == LAYERS * (len(prompt) + 8)


def test_choices_have_rows_of_their_own(engine: Engine) -> None:
    prompt = tokens(40, seed=2)
    extra = asking(capture={"layers": [1, 2]})
    steps = outputs_of(engine.llm, [(prompt, extra)], n=3, temperature=1.0, max_tokens=6)
    found = joined(steps)
    assert set(found) == {(0, 0), (0, 1), (0, 2)}
    for choice in found.values():
        whole = choice.last.activations["residual_stream"]
        assert torch.equal(torch.from_numpy(choice.rows("residual_stream")), whole)
        assert choice.positions("residual_stream") == list(range(45))
    assert len({tuple(choice.token_ids) for choice in found.values()}) > 1


@pytest.mark.parametrize(
    ("capture", "expected"),
    [
        ({"positions": "completion"}, [*range(50, 57)]),
        ({"positions": "last_prompt"}, [49]),
        ({"positions": [3, 49, 52]}, [3, 49, 52]),
        ({"positions": "all", "phase": "decode", "dtype": "float16"}, [*range(50, 57)]),
        ({"positions": "prompt", "reduce": "norm"}, [*range(50)]),
    ],
)
def test_of_chosen_tokens_the_rows_come_with_them(
    engine: Engine, capture: dict[str, Any], expected: list[int]
) -> None:
    prompt = tokens(50, seed=6)
    asked = [(prompt, asking(capture={"layers": [2], **capture}))]
    mine = joined(outputs_of(engine.llm, asked))[0, 0]
    assert mine.positions("residual_stream") == expected
    whole = mine.last.activations["residual_stream"]
    assert torch.equal(torch.from_numpy(mine.rows("residual_stream")), whole)
    of_each = [(n, sum(p <= 49 + n - 1 for p in expected)) for n in range(1, 9)]
    assert mine.sizes == of_each


def test_rows_that_an_earlier_request_has_captured_come_with_the_first_token(
    engine: Engine,
) -> None:
    """The engine computes the rest alone, and its cached rows are put in front of the first."""
    prompt, extra = tokens(170, seed=13), {"output_residual_stream": [2]}
    first, second = (captured(engine, prompt, extra, n=8) for _ in range(2))
    asked = [(prompt, asking(capture={"layers": [2]}))]
    mine = joined(outputs_of(engine.llm, asked))[0, 0]
    receipt = mine.last.inspect_lens
    assert receipt.capture.cached_positions > 0, "kept from the second time on"
    assert mine.positions("residual_stream") == list(range(177))
    assert mine.sizes[0] == (1, 170)
    rows = torch.from_numpy(mine.rows("residual_stream"))
    assert torch.equal(rows, mine.last.activations["residual_stream"])
    assert max_relative_error(rows, second.activations["residual_stream"]) <= TOLERANCE
    assert max_relative_error(rows, first.activations["residual_stream"]) <= TOLERANCE


def test_lens_tables_and_gates_come_with_their_tokens(engine: Engine) -> None:
    """A gate that fires on a sampled token is told of once, before the end."""
    direction = np.zeros(HIDDEN, dtype=np.float32)
    direction[0] = 1.0
    gate = Gate(direction=direction, layer=1, threshold=-1e6, scope="rest")
    edit = Add(vector=direction, layers=[2], scale=0.0, when=gate, positions="completion")
    prompt = tokens(30, seed=8)
    lens = {"layers": [1, 3], "top_k": 3, "positions": "all"}
    extra = asking(lens=lens, edits=[edit])
    mine = joined(outputs_of(engine.llm, [(prompt, extra)]), LENS_NAME)[0, 0]
    assert mine.positions(LENS_NAME) == list(range(37))
    whole = mine.last.activations[LENS_NAME]
    assert torch.equal(torch.from_numpy(mine.rows(LENS_NAME)), whole)
    assert mine.sizes[0][1] == 30
    told = [gate for part in mine.parts for gate in part.gates]
    (receipt,) = mine.last.inspect_lens.steer.gates
    assert [(g.fired_at, g.layer, g.sha256) for g in told] == [
        (receipt.fired_at, receipt.layer, receipt.sha256)
    ]
    assert not mine.parts[-1].gates


def test_an_answer_that_comes_as_a_whole_refuses_to_be_streamed(engine: Engine) -> None:
    with pytest.raises(SpecError, match=r"stream_results: this answer comes as a whole.*DELTA"):
        engine.run([tokens(5)], asking(capture={"layers": [1]}))
    assert len(engine.run([tokens(5)])) == 1
