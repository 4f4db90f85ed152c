"""What is known of one captured tensor without reading it, and how a log says it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any, cast

from pydantic import BaseModel, ConfigDict

from inspect_lens.spec import Reduce

__all__ = ["TensorInfo", "read_info", "tensor_info", "write_info"]

_LONGEST = 90
"""Letters of a tensor's facts: where Inspect walks a value, more than 100 become an attachment."""
_FACTS = re.compile(r"(\w+) (\d+(?:x\d+)*) layers ([\d,-]+)(?: (\w+))?")


class TensorInfo(BaseModel):
    """Facts about one captured tensor that are known without reading it."""

    model_config = ConfigDict(frozen=True)

    shape: tuple[int, ...]
    """(layers, tokens, hidden); the second axis is 1 of a `mean`, `max` or `last`, and the third
    one of a `norm`."""
    dtype: str
    layers: tuple[int, ...]
    """Layers of the first axis, ascending."""
    reduce: Reduce = "none"
    """What was made of the tokens' rows in the engine."""

    @cached_property
    def _logged(self) -> str | dict[str, Any]:
        layers = _write_layers(self.layers)
        text = f"{self.dtype} {'x'.join(map(str, self.shape))} layers {layers}"
        text += "" if self.reduce == "none" else f" {self.reduce}"
        if len(text) <= _LONGEST and _FACTS.fullmatch(text):
            return text
        return self.model_dump(mode="json", exclude_defaults=True)


def write_info(info: TensorInfo) -> str | dict[str, Any]:
    """As it stands in a log: in words, since Inspect walks every value of a mapping often."""
    return info._logged  # noqa: SLF001 - of this module


def read_info(logged: object) -> dict[str, Any]:
    """The fields of a `TensorInfo`, from what a log has now or had at first.

    Raises:
        ValueError: text that is something else; `KeyError` and `TypeError` are possible, too.
    """
    if not isinstance(logged, str):
        fields = cast("Mapping[str, Any]", logged)
        return {**fields, "layers": _read_layers(fields["layers"])}
    if (match := _FACTS.fullmatch(logged)) is None:
        raise ValueError(f"tensors: {logged!r}")
    dtype, shape, layers, reduce = match.groups(default="none")
    return {
        "shape": tuple(map(int, shape.split("x"))),
        "dtype": dtype,
        "layers": _read_layers(layers),
        "reduce": reduce,
    }


def _write_layers(layers: tuple[int, ...]) -> str:
    """Long runs of layers as `0-79`, because a log has hundreds of these."""
    run = len(layers) > 2 and layers == tuple(range(layers[0], layers[-1] + 1))
    return f"{layers[0]}-{layers[-1]}" if run else ",".join(map(str, layers))


def _read_layers(value: object) -> tuple[int, ...]:
    if not isinstance(value, str):
        return tuple(cast("list[int]", value))
    if match := re.fullmatch(r"(\d+)-(\d+)", value):
        return tuple(range(int(match[1]), int(match[2]) + 1))
    return tuple(map(int, value.split(",")))


@lru_cache(maxsize=1024)
def tensor_info(
    shape: tuple[int, ...], dtype: str, layers: tuple[int, ...], reduce: Reduce
) -> TensorInfo:
    """The facts of a tensor; calls of one length have the same ones."""
    return TensorInfo.model_construct(shape=shape, dtype=dtype, layers=layers, reduce=reduce)
