"""An installed plug-in that nobody uses changes no output: compiled, with graphs, on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_unused import run
from tests.kit.tiny_models import tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


# In compiled bfloat16 last bits do differ. A tap reads the stream as it is stored; without taps the
# compiler fuses sums and norms across that place, and so writes other kernels, which add in
# another order. Where PyTorch's own kernels run, or nothing is rounded in between, nothing differs.
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    # Split, replayed as graphs of the device, and not compiled.
    "graphs": {"compilation_config": {"backend": "eager"}},
    "compiled-float32": {"dtype": "float32"},
}


@pytest.mark.parametrize("mode", MODES)
def test_tokens_and_logprobs_equal_those_of_an_engine_without_the_plug_in(
    tmp_path: Path, mode: str
) -> None:
    folder = tiny_llama(tmp_path / "model", layers=4, hidden=256, dtype=torch.bfloat16)
    options: list[str] = []
    for name, value in ({"dtype": "bfloat16"} | MODES[mode]).items():
        options += ["--option", f"{name}={json.dumps(value)}"]
    cache = tmp_path / "cache"
    without = run(folder, cache, *options, INSPECT_LENS_DISABLE="1")
    for sites in ("resid_post", "all"):
        with_taps = run(folder, cache, *options, "--capture", INSPECT_LENS_SITES=sites)
        assert with_taps["captured"] is True
        assert with_taps["answers"] == without["answers"]
