"""Lines of the lens as JSON, with the configuration that the page shows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.child import ROOT

CODE = """
import vllm.logger

vllm.logger._configure_vllm_root_logger()  # as each start of vLLM does
from inspect_lens._vllm.compat.features import pass_over
from inspect_lens._vllm import telemetry
telemetry.begin_metrics(registry=object())
pass_over(KeyError("a bug"), uses_lens=False)
"""


@pytest.mark.slow
def test_lines_of_the_lens_are_objects_with_their_tracebacks(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/serve.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```json\n(\{\n  \"version\".*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "logging.json").write_text(block)
    environment = {"VLLM_LOGGING_CONFIG_PATH": str(tmp_path / "logging.json"), "PATH": "/usr/bin"}
    run = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True
    )
    lines = [json.loads(line) for line in run.stderr.splitlines() if line.startswith("{")]
    ours = [line for line in lines if line["name"] == "vllm.inspect_lens"]
    assert [line["levelname"] for line in ours] == ["WARNING", "ERROR"]
    assert "no metrics" in ours[0]["message"]
    assert "KeyError: 'a bug'" in ours[1]["exc_info"]
