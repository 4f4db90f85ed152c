"""The custom op that sits behind every tapped layer: schema, fake, dispatch.

`inspect_lens::tap(Tensor(a!) hidden, Tensor? residual, Tensor ctl) -> ()`

The mutation is declared, also where nothing is steered: an op without outputs and without
mutation is removed as dead code. `ctl` is a tensor and not an int, so that the subgraphs of
all layers stay identical and compile once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from . import buffers
from .kernels.tap_reference import capture_rows, edit_rows, ring_rows

_LIBRARY: Any = torch.library.Library(  # type: ignore[no-untyped-call]
    "inspect_lens", "FRAGMENT"
)
_LIBRARY.define("tap(Tensor(a!) hidden, Tensor? residual, Tensor ctl) -> ()")


def _tap_cpu(hidden: torch.Tensor, residual: torch.Tensor | None, ctl: torch.Tensor) -> None:
    found = buffers.find(ctl)
    if found is None or not found[0].is_active:
        return
    state, tap = found
    tokens = state.tokens[: min(hidden.shape[0], int(state.header[0]))]
    if state.steering[tap]:
        rows = state.bank.table[:, tap].index_select(0, tokens[:, 0])
        left = edit_rows(hidden, residual, rows, state.bank, tokens[:, 3:5], int(state.header[2]))
        if len(left):
            state.faults[tokens[left, 3].long()] = 1
    if state.capturing[tap]:
        rows = ring_rows(tokens, state.base[:, tap], int(state.header[1]))
        apart = state.base[:, -1].index_select(0, tokens[:, 1].clamp(min=0))
        capture_rows(hidden, residual, rows, state.ring, apart)


def _tap_cuda(hidden: torch.Tensor, residual: torch.Tensor | None, ctl: torch.Tensor) -> None:
    found = buffers.find(ctl)
    if found is None:
        return
    state, tap = found
    # Outside a graph the host knows whether anything is asked of this tap, and saves the
    # launch. While a graph is being captured the launch must be in it: its replays read the
    # flags.
    is_asked = state.is_active and (state.steering[tap] or state.capturing[tap])
    if not is_asked and not torch.cuda.is_current_stream_capturing():
        return
    # Imported here: Triton is not there on a CPU-only machine.
    from .kernels.tap_triton import launch

    launch(hidden, residual, tap=tap, state=state)


def warm_up(state: buffers.TapState, widths: Iterable[int] = ()) -> None:
    """Compile the kernels for all layouts: a graph capture must not be the first launch."""
    if not state.ring.is_cuda:
        return
    from .kernels.tap_triton import launch

    rows = torch.zeros(1, state.ring.shape[1], dtype=state.ring.dtype, device=state.ring.device)
    for residual in (None, rows):
        launch(rows, residual, tap=0, state=state)
    for width in widths:
        launch(rows.new_zeros(1, width), None, tap=0, state=state)
        # A router may compute in float32.
        launch(rows.new_zeros(1, width, dtype=torch.float32), None, tap=0, state=state)


def _tap_fake(hidden: torch.Tensor, residual: torch.Tensor | None, ctl: torch.Tensor) -> None:
    return None


_LIBRARY.impl("tap", _tap_cpu, "CPU")
_LIBRARY.impl("tap", _tap_cuda, "CUDA")
torch.library.register_fake("inspect_lens::tap", _tap_fake, lib=_LIBRARY)

tap: Any = torch.ops.inspect_lens.tap.default
"""The op; `tap(hidden, residual, ctl)`."""
