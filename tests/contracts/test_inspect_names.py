"""Every private name of inspect_ai that we rely on is there, with the parameters we use."""

from __future__ import annotations

import ast
import importlib
import inspect
from operator import attrgetter

from inspect_lens.model._host import PRIVATE_NAMES
from tests.kit.repository import ROOT

_FOLDERS = ("src/inspect_lens", "evals")
_HOST = ROOT / "src/inspect_lens/model/_host.py"


def test_the_installed_inspect_has_them() -> None:
    for one in PRIVATE_NAMES:
        target = attrgetter(one.name)(importlib.import_module(one.module))
        if one.parameters is not None:
            present = inspect.signature(target).parameters
            missing = [name for name in one.parameters if name not in present]
            assert not missing, f"{one.name} lost {missing}; it is used for: {one.reason}"


def test_every_private_import_has_a_row() -> None:
    rows = {(one.module, one.name.partition(".")[0]) for one in PRIVATE_NAMES}
    for module, names in _private_imports(ast.parse(_HOST.read_text())):
        for name in names:
            assert (module, name) in rows, f"{module}.{name} has no row in PRIVATE_NAMES"


def test_no_other_file_names_a_private_module() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {module}"
        for folder in _FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if path != _HOST
        for module, _ in _private_imports(ast.parse(path.read_text()))
    ]
    assert not found, "go through inspect_lens.model._host"


def _private_imports(tree: ast.AST) -> list[tuple[str, list[str]]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module.startswith("inspect_ai.") and "._" in node.module:
                found.append((node.module, [alias.name for alias in node.names]))
        elif isinstance(node, ast.Import):
            found += [
                (alias.name, [])
                for alias in node.names
                if alias.name.startswith("inspect_ai.") and "._" in alias.name
            ]
    return found
