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


MODES = {
    "eager": {"enforce_eager": True},
    # Graphs of the device, captured from PyTorch's own kernels.
    "graphs": {"compilation_config": {"backend": "eager"}},
    "compiled-float32": {"dtype": "float32"},
    "compiled-rounded": {},
}


@pytest.mark.parametrize("mode", MODES)
def test_tokens_and_logprobs_equal_those_of_an_engine_without_the_plug_in(
    tmp_path: Path, mode: str
) -> None:
    rounding = {"TORCHINDUCTOR_EMULATE_PRECISION_CASTS": "1"} if mode == "compiled-rounded" else {}
    folder = tiny_llama(tmp_path / "model", layers=4, hidden=256, dtype=torch.bfloat16)
    options: list[str] = []
    for name, value in ({"dtype": "bfloat16"} | MODES[mode]).items():
        options += ["--option", f"{name}={json.dumps(value)}"]
    without = run(folder, tmp_path / "cache", *options, INSPECT_LENS_DISABLE="1", **rounding)
    for sites in ("resid_post", "all"):
        with_taps = run(
            folder,
            tmp_path / "cache",
            *options,
            "--capture",
            INSPECT_LENS_SITES=sites,
            **rounding,
        )
        assert with_taps["captured"] is True
        same = sum(a == b for a, b in zip(with_taps["answers"], without["answers"], strict=True))
        tokens = sum(
            a["token_ids"] == b["token_ids"]
            for a, b in zip(with_taps["answers"], without["answers"], strict=True)
        )
        print(f"MODE {mode} {sites}: {same} equal, {tokens} in tokens, {worst(with_taps, without)}")


def worst(found: Any, other: Any) -> float:
    return max(
        abs(a[token] - b[token])
        for x, y in zip(found["answers"], other["answers"], strict=True)
        for a, b in zip(x["logprobs"], y["logprobs"], strict=True)
        for token in a
        if token in b
    )
