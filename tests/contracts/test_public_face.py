"""What users may import is listed, complete and sorted."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from tests.kit.repository import PACKAGE, PUBLIC_ROOMS


@pytest.mark.parametrize("room", PUBLIC_ROOMS)
def test_all_is_complete(room: str) -> None:
    module = importlib.import_module(room)
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
        missing = ours - set(module.__all__)
        assert not missing, f"{room}.__all__ lacks {sorted(missing)}"
    for name in module.__all__:
        assert hasattr(module, name), f"{room}.__all__ names {name}, which is not there"


@pytest.mark.parametrize("room", PUBLIC_ROOMS)
def test_all_is_sorted(room: str) -> None:
    names = importlib.import_module(room).__all__

    def key(name: str) -> tuple[int, str]:  # ruff RUF022: constants, classes, the rest
        return (0 if name.isupper() else 1 if name[0].isupper() else 2), name

    assert list(names) == sorted(names, key=key)


@pytest.mark.parametrize("room", PUBLIC_ROOMS)
def test_room_says_what_it_owns(room: str) -> None:
    doc = importlib.import_module(room).__doc__
    assert doc, f"{room} has no docstring"
    assert doc.strip()
