"""Reads a vLLM release's source for the names that inspect_lens uses, without importing it.

`python -m tests.kit.vllm_names WHEEL_OR_FOLDER > tests/contracts/vllm/VERSION.json` records one:
parameters of what is wrapped, and which other names the release has.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inspect_lens._vllm.compat.features import OF_SOME_MODELS, USED_NAMES, has
from inspect_lens._vllm.compat.monkeypatches import EAGER_PATCHES, PATCHES, SERVER_PATCHES

__all__ = ["read_names", "read_used", "reader_of", "record_of"]

Read = Callable[[str], str | None]
"""Source of a path inside site-packages, or None."""


def reader_of(place: Path) -> Read:
    """A reader over a wheel, or over a folder that holds `vllm/`."""
    if place.suffix == ".whl":
        wheel = zipfile.ZipFile(place)
        names = set(wheel.namelist())
        return lambda path: wheel.read(path).decode() if path in names else None

    def read(path: str) -> str | None:
        file = place / path
        return file.read_text(encoding="utf-8") if file.is_file() else None

    return read


def read_names(read: Read) -> dict[str, list[str] | None]:
    """Parameters of every monkeypatch's target; None where the release does not have it."""
    patches = PATCHES + SERVER_PATCHES + EAGER_PATCHES
    return {patch.name: _parameters(read, patch.target) for patch in patches}


def read_used(place: Path) -> dict[str, str]:
    """Names that are used without being wrapped and that a release has, by module."""
    root: Any = zipfile.Path(str(place)) if place.suffix == ".whl" else place
    found: dict[str, list[str]] = {}
    for target in (*(used.target for used in USED_NAMES), *OF_SOME_MODELS):
        if has(root, target):
            module, _, name = target.partition(":")
            found.setdefault(module, []).append(name)
    return {module: " ".join(sorted(set(names))) for module, names in sorted(found.items())}


def record_of(place: Path) -> dict[str, Any]:
    """What is recorded of a release."""
    return {"wrapped": read_names(reader_of(place)), "used": read_used(place)}


def _parameters(read: Read, target: str) -> list[str] | None:
    module, _, path = target.partition(":")
    *classes, function = path.split(".")
    tree = _parse(read, module)
    if tree is None:
        return None
    if not classes:
        found = _function(tree.body, function)
        home = _home(tree, module, function)
        # A function may be wrapped where it is imported and called.
        return (
            _parameters(read, f"{home}:{function}") if found is None and home != module else found
        )
    return _method(read, module, tree, classes[0], function)


def _parse(read: Read, module: str) -> ast.Module | None:
    base = module.replace(".", "/")
    for path in (f"{base}.py", f"{base}/__init__.py"):
        source = read(path)
        if source is not None:
            return ast.parse(source)
    return None


def _function(body: list[ast.stmt], name: str) -> list[str] | None:
    for node in reversed(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            arguments = node.args
            return [a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]
    return None


def _method(read: Read, module: str, tree: ast.Module, cls: str, name: str) -> list[str] | None:
    """A method of a class or of one of its bases, followed through imports."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == cls:
            found = _function(node.body, name)
            if found is not None:
                return found
            for base in node.bases:
                base_name = ast.unparse(base).partition("[")[0]
                home = _home(tree, module, base_name)
                there = _parse(read, home)
                if there is not None:
                    found = _method(read, home, there, base_name, name)
                    if found is not None:
                        return found
    return None


def _home(tree: ast.Module, module: str, name: str) -> str:
    """The module that a name is imported from; the module itself when it is not imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(
            (a.asname or a.name) == name for a in node.names
        ):
            package = module.split(".")[: -node.level] if node.level else []
            return ".".join([*package, *([node.module] if node.module else [])])
    return module


if __name__ == "__main__":
    sys.stdout.write(json.dumps(record_of(Path(sys.argv[1])), indent=1) + "\n")
