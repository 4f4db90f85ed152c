"""What users may import is listed, complete and sorted."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType

from tests.kit.repository import PACKAGE, PUBLIC_ROOMS

MODULES = {room: importlib.import_module(room) for room in PUBLIC_ROOMS}


def test_all_is_complete() -> None:
    for room, module in MODULES.items():
        ours = {
            name
            for name, value in vars(module).items()
            if not name.startswith("_")
            and not isinstance(value, ModuleType)
            and getattr(value, "__module__", room).startswith(PACKAGE)
            and value is not annotations
        }
        # A constant has no module; in a single-file room an imported one looks like its own.
        if hasattr(module, "__path__"):
            missing = ours - set(module.__all__) - getattr(module, "_SHARED", frozenset())
            assert not missing, f"{room}.__all__ lacks {sorted(missing)}"
        for name in module.__all__:
            assert hasattr(module, name), f"{room}.__all__ names {name}, which is not there"


def test_all_is_sorted() -> None:
    def key(name: str) -> tuple[int, str]:  # ruff RUF022: constants, classes, the rest
        return (0 if name.isupper() else 1 if name[0].isupper() else 2), name

    for room, module in MODULES.items():
        assert list(module.__all__) == sorted(module.__all__, key=key), room


def test_rooms_say_what_they_own() -> None:
    assert [room for room, module in MODULES.items() if not (module.__doc__ or "").strip()] == []


def test_what_hands_type_first_is_the_same_object_and_loads_nothing_before() -> None:
    import inspect_lens

    for name, room in inspect_lens._MODULES.items():
        assert getattr(inspect_lens, name) is getattr(MODULES[f"{PACKAGE}.{room}"], name)
    code = "import sys, inspect_lens; print({'torch', 'inspect_ai', 'sklearn'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "set()"
