"""Public names of a package, which its files list: each has its own in `__all__`."""

from __future__ import annotations

from collections.abc import Set
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["TYPE_CHECKING", "public"]


def public(package: dict[str, Any], but: Set[str] = frozenset()) -> list[str]:
    """What a package gives its users: the names in it that are no modules, and no underscore."""
    return sorted(
        name
        for name, value in package.items()
        if name[0] != "_" and name not in but and not isinstance(value, ModuleType)
    )
