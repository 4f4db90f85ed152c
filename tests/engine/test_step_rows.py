"""All layers of long prompts, in an engine whose capture buffer holds a part of a step's rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import BLOCK, LAYERS, STEP_TOKENS, Engine, start, tokens
from tests.engine.test_capture import ALL, check_all, preemptions
from tests.kit.reference import HuggingFace

pytestmark = pytest.mark.engine

SEQS = 8
OPTIONS: dict[str, Any] = {
    "max_num_seqs": SEQS,
    # 16 blocks hold one of the longest prompts, and four of eight that are pre-empted.
    "kv_cache_memory_bytes": 17 * (2 * LAYERS * BLOCK * 64 * 4),
    "enable_prefix_caching": False,
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param({"enforce_eager": True}, id="eager"),
        pytest.param(
            {},
            id="compiled",
            marks=pytest.mark.nightly(
                held_by=(
                    "tests/engine/test_step_rows.py::"
                    "test_all_layers_of_long_prompts_beside_plain_ones"
                ),
                why="an engine that compiles; an eager one runs the same tests",
            ),
        ),
    ],
)
def small(request: pytest.FixtureRequest, tiny_folder: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INSPECT_LENS_RING_BYTES", "1000")
        made = start(tiny_folder, **OPTIONS, **request.param)
    yield made
    made.close()


def test_all_layers_of_long_prompts_beside_plain_ones(
    small: Engine, hugging_face: HuggingFace
) -> None:
    prompts = [tokens(n, seed=n) for n in (300, 5, 64, 200, 65, 130, 1, 400, 63, 250, 90, 33)]
    alone = [small.run([prompt], max_tokens=6)[0] for prompt in prompts]
    extra = [ALL if i % 3 else None for i in range(len(prompts))]
    outputs = small.run(prompts, extra, max_tokens=6)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [
        list(o.outputs[0].token_ids) for o in alone
    ]
    captured = [o for o, asked in zip(outputs, extra, strict=True) if asked]
    check_all(captured, hugging_face)
    receipt = captured[-1].inspect_lens
    # More rows than one step of the engine could have left in the buffer.
    assert (LAYERS + 1) * SEQS < LAYERS * STEP_TOKENS <= LAYERS * receipt.n_prompt * 2


def test_pre_empted_requests_feed_their_tokens_again_in_such_steps(
    small: Engine, hugging_face: HuggingFace
) -> None:
    before = preemptions(small)
    outputs = small.run([tokens(60 + i, seed=i) for i in range(8)], ALL, max_tokens=60)
    assert preemptions(small) > before
    check_all(outputs, hugging_face)
