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
    # The norm that follows a tap adds the two halves of the stream in its own kernel, with the tap
    # and without; so there is nothing that could round otherwise, and bits are compared.
    folder = tiny_llama(tmp_path / "model", layers=4, hidden=256, dtype=torch.bfloat16)
    options = ("--dtype", "bfloat16")
    without = run(folder, tmp_path / "cache", *options, INSPECT_LENS_DISABLE="1")
    with_taps = run(folder, tmp_path / "cache", "--capture", *options, INSPECT_LENS_SITES=sites)
    assert with_taps["captured"] is True
    assert with_taps["answers"] == without["answers"]
