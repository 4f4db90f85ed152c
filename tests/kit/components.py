"""What users put into a task, as the source lists it, and which tests use it by name."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .repository import PACKAGE, ROOT

__all__ = ["Component", "components", "uses"]

KINDS = frozenset(
    {
        "agent", "approver", "control_agent", "metric", "modelapi", "monitor", "scanner", "scorer",
        "solver", "tool",
    }
)  # fmt: skip
"""Decorators of Inspect, Petri, ControlArena, Sentinel and Scout that register a function."""


class Component(NamedTuple):
    """One registered function."""

    name: str
    kind: str
    """The decorator that registers it."""
    room: str
    """Module that users import it from."""


@functools.cache
def components() -> tuple[Component, ...]:
    """Every public function of the package that a decorator registers."""
    found = []
    source = ROOT / "src" / PACKAGE
    for path in sorted(source.rglob("*.py")):
        inside = path.relative_to(source).parts
        own = () if path.stem.startswith("_") else (path.stem,)
        room = ".".join((PACKAGE, *inside[:-1], *own))
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            for decorator in node.decorator_list:
                kind, name = _registers(decorator, node.name)
                if kind in KINDS:
                    found.append(Component(name, kind, room))
    return tuple(sorted(found))


def uses(path: Path) -> set[str]:
    """What of the package a test file uses.

    Args:
        path: of the file.

    Returns:
        `room.name` of each imported name that stands outside an import, and every string that is
        no docstring. Comments are not there: a comment tests nothing.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = dict(_imported(tree))
    alone = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if node not in alone:
                found.add(text)
            case ast.Name(id=name) if name in imported:
                found.add(imported[name])
            case ast.Attribute(value=ast.Name(id=base), attr=name) if base in imported:
                found.add(f"{imported[base]}.{name}")
    return found


def _registers(decorator: ast.expr, function: str) -> tuple[str, str]:
    """Kind and registered name of a decorator."""
    call = decorator if isinstance(decorator, ast.Call) else None
    target = decorator if call is None else call.func
    kind = target.id if isinstance(target, ast.Name) else ""
    name = function
    # A provider is written as its name before a model; elsewhere users write the function.
    for keyword in call.keywords if call is not None and kind == "modelapi" else ():
        if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
            name = str(keyword.value.value)
    return kind, name


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Local name and full name of what the file takes from the package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname and alias.name.split(".")[0] == PACKAGE:
                    yield alias.asname, alias.name
