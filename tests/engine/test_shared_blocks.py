"""Steering that begins later shares the blocks in front of it, with plain requests and others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens.spec import Ablate, Add, EditBase, Gate, LensRequest
from tests.engine.conftest import BLOCK, HIDDEN, Engine, tokens
from tests.kit.edit_cases import random_rows

pytestmark = pytest.mark.engine

NEW = iter(range(5000, 9000))
PUSH = random_rows(3, 1, HIDDEN)[0]
ROWS = 16
"""Tokens of a block of rows that are kept."""


def new_prompt(n: int) -> list[int]:
    return tokens(n, seed=next(NEW))


def steered(*edits: EditBase, capture: Any = None) -> dict[str, Any]:
    return {"inspect_lens": LensRequest(edits=edits, capture=capture)}


def decode(scale: float = 6.0, **fields: Any) -> Add:
    return Add(vector=PUSH, layers=[1], scale=scale, phase="decode", **fields)


def at(position: int, scale: float = 6.0) -> Add:
    return Add(vector=PUSH, layers=[1], scale=scale, positions=[position])


def answer(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def solo(engine: Engine, prompt: list[int], extra: dict[str, Any]) -> Any:
    """The same without anything that another request left behind."""
    assert engine.llm.reset_prefix_cache()
    return engine.run([prompt], extra, max_tokens=12)[0]


def test_a_sweep_of_scales_computes_its_prompt_once(engine: Engine) -> None:
    prompt = new_prompt(200)
    whole = len(prompt) // BLOCK * BLOCK
    scales = np.linspace(-8, 8, 20)
    outputs = [engine.run([prompt], steered(decode(s)), max_tokens=12)[0] for s in scales]
    assert [o.num_cached_tokens for o in outputs] == [0, *[whole] * 19]
    assert len({tuple(answer(o)) for o in outputs}) > 5, "the scales do something"
    for scale, output in list(zip(scales, outputs, strict=True))[::5]:
        assert output.inspect_lens.steer.n_tokens == 11
        assert output.inspect_lens.steer.cached_tokens == 0
        assert answer(output) == answer(solo(engine, prompt, steered(decode(scale))))


def test_plain_requests_and_steered_ones_have_the_prompt_in_common(engine: Engine) -> None:
    prompt = new_prompt(96)
    first = engine.run([prompt], max_tokens=12)[0]
    second = engine.run([prompt], steered(decode()), max_tokens=12)[0]
    third = engine.run([prompt], max_tokens=12)[0]
    assert second.num_cached_tokens == third.num_cached_tokens == 64  # the last token is computed
    assert answer(first) == answer(third) != answer(second)


@pytest.mark.parametrize("position", [0, 31, 32, 100, 127])
def test_blocks_are_shared_up_to_the_first_edited_token(engine: Engine, position: int) -> None:
    prompt = new_prompt(128)
    engine.run([prompt], max_tokens=4)
    most = 127 // BLOCK * BLOCK  # the last token is computed
    shared = min(position // BLOCK * BLOCK, most)
    edited = engine.run([prompt], steered(at(position)), max_tokens=12)[0]
    assert edited.num_cached_tokens == shared
    assert edited.inspect_lens.steer.n_tokens == 1
    again = engine.run([prompt], steered(at(position)), max_tokens=12)[0]
    assert again.num_cached_tokens == most
    told = again.inspect_lens.steer
    assert told.n_tokens + told.cached_tokens == max(most - position, 1)
    other = engine.run([prompt], steered(at(position, scale=-6.0)), max_tokens=12)[0]
    assert other.num_cached_tokens == shared
    assert answer(edited) == answer(again)
    assert answer(edited) == answer(solo(engine, prompt, steered(at(position))))
    assert answer(other) == answer(solo(engine, prompt, steered(at(position, scale=-6.0))))


def test_receipts_of_choices_count_the_blocks_that_each_has_read(engine: Engine) -> None:
    """One choice computes the prompt and the others read its blocks, which vLLM counts together."""
    prompt = new_prompt(180)
    extra = steered(Add(vector=PUSH, layers=[1], scale=6.0))
    (output,) = engine.run([prompt], extra, max_tokens=5, n=3, temperature=1.0)
    told = [choice.inspect_lens.steer for choice in output.outputs]
    assert [steer.n_tokens + steer.cached_tokens for steer in told] == [184] * 3
    assert {steer.cached_tokens > 0 for steer in told} == {False, True}


def test_what_was_sampled_under_steering_is_not_plain(engine: Engine) -> None:
    prompt = new_prompt(90)
    edited = engine.run([prompt], steered(decode()), max_tokens=40)[0]
    fed = [*prompt, *answer(edited)]
    # The block that holds tokens 64 to 95 has sampled ones, which were steered.
    assert engine.run([[*fed, 7]], max_tokens=4)[0].num_cached_tokens == 64
    assert engine.run([[*fed, 7]], max_tokens=4)[0].num_cached_tokens == 128


def test_two_edits_share_what_lies_before_the_first(engine: Engine) -> None:
    prompt = new_prompt(128)
    engine.run([prompt], max_tokens=4)
    both = steered(decode(), Ablate(direction=PUSH, layers=[2], positions=[70, 100]))
    assert engine.run([prompt], both, max_tokens=12)[0].num_cached_tokens == 64
    gate = Gate(direction=PUSH, layer=1, threshold=0.0, scope="rest", reads="last_prompt")
    gated = steered(Add(vector=PUSH, layers=[2], when=gate, positions="completion"))
    assert engine.run([prompt], gated, max_tokens=12)[0].num_cached_tokens == 96


def test_rows_in_front_of_the_first_edit_are_shared_too(engine: Engine) -> None:
    from tests.engine.test_cached_rows import captured

    prompt = new_prompt(128)
    asked = {"layers": "all"}
    plain = [captured(engine, prompt, {"inspect_lens": LensRequest(capture=asked)})
             for _ in range(2)][1]  # fmt: skip
    edited = captured(engine, prompt, steered(at(70), capture=asked))
    assert edited.inspect_lens.capture.cached_positions == 70 // ROWS * ROWS
    assert edited.num_cached_tokens == 70 // BLOCK * BLOCK
    rows, usual = (o.activations["residual_stream"] for o in (edited, plain))
    torch.testing.assert_close(rows[:, :70], usual[:, :70], rtol=1e-4, atol=1e-4)
    pushed = rows[1, 70] - usual[1, 70]
    torch.testing.assert_close(pushed, torch.from_numpy(6.0 * PUSH), rtol=1e-3, atol=1e-3)
    assert float((rows[2, 71:128] - usual[2, 71:128]).abs().max()) > 1e-3
    again = captured(engine, prompt, {"inspect_lens": LensRequest(capture=asked)})
    assert again.inspect_lens.capture.cached_positions == 127 // ROWS * ROWS
    torch.testing.assert_close(
        again.activations["residual_stream"][:, :128], usual[:, :128], rtol=1e-4, atol=1e-4
    )


def test_mixed_requests_never_read_each_others_blocks(engine: Engine) -> None:
    rng = np.random.default_rng(0)
    stems = [new_prompt(160) for _ in range(3)]
    asked, prompts = [], []
    for _ in range(120):
        stem = stems[rng.integers(3)][: int(rng.integers(40, 160))]
        kind = int(rng.integers(4))
        scale = float(rng.choice([-6.0, 6.0]))
        edit = [None, decode(scale), at(int(rng.integers(len(stem))), scale),
                Add(vector=PUSH, layers=[2], scale=scale)][kind]  # fmt: skip
        prompts.append(stem)
        asked.append(None if edit is None else steered(edit))
    outputs = engine.run(prompts, asked, max_tokens=8)
    hits = sum(o.num_cached_tokens or 0 for o in outputs)
    assert hits > 2000
    for i in rng.choice(120, size=12, replace=False):
        assert engine.llm.reset_prefix_cache()
        alone = engine.run([prompts[i]], asked[i], max_tokens=8)[0]
        assert answer(alone) == answer(outputs[i]), (i, asked[i])
