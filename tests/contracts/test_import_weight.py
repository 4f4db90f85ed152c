"""What an import pulls in, seen from a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "triton", "vllm", "transformers", "sklearn", "datasets", "matplotlib"}
COMPANIONS = {"inspect_petri", "inspect_scout", "control_arena", "pandas"}
LIGHT = HEAVY | {"inspect_ai", "pandas"}


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        (("", ".spec", ".probe", ".attention", ".vector", ".client"), LIGHT),
        (("._vllm.plugin",), {"torch", "triton", "vllm", "inspect_ai"}),
    ],
    ids=["public", "plugin"],
)
def test_import_stays_light(modules: tuple[str, ...], forbidden: set[str]) -> None:
    code = "import sys\n" + "".join(
        f"import inspect_lens{name}\nprint(*{{m.split('.')[0] for m in sys.modules}})\n"
        for name in modules
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name, line in zip(modules, run.stdout.splitlines(), strict=True):
        heavy = set(line.split()) & forbidden
        assert not heavy, f"import inspect_lens{name} loads {sorted(heavy)}"


MODEL = """
import sys

def none_of(*heavy):
    assert not set(heavy) & set(sys.modules), set(heavy) & set(sys.modules)

import inspect_lens._registry
none_of(*sys.argv[1:])
import inspect_lens.model, inspect_lens.client
none_of("torch", "vllm", "openai")
from inspect_ai.model import get_model
model = get_model("vllm-lens/org/tiny", capture=[1])
assert type(model.api).__name__ == "LensAPI", type(model.api)
none_of("torch", "vllm")
"""


def test_neither_torch_nor_vllm_is_loaded_until_a_tensor_is_read(tmp_path: Path) -> None:
    heavy = ["torch", "triton", "vllm", "sklearn", "openai", *COMPANIONS]
    command = [sys.executable, "-c", MODEL, *heavy]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Inspect announces hooks that are there at start; ours comes with the provider.
    assert "hooks enabled" not in done.stdout
