"""Values as they are written: nothing is turned into a number, a layer or a flag that is none.

Pydantic takes `true` for 1 and `"2"` for 2. A request that is read so does something else than
it says, without a word.
"""

from __future__ import annotations

import logging
import operator
import re
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, StrictBool, StrictFloat, ValidationError

from inspect_lens.errors import LensError, SpecError

__all__ = [
    "check_function_name",
    "check_name",
    "explain",
    "judging",
    "shown",
]

logger = logging.getLogger("vllm.inspect_lens")

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlong = 40
_short.maxlevel = 3


def shown(value: object) -> str:
    """A value for an error message; short, however large it is."""
    try:
        return _short.repr(value)
    except ValueError:  # an integer that Python does not write out
        return f"a number of more than {_short.maxlong} digits"


def integer(value: object) -> int:
    """An integer, also one of numpy; a boolean, a float and text are none."""
    if isinstance(value, bool | str | float) or type(value).__name__ in ("bool", "bool_"):
        raise ValueError(f"{shown(value)} is not an integer")
    try:
        return operator.index(cast("Any", value))
    except TypeError:
        raise ValueError(f"{shown(value)} is not an integer") from None


def integers(value: object) -> object:
    """One integer, or a list of them, as a tuple; what is neither stays as it is."""
    if isinstance(value, str | bool | dict | None):
        return value
    if not isinstance(value, Iterable):
        return (integer(value),)
    return tuple(integer(item) for item in cast("Iterable[object]", value))


def _flag(value: object) -> object:
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    return value


Integer = Annotated[int, BeforeValidator(integer)]
"""An integer that was written as one."""

Number = StrictFloat
"""A number that was written as one; booleans and text are refused."""

Flag = Annotated[StrictBool, BeforeValidator(_flag)]
"""`true` or `false`."""


def explain(error: ValidationError, *, at: str = "") -> str:
    """Put a pydantic error into a few lines."""
    start = [at] if at else []
    lines = [
        f"{'.'.join([*start, *(str(part)[:80] for part in item['loc'])]) or 'inspect_lens'}: "
        f"{item['msg'].removeprefix('Value error, ')[:1000]}"
        for item in error.errors(include_url=False, include_input=False)[:_MOST_LINES]
    ]
    more = error.error_count() - len(lines)
    lines += [f"and {more} more"] if more else []
    # Text of the request may hold what no response can: half of a surrogate pair.
    return "; ".join(lines).encode("utf-8", "backslashreplace").decode("utf-8")


@contextmanager
def judging(field: str) -> Iterator[None]:
    """While a request is judged, whatever is raised is an error of the request."""
    try:
        yield
    except LensError:
        raise
    except ValidationError as error:
        raise SpecError(explain(error, at=field)) from None
    except Exception as error:
        # It may be a fault of ours, whose place is to be found.
        logger.warning("inspect_lens: %s cannot be read", field, exc_info=True)
        raise SpecError(
            f"{field}: cannot be read ({type(error).__name__}: {shown(str(error))})"
        ) from None


_MOST_LINES = 8


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PART = r"(?:[^\W\d]\w*|<(?:locals|lambda|genexpr|listcomp|setcomp|dictcomp|module)>)"
_FUNCTION = re.compile(rf"{_PART}(?:\.{_PART})*")
_FUNCTION_MOST = 256


def check_name(name: object, *, field: str = "name") -> str:
    """Judge a name under which a probe or a vector is, or is to be, registered."""
    if isinstance(name, str) and _NAME.fullmatch(name):
        return name
    raise SpecError(
        f"{field}={shown(name)}; allowed are 1 to 128 letters (a-z, A-Z), digits, '.', '_' and "
        "'-', with a letter or a digit first; choose another name"
    )


def check_function_name(name: object) -> str:
    """Judge what a function of a client is called, as Python's `__qualname__` says it."""
    if isinstance(name, str) and (not name or is_function_name(name)):
        return name
    raise SpecError(
        f"name={shown(name)}; allowed is a function's name in Python, as in module.function, of "
        f"at most {_FUNCTION_MOST} characters; leave it out"
    )


def is_function_name(name: str) -> bool:
    """Whether Python calls a function so, and it is short enough to travel."""
    return len(name) <= _FUNCTION_MOST and _FUNCTION.fullmatch(name) is not None
