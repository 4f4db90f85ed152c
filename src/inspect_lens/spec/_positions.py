"""Which tokens of a request are meant. Positions are absolute over prompt and completion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias, cast, get_args

from inspect_lens.errors import SpecError

__all__ = ["PositionName", "Positions", "parse_positions", "resolve_positions"]

PositionName = Literal["all", "prompt", "completion", "last_prompt"]
Positions: TypeAlias = PositionName | tuple[int, ...]
"""A named range, or explicit positions; negative ones count from the end of the prompt."""


def parse_positions(value: object, *, field: str) -> Positions:
    """Read positions as a user writes them.

    Args:
        value: a name, one int, or a list of ints without repeats.
        field: path of the field, for error messages.

    Returns:
        The name, or a tuple of ints in the order given.

    Raises:
        SpecError: anything else.
    """
    if isinstance(value, str):
        if value in get_args(PositionName):
            return cast("PositionName", value)
        raise SpecError(
            f"{field}={value!r}; allowed are {', '.join(get_args(PositionName))} "
            "or a list of integers"
        )
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if isinstance(value, Iterable):
        items = list(cast("Iterable[object]", value))
        if items and all(isinstance(i, int) and not isinstance(i, bool) for i in items):
            positions = tuple(cast("list[int]", items))
            if len(set(positions)) != len(positions):
                raise SpecError(f"{field}: a position is named twice in {positions!r}")
            return positions
    raise SpecError(
        f"{field}={value!r}; allowed are {', '.join(get_args(PositionName))} "
        "or a non-empty list of integers"
    )


def resolve_positions(
    positions: Positions, *, n_prompt: int, n_max: int, field: str
) -> range | tuple[int, ...]:
    """Turn positions into a range or explicit positions of one request.

    Args:
        positions: what `parse_positions` returned.
        n_prompt: tokens of the prompt.
        n_max: tokens that are fed to the model at most, prompt and completion together.
        field: path of the field, for error messages.

    Returns:
        A `range` for a named range (it may reach to `n_max`), else the explicit positions,
        order kept and negatives resolved.

    Raises:
        SpecError: an explicit position lies outside the request.
    """
    if isinstance(positions, str):
        return {
            "all": range(n_max),
            "prompt": range(n_prompt),
            "completion": range(n_prompt, n_max),
            "last_prompt": range(n_prompt - 1, n_prompt),
        }[positions]
    resolved = tuple(p + n_prompt if p < 0 else p for p in positions)
    for asked, position in zip(positions, resolved, strict=True):
        if not 0 <= position < n_max:
            raise SpecError(
                f"{field}: position {asked} is outside this request, which has {n_prompt} "
                f"prompt tokens and feeds at most {n_max} tokens to the model "
                "(the last sampled token is never fed); negative positions count from the "
                "end of the prompt"
            )
    if len(set(resolved)) != len(resolved):
        raise SpecError(f"{field}: two of {positions!r} are the same position of this prompt")
    return resolved
