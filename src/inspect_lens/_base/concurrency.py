"""Several calls at once, of which the first failure is the error, and not a group of them."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from inspect_ai.util import collect

T = TypeVar("T")


def first_error(error: BaseException) -> BaseException:
    """The first failure of a group: it says what is wrong, and the others are its echo."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def together(*tasks: Awaitable[T]) -> list[T]:
    """Await several at once, each with its own span in a log."""
    try:
        return await collect(*tasks)
    except BaseExceptionGroup as group:
        raise first_error(group) from None
