"""An installed plug-in that nobody uses changes no output, and no cached graph fools it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit.repository import ROOT
from tests.kit.tiny_models import tiny_llama

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly(
        held_by=(
            "tests/unit/engine/tap/test_tap.py::"
            "test_a_compiled_graph_keeps_the_taps_and_equals_eager"
        ),
        why="two engines that compile for themselves",
    ),
]


def run(folder: Path, cache: Path, *arguments: str, **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kit.answer_plain", str(folder), *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "VLLM_CACHE_ROOT": str(cache),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.strip().rpartition("\n")[2])


def test_outputs_equal_an_engine_without_the_plug_in_and_its_compile_cache_is_not_loaded(
    tmp_path: Path,
) -> None:
    # The engine without taps writes the cache first. Loading its graph would silence every
    # tap; the start-up check and the captured rows say that it was not loaded.
    # Two layers, since each of the two engines compiles for itself.
    folder = tiny_llama(tmp_path / "model", layers=2, hidden=128, dtype=torch.bfloat16)
    # A tap reads the stream as it is stored, rounded to bfloat16. Without one, the compiler keeps
    # sums of the stream in float32 from one norm to the next, unless it is told to round as
    # PyTorch does; that is the one difference, and so there is none here. (In float32 there is
    # nothing to round, and bits are equal as things are.)
    rounding = {"TORCHINDUCTOR_EMULATE_PRECISION_CASTS": "1"}
    dtype = ("--option", 'dtype="bfloat16"')
    without = run(folder, tmp_path / "c", *dtype, INSPECT_LENS_DISABLE="1", **rounding)
    with_taps = run(folder, tmp_path / "c", *dtype, "--capture", **rounding)
    assert with_taps["answers"] == without["answers"]
    assert with_taps["captured"] is True
