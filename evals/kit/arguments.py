"""What a task cannot do without: one line says so, before a model is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from inspect_lens.data import organism_data
from inspect_lens.errors import LensError
from inspect_lens.model._host import PrerequisiteError
from inspect_lens.probe import load_probe

__all__ = ["organism_split", "required", "required_probe"]

T = TypeVar("T")


def required(name: str, value: T | None, what: str) -> T:
    """A task argument that has no default.

    Args:
        name: of the argument.
        value: that was given.
        what: it has to be.

    Returns:
        The value.

    Raises:
        PrerequisiteError: there is none; Inspect prints the line without a traceback.
    """
    if value is None:
        raise PrerequisiteError(f"This task needs {what}; pass it with -T {name}=…")
    return value


def organism_split(split: str, *, agent: bool = False) -> Path:
    """The file of a split of the model organism.

    Args:
        split: name of a file, without `.jsonl`.
        agent: read a split of the agent, which has turns and tools, and no other.

    Returns:
        The file.

    Raises:
        PrerequisiteError: there is no such split, or the organism is not installed; Inspect prints
            the line without a traceback.
    """
    try:
        folder = organism_data()
    except LensError as error:
        raise PrerequisiteError(f"This task needs data that are not installed: {error}") from None
    files = {path.stem: path for path in sorted(folder.glob("*.jsonl"))}
    known = [name for name in files if name.startswith("agent_") is agent]
    if split not in known:
        raise PrerequisiteError(f"split={split!r}; allowed are {', '.join(known)}")
    return files[split]


def required_probe(probe: str | None) -> str:
    """A probe that the user has to name, since each model needs its own.

    Args:
        probe: name below `probes/`, path or `hf://` address.

    Returns:
        The name.

    Raises:
        PrerequisiteError: there is none, or no such probe.
    """
    name = required(
        "probe", probe, "a probe of the model that is evaluated, by name, path or hf:// address"
    )
    try:
        load_probe(name)
    except LensError as error:
        raise PrerequisiteError(f"-T probe={name}: {error}") from None
    return name
