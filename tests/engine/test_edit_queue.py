"""Requests that fill the edit table many times over, in one batch of a real engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from inspect_lens.spec import Add
from tests.engine.conftest import HIDDEN, start, tokens
from tests.kit.reference import HuggingFace, max_relative_error

pytestmark = pytest.mark.engine

ROWS = 3


def test_many_requests_with_edits_of_their_own_share_a_small_table(
    tiny_folder: Path, hugging_face: HuggingFace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight run at once, and the table has vectors for three of them."""
    monkeypatch.setenv("INSPECT_LENS_BANK_BYTES", str(ROWS * HIDDEN * 4))
    engine = start(tiny_folder, in_process=True, enforce_eager=True)
    prompt, n = tokens(12), 60
    vectors = np.random.default_rng(0).standard_normal((n, HIDDEN)).astype("f4") * 4
    asked = [
        {
            "inspect_lens": {
                "capture": {"positions": "prompt", "layers": [3]},
                "edits": [Add(vector=vector, layers=(1,)).model_dump(mode="json")],
            }
        }
        if i % 5
        else {"inspect_lens": {"capture": {"positions": "prompt", "layers": [3]}}}
        for i, vector in enumerate(vectors)
    ]
    try:
        found = engine.run([prompt] * n, asked, max_tokens=3)
        for i in (0, 1, 7, n - 1):
            edits = {1: torch.from_numpy(vectors[i]).add} if i % 5 else {}
            expected = hugging_face.residual_stream(prompt, edits)
            rows = found[i].activations["residual_stream"][0]
            assert max_relative_error(rows, expected[3]) <= 3e-4
        # Nobody's rows are those of another.
        firsts = {bytes(np.asarray(f.activations["residual_stream"])) for f in found}
        assert len(firsts) == n - n // 5 + 1
        stats = engine.stats()
        assert (stats["requests"], stats["steering_rows"]) == (0, 0)
    finally:
        engine.close()
