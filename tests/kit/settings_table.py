"""What the sources say of each setting."""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields
from itertools import pairwise

from inspect_lens._settings import Settings, variable


def settings_table() -> list[tuple[str, str, str, str]]:
    """Rows of (variable, type, default, meaning) for the documentation."""
    body = ast.parse(inspect.getsource(Settings)).body[0]
    meanings = {
        ast.unparse(item.target): inspect.cleandoc(text.value.value).replace("\n", " ")
        for item, text in pairwise(body.body)  # type: ignore[attr-defined]
        if isinstance(item, ast.AnnAssign)
    }
    return [
        (variable(f.name), type(f.default).__name__, repr(f.default), meanings[f.name])
        for f in fields(Settings)
    ]
