"""Who takes the samples of a sink in the end: a folder of shards, or somebody's function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

from inspect_lens._shards import Captured, ShardWriter, shard_parts
from inspect_lens.errors import SpecError

__all__ = ["GROUP", "FunctionReceiver", "Given", "Receiver", "StoreReceiver", "find_function"]

GROUP = "inspect_lens.sinks"
"""Entry points of functions."""

Function = Callable[[Captured, Mapping[str, Any]], object]
Parts = Sequence[bytes | memoryview]


@dataclass(frozen=True)
class Given:
    """What became of samples that were given away."""

    shard: str | None = None
    """File that has them."""
    errors: Sequence[BaseException | None] = ()
    """Of each sample, where each has its own."""


class Receiver(Protocol):
    """Takes samples, in a thread of the sink's own."""

    is_eager: bool
    """Whether it takes samples one by one, and need not wait for more."""

    def give(self, writer: str, number: int, samples: Sequence[Captured], parts: Parts) -> Given:
        """Give samples away.

        Args:
            writer: who has numbered them.
            number: of the shard.
            samples: what to give.
            parts: their bytes, where they are encoded already.

        Raises:
            Exception: none of them was taken; it may be tried again.
        """
        ...


class StoreReceiver:
    """Writes shards to a folder."""

    is_eager = False

    def __init__(self, writer: ShardWriter) -> None:
        self._writer = writer

    def give(self, writer: str, number: int, samples: Sequence[Captured], parts: Parts) -> Given:
        """Write a shard; the same one may be written again."""
        name, _ = self._writer.write_parts(writer, number, parts or shard_parts(samples), samples)
        return Given(shard=name)


class FunctionReceiver:
    """Calls a function with each sample."""

    is_eager = True

    def __init__(self, function: Function, about: Mapping[str, Any]) -> None:
        self._function, self._about = function, about

    def give(self, writer: str, number: int, samples: Sequence[Captured], parts: Parts) -> Given:
        """Call it; what it raises is of that sample alone."""
        errors: list[BaseException | None] = []
        for sample in samples:
            try:
                self._function(sample, self._about)
                errors.append(None)
            except BaseException as error:  # noqa: BLE001 - somebody's code, in a thread of ours
                errors.append(error)
        return Given(errors=errors)


def find_function(name: str) -> Function:
    """Load the function behind an entry point.

    Raises:
        SpecError: there is none of that name, or it cannot be loaded.
    """
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        raise SpecError(
            f"INSPECT_LENS_SINKS: callback={name!r} is no entry point of {GROUP!r}; installed are "
            f"{', '.join(sorted(found)) or 'none'}; install the package that has it beside the "
            "server"
        )
    try:
        function: Any = found[name].load()
    except Exception as error:
        raise SpecError(
            f"INSPECT_LENS_SINKS: callback={name!r} cannot be loaded: {error}"
        ) from error
    if not callable(function):
        raise SpecError(f"INSPECT_LENS_SINKS: callback={name!r} is no function")
    made: Function = function
    return made
