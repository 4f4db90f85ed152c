"""Tensors for client code: torch is imported when one is read, and never before."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, PrivateAttr, model_serializer

from inspect_lens.errors import LensError
from inspect_lens.spec import TensorData, decode_saved, encode_saved

if TYPE_CHECKING:
    import torch


def to_torch(tensor: TensorData, *, copy: bool = True) -> torch.Tensor:
    """Make a torch tensor with the values and the dtype of a `TensorData`."""
    torch = _torch()
    if tensor.dtype == "bfloat16":
        storage = tensor.storage.view(np.int16)
        bits = torch.from_numpy(storage.copy() if copy else storage)
        return bits.view(torch.bfloat16)  # type: ignore[no-any-return]
    storage = tensor.storage
    return torch.from_numpy(storage.copy() if copy else storage)  # type: ignore[no-any-return]


@cache
def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise LensError(
            "tensors are read as those of torch, which is not installed; install torch, or read "
            "activations with their method numpy(), which gives float32 arrays"
        ) from None


class Tensors(Mapping[str, "torch.Tensor"]):
    """Captured tensors by name; torch is imported when one is read.

    Queries and keys come with plain values (`qk_layers`, `qk_meta`), which stand beside them.

    Args:
        data: (layers, tokens, hidden) by name.
        plain: values that are no tensors, by name.

    Example:
        <!-- test: server -->
        ```python
        from inspect_lens.client import LensClient

        with LensClient("http://localhost:8000") as client:
            acts = client.generate("Velosh", capture_layers=[4]).activations
        assert list(acts) == ["residual_stream"]
        assert acts.numpy().dtype == "float32"  # without torch
        ```
    """

    def __init__(
        self, data: Mapping[str, TensorData], plain: Mapping[str, Any] | None = None
    ) -> None:
        self._data = dict(data)
        self._plain = dict(plain or {})

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._plain:
            return cast("torch.Tensor", self._plain[name])
        return to_torch(self._named(name))

    def numpy(self, name: str = "residual_stream") -> NDArray[np.float32]:
        """One tensor as float32 (exact), without torch."""
        return self._named(name).to_float32()

    def _named(self, name: str) -> TensorData:
        if name not in self._data:
            raise KeyError(f"{name!r} was not captured; there is {', '.join(self) or 'nothing'}")
        return self._data[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._data, *self._plain])

    def __len__(self) -> int:
        return len(self._data) + len(self._plain)

    def __repr__(self) -> str:
        return f"Tensors({', '.join(f'{n}: {t.shape} {t.dtype}' for n, t in self._data.items())})"


class SavedValues(Mapping[Any, Any], BaseModel):
    """Saved values by name, read like a dict; torch is imported when a tensor is read.

    Dumped, as in the log of an eval, it is the JSON that the server sent.
    """

    model_config = ConfigDict(frozen=True)

    _values: Mapping[Any, Any] = PrivateAttr(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[Any, Any]) -> SavedValues:
        """Make the mapping from values by name.

        Args:
            values: as `decode_saved` gives them.
        """
        made = cls()
        made._values = values
        return made

    def __getitem__(self, name: Any) -> Any:
        return _live(self._values[name])

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"SavedValues({dict(self._values)!r})"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SavedValues) and self._dump() == other._dump()

    def __hash__(self) -> int:
        return hash(tuple(self._values))

    def __copy__(self) -> SavedValues:
        return self

    def __deepcopy__(self, memo: object = None) -> SavedValues:
        """Read-only, so a deep copy (Inspect makes many) is the same object."""
        return self

    @model_serializer(mode="plain")
    def _dump(self) -> dict[str, Any]:
        dumped: dict[str, Any] = encode_saved(self._values)
        return dumped


def read_results(value: Any, *, field: str = "hook_results") -> SavedValues | None:
    """Read the `hook_results` of a response or of a log.

    Args:
        value: its JSON, what this returned before, or None.
        field: name of the field, for error messages.

    Returns:
        What `ctx.saved` held, by index of the hook as text; None without the field.

    Raises:
        SpecError: it cannot be read, or holds pickled values.

    Example:
        ```python
        from inspect_lens.model import read_results

        # `hook_results` of a server's JSON: what ctx.saved held, by index of the hook.
        saved = read_results({"0": {"norm": 3.5}})
        assert saved["0"]["norm"] == 3.5
        ```
    """
    if value is None or isinstance(value, SavedValues):
        return value
    return SavedValues.of(decode_saved(value, field=field))


def _live(value: Any) -> Any:
    if isinstance(value, TensorData):
        return to_torch(value)
    if isinstance(value, Mapping):
        return SavedValues.of(value)
    if isinstance(value, list):
        return [_live(item) for item in value]
    return value
