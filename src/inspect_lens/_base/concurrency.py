"""Several calls at once: the first failure is the error, and what all of them need is made once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import anyio
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


class MadeOnce(Generic[T]):
    """What is made once for each name, while all others who ask for it wait."""

    def __init__(self) -> None:
        self.made: dict[str, T] = {}
        self._under_way: dict[str, anyio.Event] = {}

    async def of(self, name: str, make: Callable[[], Awaitable[T]]) -> T:
        """What was made for a name; where that failed, the next one tries again."""
        while name not in self.made:
            under_way = self._under_way.get(name)
            if under_way is not None:
                await under_way.wait()
                continue
            done = self._under_way[name] = anyio.Event()
            try:
                self.made[name] = await make()
            finally:
                del self._under_way[name]
                done.set()
        return self.made[name]
