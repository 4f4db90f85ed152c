"""Reading Google-style docstrings."""

from __future__ import annotations

import inspect
import re

import griffe

_SECTION = re.compile(
    r"^(Args|Returns|Yields|Raises|Warns|Source|Example|Examples|Note|Attributes):$"
)
_ARGUMENT = re.compile(r"^    \*{0,2}(\w+):")


def documented_arguments(docstring: str) -> list[str]:
    """Names in the `Args:` section, in order."""
    names: list[str] = []
    inside = False
    for line in inspect.cleandoc(docstring).splitlines():
        if _SECTION.match(line):
            inside = line == "Args:"
        elif inside and (match := _ARGUMENT.match(line)):
            names.append(match.group(1))
    return names


def signature_arguments(function: griffe.Function) -> list[str]:
    """Names of the parameters, without `self` and `cls`."""
    return [p.name.lstrip("*") for p in function.parameters if p.name not in ("self", "cls")]


def refers_to_twin(docstring: str) -> bool:
    """Whether the docstring says that its arguments are those of another function."""
    return re.search(r"those of\s+`\w+`", docstring) is not None


def has_example(docstring: str) -> bool:
    """Whether a section `Example:` has a block of Python."""
    inside = False
    for line in inspect.cleandoc(docstring).splitlines():
        if _SECTION.match(line):
            inside = line == "Example:"
        elif inside and line.strip().startswith("```python"):
            return True
    return False
