"""The one door to torch for client code: imported when a tensor is read, never before."""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from inspect_lens.errors import LensError
from inspect_lens.spec import TensorData

if TYPE_CHECKING:
    import torch

__all__ = ["to_torch"]


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
            "reading activations as torch tensors needs torch; install it, or use "
            "`.numpy(name)` for float32 arrays"
        ) from None
