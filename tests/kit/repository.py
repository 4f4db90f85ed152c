"""The repository as data: its root, its files, the public rooms and their names."""

from __future__ import annotations

import functools
import importlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import griffe

from mkdocs_hooks import PublicObjects

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


@functools.cache
def package() -> griffe.Object | griffe.Alias:
    """The package as its source says, so that decorators hide nothing, as the pages show it."""
    return griffe.load(
        PACKAGE, search_paths=[str(ROOT / "src")], resolve_aliases=True,
        extensions=griffe.load_extensions(PublicObjects),
    )  # fmt: skip


def public_objects() -> Iterator[tuple[str, griffe.Object | griffe.Alias]]:
    """(`room.name`, object) of every function and class that a public room exports."""
    for room in PUBLIC_ROOMS:
        for name in importlib.import_module(room).__all__:
            found = package()[f"{room}.{name}".removeprefix(f"{PACKAGE}.")]
            if found.is_function or found.is_class:
                yield f"{room}.{name}", found


def public_functions() -> Iterator[tuple[str, griffe.Function]]:
    """(`room.name` or `room.Class.method`, function) of public functions and methods."""
    for path, found in public_objects():
        if found.is_function:
            target = found.final_target if isinstance(found, griffe.Alias) else found
            yield path, cast("griffe.Function", target)
            continue
        for name, member in found.members.items():
            if member.is_function and not name.startswith("_"):
                yield f"{path}.{name}", cast("griffe.Function", member)
