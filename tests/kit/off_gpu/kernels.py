"""Where the package's Triton kernels are."""

from __future__ import annotations

from tests.kit.repository import ROOT

__all__ = ["kernel_modules"]


def kernel_modules() -> list[str]:
    """Names of the modules that have Triton kernels."""
    source = ROOT / "src"
    found = sorted((source / "inspect_lens").rglob("*_triton.py"))
    return [".".join(path.relative_to(source).with_suffix("").parts) for path in found]
