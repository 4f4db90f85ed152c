"""What users may import is listed, complete and sorted."""

from __future__ import annotations

import importlib
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
