"""The functions and classes that the public rooms export, as their sources say."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import cast

import griffe

from mkdocs_hooks import PublicObjects

from .repository import PACKAGE, PUBLIC_ROOMS, ROOT


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
