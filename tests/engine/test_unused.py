"""An installed plug-in that nobody uses changes no output, and no cached graph fools it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.repository import ROOT

pytestmark = pytest.mark.engine


def run(folder: Path, cache: Path, *arguments: str, **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kit.answer_plain", str(folder), *arguments],
        cwd=ROOT,
        env={**os.environ, "VLLM_CACHE_ROOT": str(cache), **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.strip().rpartition("\n")[2])


def test_outputs_equal_an_engine_without_the_plug_in_and_its_compile_cache_is_not_loaded(
    tiny_folder: Path, tmp_path: Path
) -> None:
    # The engine without taps writes the cache first. Loading its graph would silence every
    # tap; the start-up check and the captured rows say that it was not loaded.
    without = run(tiny_folder, tmp_path, INSPECT_LENS_DISABLE="1")
    with_taps = run(tiny_folder, tmp_path, "--capture")
    assert with_taps["answers"] == without["answers"]
    assert with_taps["captured"] is True
