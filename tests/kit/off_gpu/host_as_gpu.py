"""Lets memory of the host stand for a GPU's, so that what launches kernels runs without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["HostAsGpu"]

_HOST = torch.device("cpu")
_SAYS_WHERE = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class HostAsGpu(TorchFunctionMode):
    """While it is entered, tensors for `cuda` lie on the host, and all say that they are on a GPU.

    A kernel that is interpreted, or only compiled, gets what it would get there: the same shapes,
    strides and alignment.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See `TorchFunctionMode`."""
        if func == _SAYS_WHERE:
            return True
        if func is torch.Tensor.pin_memory:
            return args[0]
        named = dict(kwargs or {})
        named.pop("pin_memory", None)
        if "device" in named:
            named["device"] = _on_host(named["device"])
        # To strings it does nothing: they are equations and modes, too.
        return func(*[_on_host(a) if isinstance(a, torch.device) else a for a in args], **named)


def _on_host(device: Any) -> Any:
    is_gpu = device is not None and torch.device(device).type == "cuda"
    return _HOST if is_gpu else device
