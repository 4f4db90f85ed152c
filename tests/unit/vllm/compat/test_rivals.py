"""Beside another plug-in that takes the same keys the lens is off, and says what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from inspect_lens._vllm.compat.monkeypatches import refuse_rivals
from inspect_lens.errors import CompatError

MODULE = "vllm_lens._activations_plugin"


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with vllm-lens's names."""
    info = tmp_path / "vllm_lens-1.3.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-lens\nVersion: 1.3.0\n")
    lines = "[vllm.general_plugins]\nactivations = " + MODULE + ":register\n"
    (info / "entry_points.txt").write_text(lines)
    package = tmp_path / "vllm_lens"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "_activations_plugin.py").write_text("def register() -> None:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("allowed", "is_loaded", "is_refused"),
    [
        (None, True, True),
        ("inspect_lens,activations", True, True),
        ("inspect_lens", True, False),
        (None, False, False),
    ],
)
def test_what_vllm_does_not_load_is_no_rival(
    beside: Path,
    monkeypatch: pytest.MonkeyPatch,
    allowed: str | None,
    is_loaded: bool,
    is_refused: bool,
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    if is_loaded:
        monkeypatch.setitem(sys.modules, MODULE, ModuleType(MODULE))
    if not is_refused:
        refuse_rivals()
        return
    with pytest.raises(CompatError, match="VLLM_PLUGINS=inspect_lens, or VLLM_PLUGINS=activations"):
        refuse_rivals()


# vLLM takes seconds to import, so there is one process, and each environment is that of a fork.
CODE = """
import json, os, sys
from vllm import SamplingParams
from vllm.plugins import load_general_plugins as load
from vllm.v1.engine.input_processor import InputProcessor

def ask(**extra_args):
    try:
        params = SamplingParams(extra_args=extra_args)
        InputProcessor.process_inputs(None, "a", None, params, ())
    except AttributeError:
        print("came to vLLM:", *extra_args)
    except Exception as error:
        print("refused:", error)

for environment in json.loads(sys.argv[1]):
    said = f"{sys.argv[2]}/{len(os.listdir(sys.argv[2]))}"
    if pid := os.fork():
        os.waitpid(pid, 0)
        continue
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    os.environ.update(environment)
    load(); load()
    print("started")
    ask(output_residual_stream=[1])
    ask(inspect_lens={"capture": {"layers": [0]}})
    sys.stdout.flush()
    os._exit(0)
"""
ENVIRONMENTS: list[dict[str, str]] = [
    {},
    {"INSPECT_LENS_REQUIRED": "1"},
    {"VLLM_PLUGINS": "inspect_lens"},
    {"INSPECT_LENS_DISABLE": "1"},
]


@pytest.mark.slow
def test_vllm_starts_with_both_and_the_other_one_serves_its_keys(beside: Path) -> None:
    own = {k: v for k, v in os.environ.items() if k not in ("VLLM_PLUGINS", "INSPECT_LENS_DISABLE")}
    (said := beside / "said").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(ENVIRONMENTS), str(said)],
        env=own | {"PYTHONPATH": os.pathsep.join([str(beside), *sys.path])},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    both, required, alone, disabled = (
        (said / str(i)).read_text() for i in range(len(ENVIRONMENTS))
    )
    assert "vLLM also loads vllm-lens" in both
    assert "came to vLLM: output_residual_stream" in both
    (refused,) = (line for line in both.splitlines() if line.startswith("refused: "))
    assert "VLLM_PLUGINS=inspect_lens, or VLLM_PLUGINS=activations" in refused
    assert "started" not in required, "it refuses to start"
    # Both keys are ours, and no engine of ours has been made that could serve them.
    assert "vLLM also loads vllm-lens" not in alone + disabled
    assert alone.count("inspect_lens_facts") == 2
    assert "came to vLLM: output_residual_stream" in disabled
    assert "refused: " not in disabled
