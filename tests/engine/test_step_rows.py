"""All layers of long prompts, in an engine whose capture buffer holds a part of a step's rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import LAYERS, STEP_TOKENS, Engine, start, tokens
from tests.engine.test_capture import ALL, check_all, preemptions
from tests.kit.reference import HuggingFace

pytestmark = pytest.mark.engine

SEQS = 8


@pytest.fixture(scope="module")
def small(tiny_folder: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INSPECT_LENS_RING_BYTES", "1000")
        made = start(tiny_folder, max_num_seqs=SEQS)
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
    tiny_folder: Path, hugging_face: HuggingFace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSPECT_LENS_RING_BYTES", "1000")
    engine = start(
        tiny_folder,
        enforce_eager=True,
        # 12 blocks hold three of these requests, not eight.
        kv_cache_memory_bytes=13 * (2 * LAYERS * 32 * 64 * 4),
        max_model_len=256,
        enable_prefix_caching=False,
        max_num_seqs=SEQS,
    )
    try:
        outputs = engine.run([tokens(60 + i, seed=i) for i in range(8)], ALL, max_tokens=60)
        assert preemptions(engine) >= 1
        check_all(outputs, hugging_face)
    finally:
        engine.close()
