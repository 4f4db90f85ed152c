"""What a task cannot do without: one line says so, before a model is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

from inspect_lens.errors import LensError
from inspect_lens.model._host import PrerequisiteError
from inspect_lens.probe import load_probe

__all__ = ["DATA_DIR", "organism_split", "required", "required_probe"]

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


DATA_DIR: Final = Path(__file__).resolve().parents[2] / "organism" / "data"
"""Folder of the model organism's data; there is none where the organism is not installed."""


def organism_split(split: str, known: Sequence[str]) -> Path:
    """The file of a split of the model organism.

    Args:
        split: name of a file, without `.jsonl`.
        known: splits that the eval may read.

    Returns:
        The file.

    Raises:
        PrerequisiteError: there is no such split, or the organism is not installed; Inspect prints
            the line without a traceback.
    """
    if not DATA_DIR.is_dir():
        raise PrerequisiteError(
            "This task needs the data of the model organism, which are not installed; run "
            "`pip install ./organism` in a clone of inspect-lens"
        )
    if split not in known:
        raise PrerequisiteError(f"split={split!r}; allowed are {', '.join(known)}")
    return DATA_DIR / f"{split}.jsonl"


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
