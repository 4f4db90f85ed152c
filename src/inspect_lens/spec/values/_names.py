"""How things are called: one grammar for all that is registered, and one for functions."""

from __future__ import annotations

import re

from inspect_lens.errors import SpecError

from ._strict import shown

__all__ = ["check_function_name", "check_name"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PART = r"(?:[^\W\d]\w*|<(?:locals|lambda|genexpr|listcomp|setcomp|dictcomp|module)>)"
_FUNCTION = re.compile(rf"{_PART}(?:\.{_PART})*")
_FUNCTION_MOST = 256


def check_name(name: object, *, field: str = "name") -> str:
    """Judge a name under which a probe or a vector is, or is to be, registered.

    Args:
        name: what was given.
        field: path of the field, for error messages.

    Returns:
        The name: 1 to 128 letters and digits of ASCII, `.`, `_` and `-`, with a letter or a digit
        first. So it fits into a path of HTTP and into a log as it is.

    Raises:
        SpecError: anything else.

    Example:
        ```python
        import pytest

        from inspect_lens.errors import SpecError
        from inspect_lens.spec import check_name

        assert check_name("deception-v2.1") == "deception-v2.1"
        with pytest.raises(SpecError, match="letters"):
            check_name("../deception")
        ```
    """
    if isinstance(name, str) and _NAME.fullmatch(name):
        return name
    raise SpecError(
        f"{field}={shown(name)}; allowed are 1 to 128 letters (a-z, A-Z), digits, '.', '_' and "
        "'-', with a letter or a digit first; choose another name"
    )


def check_function_name(name: object) -> str:
    """Judge what a function of a client is called, as Python's `__qualname__` says it.

    Args:
        name: what was given; an empty text says nothing.

    Returns:
        The name.

    Raises:
        SpecError: it is no such name, or has more than 256 characters.

    Example:
        ```python
        from inspect_lens.spec import check_function_name

        assert check_function_name("run.<locals>.<lambda>") == "run.<locals>.<lambda>"
        ```
    """
    if isinstance(name, str) and (not name or is_function_name(name)):
        return name
    raise SpecError(
        f"name={shown(name)}; allowed is a function's name in Python, as in module.function, of "
        f"at most {_FUNCTION_MOST} characters; leave it out"
    )


def is_function_name(name: str) -> bool:
    """Whether Python calls a function so, and it is short enough to travel."""
    return len(name) <= _FUNCTION_MOST and _FUNCTION.fullmatch(name) is not None
