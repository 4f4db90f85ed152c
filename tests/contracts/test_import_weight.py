"""What an import pulls in, seen from a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "triton", "vllm", "transformers", "sklearn", "datasets", "matplotlib"}
COMPANIONS = {"inspect_petri", "inspect_scout", "control_arena", "pandas"}
LIGHT = HEAVY | {"inspect_ai", "pandas"}


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        (("", ".spec", ".probe", ".attention", ".vector", ".client"), LIGHT),
        (("._registry",), {"torch", "triton", "vllm", "sklearn", "openai", *COMPANIONS}),
        (("._vllm.plugin",), {"torch", "triton", "vllm", "inspect_ai"}),
    ],
    ids=["public", "registry", "plugin"],
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
