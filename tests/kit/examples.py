"""Examples in docstrings: which there are, and which there have to be."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, cast

import griffe
from pydantic import BaseModel

from .blocks import Block, parse_blocks
from .public_objects import package, public_functions, public_objects
from .repository import PACKAGE, ROOT

__all__ = ["Example", "examples", "is_record", "required"]


REGISTRY = f"{PACKAGE}._registry"
PROVIDERS = ("lens", "vllm_lens")


class Example(NamedTuple):
    """A block in a docstring."""

    path: str
    """Dotted name of what the docstring describes."""
    block: Block


def examples() -> list[Example]:
    """Every block of Python or Bash in a docstring of something public, each once."""
    found: dict[tuple[Path, int], Example] = {}
    for path, item in _documented():
        docstring = item.docstring
        if docstring is None or docstring.lineno is None:
            continue
        filepath = item.filepath
        assert isinstance(filepath, Path)
        page = filepath.resolve().relative_to(ROOT)
        lines = docstring.value.splitlines()
        for block in parse_blocks(lines, page, first_line=docstring.lineno):
            found.setdefault((page, block.line), Example(path, block))
    return list(found.values())


def required() -> dict[str, str]:
    """What has to have an example: the docstring of each, by dotted name.

    These are all public functions, everything that is registered with Inspect, the classes that
    do something, and all that `inspect_lens` itself exports. A record is shown by the example of
    what makes it or takes it.
    """
    wanted = {path: _text(item) for path, item in _providers()}
    for path, item in public_objects():
        room, _, name = path.rpartition(".")
        value = getattr(importlib.import_module(room), name)
        # A decorator may have made a class of a function.
        if room == PACKAGE or item.is_function or not is_record(value):
            wanted[path] = _text(item)
    return wanted


def is_record(value: type[Any]) -> bool:
    """Whether a class only holds values: a frozen dataclass, model, tuple, enumeration or error."""
    if dataclasses.is_dataclass(value):
        return bool(value.__dataclass_params__.frozen)  # type: ignore[attr-defined]
    kinds = (BaseModel, BaseException, Enum, tuple)
    return issubclass(value, kinds) or getattr(value, "_is_protocol", False)


def _documented() -> Iterator[tuple[str, griffe.Object]]:
    for path, item in public_objects():
        target = item.final_target if isinstance(item, griffe.Alias) else item
        yield path, target
    yield from public_functions()
    yield from _providers()


def _providers() -> Iterator[tuple[str, griffe.Object]]:
    """Model providers, which are registered by name and in no room that users import."""
    for name in PROVIDERS:
        yield f"{REGISTRY}.{name}", cast("griffe.Object", package()["_registry"][name])


def _text(item: griffe.Object | griffe.Alias) -> str:
    return item.docstring.value if item.docstring else ""
