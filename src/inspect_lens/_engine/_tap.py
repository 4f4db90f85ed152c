"""The custom op that sits behind every tapped layer: schema, fake, dispatch.

`inspect_lens::tap(Tensor(a!) hidden, Tensor? residual, Tensor ctl) -> ()`

The mutation is declared, also where nothing is steered: an op without outputs and without
mutation is removed as dead code. `ctl` is a tensor and not an int, so that the subgraphs of
all layers stay identical and compile once.
"""

from __future__ import annotations

from typing import Any

import torch

from inspect_lens.errors import LensError

from . import _state
from ._kernels.tap_reference import capture_rows, steer_rows

__all__ = ["tap"]

_LIBRARY: Any = torch.library.Library(  # type: ignore[no-untyped-call]
    "inspect_lens", "FRAGMENT"
)
_LIBRARY.define("tap(Tensor(a!) hidden, Tensor? residual, Tensor ctl) -> ()")


def _tap_cpu(hidden: torch.Tensor, residual: torch.Tensor | None, ctl: torch.Tensor) -> None:
    state = _state.current()
    if state is None or not state.is_active:
        return
    site = state.site_of.get(ctl.data_ptr())
    if site is None:
        raise LensError(
            "a tap ran with a control tensor that this worker did not make: the model's buffers "
            "were moved or copied after loading; restart the engine"
        )
    n = hidden.shape[0]
    if state.steering[site]:
        steer_rows(hidden, residual, state.steer_rows[site, :n], state.bank)
    if state.capturing[site]:
        capture_rows(hidden, residual, state.slots[site, :n], state.ring)


def _tap_fake(hidden: torch.Tensor, residual: torch.Tensor | None, ctl: torch.Tensor) -> None:
    return None


_LIBRARY.impl("tap", _tap_cpu, "CPU")
torch.library.register_fake("inspect_lens::tap", _tap_fake, lib=_LIBRARY)

tap: Any = torch.ops.inspect_lens.tap.default
"""The op; `tap(hidden, residual, ctl)`."""
