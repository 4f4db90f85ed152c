"""Steering against Hugging Face with the same edits, and what it must leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from inspect_lens import SteeringVector
from tests.engine.conftest import HIDDEN, Engine, Fresh, answer, tokens
from tests.engine.test_capture import ALL, TOLERANCE, fed
from tests.kit.reference import Edit, HuggingFace, max_relative_error

pytestmark = pytest.mark.engine


def random_vectors(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, HIDDEN, generator=generator)


def steer(*vectors: SteeringVector, **more: Any) -> dict[str, Any]:
    return {"apply_steering_vectors": list(vectors), **more}


def add(v: torch.Tensor, scale: float, where: list[int] | None = None) -> Edit:
    def edit(h: torch.Tensor) -> torch.Tensor:
        out = h.clone()
        rows = slice(None) if where is None else [p for p in where if p < len(h)]
        out[rows] += scale * v
        return out

    return edit


def match(v: torch.Tensor, scale: float) -> Edit:
    return lambda h: h + scale * h.norm(dim=-1, keepdim=True) * v / v.norm()


@pytest.mark.parametrize(
    ("norm_match", "edit"),
    [(False, lambda v: add(v, 3.0)), (True, lambda v: match(v, 0.7))],
)
def test_every_token_is_steered_as_hugging_face_would(
    engine: Engine,
    hugging_face: HuggingFace,
    norm_match: bool,
    edit: Callable[[torch.Tensor], Edit],
) -> None:
    v = random_vectors(1)
    vector = SteeringVector(
        activations=v, layer_indices=[1], scale=0.7 if norm_match else 3.0, norm_match=norm_match
    )
    output = engine.run([tokens(100)], steer(vector, **ALL), max_tokens=12)[0]
    expected = hugging_face.residual_stream(fed(output), {1: edit(v[0])})
    assert max_relative_error(output.activations["residual_stream"], expected) <= TOLERANCE
    receipt = output.inspect_lens.steer
    assert receipt.layers == (1,)
    assert receipt.n_tokens == 100 + 12 - 1
    assert output.inspect_lens.cache_salted


def test_several_vectors_of_one_request_add_up(engine: Engine, hugging_face: HuggingFace) -> None:
    v = random_vectors(3, seed=5)
    request = steer(
        SteeringVector(activations=v[:2], layer_indices=[0, 2], scale=2.0),
        SteeringVector(activations=v[2:], layer_indices=[2], scale=0.5, norm_match=True),
        SteeringVector(activations=v[1:2], layer_indices=[2], scale=-1.0, position_indices=[7]),
        **ALL,
    )
    output = engine.run([tokens(70)], request)[0]

    def at_two(h: torch.Tensor) -> torch.Tensor:
        return add(v[1], -1.0, [7])(match(v[2], 0.5)(add(v[1], 2.0)(h)))

    expected = hugging_face.residual_stream(fed(output), {0: add(v[0], 2.0), 2: at_two})
    assert max_relative_error(output.activations["residual_stream"], expected) <= TOLERANCE


def test_the_strength_of_an_answer_changes_where_it_is_gone_on_with(
    engine: Engine, hugging_face: HuggingFace
) -> None:
    # Someone reads six tokens, breaks the answer off, and goes on from them with another scale.
    prompt, v, n_read = tokens(70, seed=4), random_vectors(1, seed=6), 6

    def scaled(scale: float, **where: Any) -> dict[str, Any]:
        return {"op": "add", "vector": v[0].tolist(), "layers": [2], "scale": scale, **where}

    first = engine.run([prompt], {"inspect_lens": {"edits": [scaled(3.0, phase="decode")]}},
                       max_tokens=n_read)[0]  # fmt: skip
    known = [*prompt, *first.outputs[0].token_ids]
    # The last token that was read has not been fed yet: it is the first with the new scale.
    old, new = list(range(len(prompt), len(known) - 1)), [len(known) - 1]
    edits = [scaled(3.0, positions=old), scaled(-2.0, positions=new),
             scaled(-2.0, phase="decode")]  # fmt: skip
    asked = {"inspect_lens": {"edits": edits, "edits_meet": "error", "capture": {}}}
    then = engine.run([known], asked, max_tokens=8)[0]

    def at_two(h: torch.Tensor) -> torch.Tensor:
        last = list(range(len(known) - 1, len(h)))
        return add(v[0], -2.0, last)(add(v[0], 3.0, old)(h))

    expected = hugging_face.residual_stream(fed(then), {2: at_two})
    assert max_relative_error(then.activations["residual_stream"], expected) <= TOLERANCE
    plain = engine.run([known], max_tokens=8)[0]
    assert then.outputs[0].token_ids != plain.outputs[0].token_ids
    assert then.inspect_lens.steer.n_tokens == len(fed(then)) - len(prompt)


def test_named_positions_of_a_chunked_prompt_and_none_while_decoding(
    engine: Engine, hugging_face: HuggingFace
) -> None:
    where = [0, 31, 32, 150]
    v = random_vectors(1, len(where), seed=2)
    prompt = tokens(200, seed=1)
    vector = SteeringVector(activations=v, layer_indices=[2], scale=4.0, position_indices=where)
    plain = engine.run([prompt], ALL, max_tokens=16)[0]
    steered = engine.run([prompt], steer(vector, **ALL), max_tokens=16)[0]
    before = plain.activations["residual_stream"][2, :200]
    after = steered.activations["residual_stream"][2, :200]
    changed = (before != after).any(dim=-1).nonzero().flatten().tolist()
    assert changed == where
    torch.testing.assert_close(after[where] - before[where], 4.0 * v[0], rtol=1e-4, atol=1e-4)

    def edit(h: torch.Tensor) -> torch.Tensor:
        out = h.clone()
        out[where] += 4.0 * v[0]
        return out

    expected = hugging_face.residual_stream(fed(steered), {2: edit})
    assert max_relative_error(steered.activations["residual_stream"], expected) <= TOLERANCE
    assert steered.inspect_lens.steer.n_tokens == len(where)


def test_three_dimensions_without_positions_mean_the_first_ones(
    engine: Engine,
) -> None:
    v = random_vectors(1, 3, seed=8)
    prompt = tokens(80)
    plain = engine.run([prompt], ALL, max_tokens=1)[0].activations["residual_stream"]
    vector = SteeringVector(activations=v, layer_indices=[1], scale=2.0)
    steered = engine.run([prompt], steer(vector, **ALL), max_tokens=1)[0]
    changed = (plain[1] != steered.activations["residual_stream"][1]).any(dim=-1)
    assert changed.nonzero().flatten().tolist() == [0, 1, 2]


def test_steered_captured_and_plain_requests_share_a_batch(
    engine: Engine, hugging_face: HuggingFace
) -> None:
    prompts = [tokens(40 + i, seed=i) for i in range(8)]
    alone = [engine.run([p])[0].outputs[0].token_ids for p in prompts]
    vectors = [
        SteeringVector(activations=random_vectors(1, seed=i), layer_indices=[i % 4], scale=5.0)
        for i in range(8)
    ]
    requests = [steer(v, **ALL) if i % 2 else None for i, v in enumerate(vectors)]
    outputs = engine.run(prompts, requests)
    for i, output in enumerate(outputs):
        if i % 2:
            edits = {i % 4: add(random_vectors(1, seed=i)[0], 5.0)}
            expected = hugging_face.residual_stream(fed(output), edits)
            assert max_relative_error(output.activations["residual_stream"], expected) <= TOLERANCE
        else:
            assert output.outputs[0].token_ids == alone[i]


def test_a_plain_request_after_a_steered_one_equals_a_fresh_engine_bit_for_bit(
    engine: Engine, fresh: Fresh
) -> None:
    vector = SteeringVector(
        activations=random_vectors(1), layer_indices=[0], scale=9.0, norm_match=True
    )
    engine.llm.reset_prefix_cache()
    # Steered first, so that only its blocks could be in the cache.
    steered = engine.run([fresh.prompt], steer(vector), logprobs=5)[0]
    assert steered.outputs[0].token_ids != fresh.token_ids
    again = engine.run([fresh.prompt], steer(vector))[0]
    assert again.num_cached_tokens > 0
    assert again.inspect_lens.steer.cached_tokens == again.num_cached_tokens
    assert again.outputs[0].token_ids == steered.outputs[0].token_ids
    plain = answer(engine, fresh.prompt)
    assert plain.token_ids == fresh.token_ids
    assert plain.logprobs == fresh.logprobs
