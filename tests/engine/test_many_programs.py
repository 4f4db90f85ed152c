"""256 different programs of edits among plain requests: 10,000 answers, each as it is alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inspect_lens import LensRequest
from tests.engine.conftest import HIDDEN, LAYERS, Engine, start, tokens
from tests.kit.edit_cases import edit_cases

pytestmark = pytest.mark.engine

N_PROGRAMS = 256
ROUNDS = 20
LENGTHS = (7, 20, 33, 64, 65, 90)


@pytest.fixture
def wide(tiny_folder: Path) -> Iterator[Engine]:
    made = start(
        tiny_folder,
        enforce_eager=True,
        max_num_seqs=2 * N_PROGRAMS,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=512 << 20,
    )
    yield made
    made.close()


def programs() -> list[dict[str, Any]]:
    """Two edits each, of every operation, at every layer."""
    made = []
    for seed in range(N_PROGRAMS):
        cases = [edit for edit, _ in edit_cases(seed, layer=seed % LAYERS, width=HIDDEN)]
        edits = [cases[seed % len(cases)], cases[(7 * seed + 3) % len(cases)]]
        made.append({"inspect_lens": LensRequest(edits=edits)})
    return made


@pytest.mark.nightly(
    held_by=(
        "tests/engine/test_edits.py::"
        "test_different_programs_and_plain_requests_in_one_batch_keep_their_solo_answers",
    ),
    why="10,240 requests of 256 programs, and each once alone",
)
def test_none_of_ten_thousand_answers_is_touched_by_another_program(wide: Engine) -> None:
    asked: list[dict[str, Any] | None] = [*programs(), *[None] * N_PROGRAMS]
    prompts = [tokens(LENGTHS[i % len(LENGTHS)], seed=i % len(LENGTHS)) for i in range(len(asked))]
    alone: dict[tuple[int, int], list[int]] = {}

    def solo(i: int) -> list[int]:
        # Plain requests of one prompt are one request.
        key = (i, 0) if asked[i] is not None else (-1, i % len(LENGTHS))
        if key not in alone:
            output = wide.run([prompts[i]], [asked[i]], max_tokens=6)[0]
            alone[key] = list(output.outputs[0].token_ids)
        return alone[key]

    expected = [solo(i) for i in range(len(asked))]
    edited = {tuple(answer) for answer in expected[:N_PROGRAMS]}
    assert len(edited) > N_PROGRAMS // 2, "programs change what is said"
    n_answers = 0
    for k in range(ROUNDS):
        order = np.random.default_rng(k).permutation(len(asked)).tolist()
        outputs = wide.run([prompts[i] for i in order], [asked[i] for i in order], max_tokens=6)
        found = [list(output.outputs[0].token_ids) for output in outputs]
        wrong = [i for i, tokens_of in zip(order, found, strict=True) if tokens_of != expected[i]]
        assert not wrong, f"round {k}: {len(wrong)} answers differ, of requests {wrong[:9]}"
        n_answers += len(found)
    assert n_answers >= 10_000
    assert wide.stats()["steering_rows"] == 0
