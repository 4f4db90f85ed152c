"""What users may import is listed, once."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys

from tests.kit.repository import PACKAGE, PUBLIC_ROOMS

MODULES = {room: importlib.import_module(room) for room in PUBLIC_ROOMS}


def test_every_name_that_a_room_lists_is_there() -> None:
    for room, module in MODULES.items():
        missing = [name for name in module.__all__ if not hasattr(module, name)]
        assert not missing, f"{room}.__all__ names {missing}"


def test_a_package_has_what_its_files_list_and_what_it_takes_from_others_by_name() -> None:
    for room, module in MODULES.items():
        if room == PACKAGE or not hasattr(module, "__path__"):
            continue
        tree = ast.parse(inspect.getsource(module))
        imported = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        listed = {
            name
            for node in imported
            if [alias.name for alias in node.names] == ["*"]
            for name in importlib.import_module("." * node.level + str(node.module), room).__all__
        }
        named = {alias.asname for node in imported for alias in node.names if alias.asname}
        if listed:
            shared: frozenset[str] = getattr(module, "_SHARED", frozenset())
            assert set(module.__all__) == (listed | named) - shared, room


def test_rooms_say_what_they_own() -> None:
    assert [room for room, module in MODULES.items() if not (module.__doc__ or "").strip()] == []


def test_what_hands_type_first_is_the_same_object_and_loads_nothing_before() -> None:
    import inspect_lens

    for name, room in inspect_lens._MODULES.items():
        assert getattr(inspect_lens, name) is getattr(MODULES[f"{PACKAGE}.{room}"], name)
    code = "import sys, inspect_lens; print({'torch', 'inspect_ai', 'sklearn'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "set()"
