"""Memory of a device: buffers whose pages are taken when they are written, and uploads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A buffer of zeros. On a CPU it takes no memory before it is written to.

    `torch.zeros` writes all of it: a table of edits and a capture buffer that nobody asks for
    would be hundreds of MiB of a small model's server. What numpy asks the system for is zero by
    itself, page by page.
    """
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(*shape, dtype=dtype, device=device)
    held = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(held).view(dtype).view(*shape)


def uploaded(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Values on a device, without waiting for what it has been given to do."""
    source = torch.from_numpy(values)
    # From pageable memory the copy would wait.
    return source.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else source
