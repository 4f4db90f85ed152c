"""What the buffers of a worker on a CPU take before anything asks for them."""

from __future__ import annotations

import psutil
import pytest
import torch

from inspect_lens._engine.tap.buffers import TapState
from inspect_lens._engine.tap.memory import zeros
from inspect_lens.spec import tap_points

CPU = torch.device("cpu")


def test_buffers_that_nobody_wrote_to_take_no_memory() -> None:
    """Those of 30 layers of 576 numbers, by the defaults of the settings: they were 242 MiB."""
    before = psutil.Process().memory_info().rss
    state = TapState(
        taps=tap_points(("resid_pre", "resid_post"), tuple(range(30))), hidden=576,
        dtype=torch.bfloat16, max_tokens=2048, max_groups=256, ring_rows=31 * 2048,
        bank_rows=58254, device=CPU, sum_rows=256 * 31,
    )  # fmt: skip
    taken = psutil.Process().memory_info().rss - before
    assert state.nbytes > 200 << 20
    assert taken < 40 << 20
    assert not state.ring[-3:].any()
    state.ring[5] = 2.0
    assert state.ring[4:7].float().sum() == 2.0 * 576


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
@pytest.mark.parametrize("shape", [(3, 5), (0, 7), (2, 3, 4)])
def test_zeros_are_those_of_torch(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    made, wanted = zeros(*shape, dtype=dtype, device=CPU), torch.zeros(*shape, dtype=dtype)
    assert torch.equal(made, wanted)
    assert (made.dtype, made.stride(), made.is_contiguous()) == (dtype, wanted.stride(), True)
