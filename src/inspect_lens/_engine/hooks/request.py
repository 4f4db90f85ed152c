"""A live request with hooks, and whether what its hooks gave is finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from inspect_lens._engine.tap.edit_table import largest_norm
from inspect_lens.errors import HookError, LensError


class HookContext:
    """One per hook and request; lives as long as the request.

    Attributes:
        saved: what the hook keeps; it comes back with the response as `hook_results`. Tensors,
            arrays, numbers, text, None, and lists and dicts of them.
        layer_idx: layer of this call.
        seq_len: tokens of the request in this step: rows of `h`.
        position: absolute position of the first of them; 0 in the first call at a layer.
        model: the model as vLLM holds it, on this rank.
    """

    __slots__ = ("_parameter", "layer_idx", "model", "position", "saved", "seq_len")

    def __init__(self, model: Any, parameter: Callable[[str], torch.Tensor]) -> None:
        self.saved: dict[Any, Any] = {}
        self.layer_idx = 0
        self.seq_len = 0
        self.position = 0
        self.model = model
        self._parameter = parameter

    def get_parameter(self, name: str) -> torch.Tensor:
        """A parameter of the model, whole, whatever tensor parallelism made of it."""
        return self._parameter(name)


@dataclass(frozen=True)
class Place:
    """Where a hook runs, as all ranks know it: also one that could not read the function."""

    layers: frozenset[int]
    pre: bool
    asks: bool
    """Whether it may ask for parameters that ranks have to gather."""

    @classmethod
    def of(cls, item: Mapping[str, Any]) -> Place:
        """Of a packed hook.

        Its own code names what it calls. Without code it is the name of a function that the
        server has, which may call anything.
        """
        asks = b"get_parameter" in item["data"] or b"CodeType" not in item["data"]
        return cls(frozenset(item["layers"]), bool(item["pre"]), asks)


@dataclass(frozen=True)
class LoadedHook:
    """A function that came with a request, or persistent, and where it runs."""

    function: Callable[..., Any]
    name: str
    place: Place


@dataclass
class HookedRequest:
    """What a worker holds of a request while it runs."""

    reply: str
    pid: int
    hooks: list[tuple[str, str, LoadedHook]]
    """Part of the results, index in it, hook; in the order in which they run."""
    layers: tuple[int, ...]
    """Layers of this stage where something is done for it."""
    places: tuple[Place, ...] = ()
    """Of its hooks, whether or not they could be read here."""
    contexts: dict[tuple[str, str], HookContext] = field(default_factory=dict)
    next: int = 0
    """Tokens seen, from position 0."""
    n_edited: int = 0
    error: LensError | None = None
    """Why no hook of it runs any more; the same on all ranks."""
    is_dropped: bool = False
    """Whether it has failed, so that nothing is kept or sent."""
    is_fine: dict[str, torch.Tensor] = field(default_factory=dict)
    """By hook and place: whether all rows that it gave back were finite; on the device."""

    @property
    def is_whole(self) -> bool:
        """Whether what it has kept is all that it was to keep."""
        return self.error is None and not self.is_dropped

    def restart(self) -> None:
        """Forget what was seen: the engine computes the request again from its beginning."""
        self.contexts.clear()
        self.next = self.n_edited = 0


def finite(
    result: torch.Tensor, before: torch.Tensor, is_fine: dict[str, torch.Tensor], where: str
) -> torch.Tensor:
    """Rows that a hook gave back; where they are too large or NaN, noted on the device, its own."""
    size = result.float().square().sum(dim=-1, keepdim=True)
    is_small = size <= largest_norm(result.dtype) ** 2
    known = is_fine.get(where)
    is_fine[where] = is_small.all() if known is None else known & is_small.all()
    return torch.where(is_small, result, before)


def is_known_to_be_fine(is_fine: torch.Tensor) -> bool:
    """Whether rows were finite, as far as that is known without waiting for a device."""
    return is_fine.is_cuda or bool(is_fine)


def not_finite(request: HookedRequest) -> HookError:
    """The error of a request whose hooks gave something back that is not finite."""
    bad = next(where for where, is_fine in request.is_fine.items() if not is_fine)
    return HookError(
        f"{bad} gave back rows that are not finite, or too large for the dtype of the stream; "
        "they went on as they were"
    )


def side(hook: LoadedHook) -> str:
    """Where a hook runs, in words."""
    return "before" if hook.place.pre else "after"
