"""What an import pulls in, seen from a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "triton", "vllm", "transformers", "sklearn", "datasets", "matplotlib"}
COMPANIONS = {"inspect_petri", "inspect_scout", "control_arena", "pandas"}


def loaded_by(module: str) -> set[str]:
    code = f"import sys, {module}; print('\\n'.join({{m.split('.')[0] for m in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("inspect_lens", HEAVY | {"inspect_ai", "pandas"}),
        ("inspect_lens.spec", HEAVY | {"inspect_ai", "pandas"}),
        ("inspect_lens.probe", HEAVY | {"inspect_ai", "pandas"}),
        ("inspect_lens.attention", HEAVY | {"inspect_ai", "pandas"}),
        ("inspect_lens.vector", HEAVY | {"inspect_ai", "pandas"}),
        ("inspect_lens.client", HEAVY | {"inspect_ai", "pandas"}),
        ("inspect_lens._registry", {"torch", "triton", "vllm", "sklearn", "openai", *COMPANIONS}),
        ("inspect_lens._vllm.plugin", {"torch", "triton", "vllm", "inspect_ai"}),
    ],
)
def test_import_stays_light(module: str, forbidden: set[str]) -> None:
    heavy = loaded_by(module) & forbidden
    assert not heavy, f"import {module} loads {sorted(heavy)}"
