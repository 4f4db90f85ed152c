"""Optional packages: a clear error where one is missing, and names that cost nothing until used."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from inspect_lens._base.arguments import check_call
from inspect_lens._base.installed import install_extra
from inspect_lens._base.shipped import EVALS, from_eval
from inspect_lens.errors import LensError
from inspect_lens.model._host import (
    PrerequisiteError,
    RegistryInfo,
    RegistryType,
    registry_add,
    registry_has,
)


def is_installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def require(package: str, *, module: str, extra: str) -> None:
    """Refuse to go on without a package."""
    if not is_installed(package):
        raise PrerequisiteError(
            f"{module} needs the package {package.replace('_', '-')!r}, which is not installed; "
            f"the extra {extra!r} brings it: {install_extra(extra)}"
        )


def register_lazily(kind: RegistryType, name: str, *, module: str) -> None:
    """Register a factory whose module is imported when the factory is called.

    Inspect imports every registry at the start of every eval, and Petri and Scout take seconds
    to import. The module's own decorator replaces this registration.
    """
    _register(kind, name, lambda: getattr(importlib.import_module(module), name))


def register_evals() -> None:
    """Register the tasks and scorers of the evals, which are imported when one is used."""
    for module, names in EVALS.items():
        for kind, name in names:
            _register(cast("RegistryType", kind), name, partial(from_eval, module, name))


def _register(kind: RegistryType, name: str, find: Callable[[], Callable[..., Any]]) -> None:
    full = f"inspect_lens/{name}"
    if registry_has(kind, full):
        return

    def create(*args: Any, **params: Any) -> Any:
        factory = find()
        try:
            check_call(factory, args, params, flag="-T " if kind == "task" else "")
            return factory(*args, **params)
        except (LensError, ValueError) as error:
            if kind != "task":
                raise
            # Of a task's arguments, which a command line has: a line, and no traceback.
            said = str(error).removeprefix(f"{name}: ")
            raise PrerequisiteError(f"{full}: {said}") from error

    # Inspect asks a task for its parameters; this one takes any and hands them on.
    metadata: dict[str, Any] = {"attribs": {}, "params": []} if kind == "task" else {}
    registry_add(create, RegistryInfo(type=kind, name=full, metadata=metadata))
