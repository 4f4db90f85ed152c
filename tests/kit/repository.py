"""The repository as data: its root, its files and the names of its public rooms."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "inspect_lens"

PUBLIC_ROOMS = (
    "inspect_lens",
    "inspect_lens.agents",
    "inspect_lens.agents.control",
    "inspect_lens.agents.petri",
    "inspect_lens.agents.scout",
    "inspect_lens.agents.sentinel",
    "inspect_lens.attention",
    "inspect_lens.client",
    "inspect_lens.collect",
    "inspect_lens.data",
    "inspect_lens.engine",
    "inspect_lens.errors",
    "inspect_lens.model",
    "inspect_lens.oracle",
    "inspect_lens.patch",
    "inspect_lens.probe",
    "inspect_lens.reading",
    "inspect_lens.sae",
    "inspect_lens.scorer",
    "inspect_lens.solver",
    "inspect_lens.spec",
    "inspect_lens.train",
    "inspect_lens.vector",
    "inspect_lens.view",
)
"""Modules that users import; each has a reference page."""


def files(*suffixes: str) -> list[Path]:
    """Files that git tracks or would track, relative to the root."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    paths = [Path(name) for name in listed if name and (ROOT / name).is_file()]
    return sorted(p for p in paths if not suffixes or p.suffix in suffixes)
