"""Published files that do not come with the repository: their folder is named, or tests skip."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .repository import ROOT

__all__ = ["field_file"]


def field_file(name: str) -> Path:
    """A file below the folder that `FIELD_DATA` names, or `field-data` in the repository."""
    path = Path(os.environ.get("FIELD_DATA", ROOT / "field-data")) / name
    if not path.exists():
        pytest.skip(f"{name} is not here; FIELD_DATA names the folder of published files")
    return path
