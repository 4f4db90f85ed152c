"""An installed plug-in that nobody uses changes no output: compiled, with graphs, on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.test_unused import run
from tests.kit.tiny_models import tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("sites", ["resid_post", "all"])
def test_tokens_and_logprobs_equal_those_of_an_engine_without_the_plug_in(
    tmp_path: Path, sites: str
) -> None:
    # Without a tap the compiler keeps sums of the stream in float32 from norm to norm, unless
    # it is told to round as PyTorch does: see `tests/engine/test_unused.py`.
    rounding = {"TORCHINDUCTOR_EMULATE_PRECISION_CASTS": "1"}
    folder = tiny_llama(tmp_path / "model", layers=4, hidden=256, dtype=torch.bfloat16)
    options = ("--dtype", "bfloat16")
    without = run(folder, tmp_path / "cache", *options, INSPECT_LENS_DISABLE="1", **rounding)
    with_taps = run(
        folder, tmp_path / "cache", "--capture", *options, INSPECT_LENS_SITES=sites, **rounding
    )
    assert with_taps["captured"] is True
    assert with_taps["answers"] == without["answers"]
