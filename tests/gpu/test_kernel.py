"""The Triton kernel against its definition, over dtypes, layouts and widths."""

from __future__ import annotations

import pytest
import torch

from inspect_lens._engine._state import TapState
from inspect_lens.spec import TapPoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("width", [128, 200, 4096, 7168])
@pytest.mark.parametrize("n_tokens", [1, 7, 3000])
def test_the_kernel_equals_the_reference(
    dtype: torch.dtype, is_fused: bool, width: int, n_tokens: int
) -> None:
    from inspect_lens._engine._kernels.tap_reference import capture_rows, ring_rows, steer_rows
    from inspect_lens._engine._kernels.tap_triton import launch

    torch.manual_seed(n_tokens)
    device = torch.device("cuda")
    state = TapState.allocate(
        taps=tuple(TapPoint("resid_post", i) for i in range(3)),
        hidden=width,
        dtype=dtype,
        max_tokens=n_tokens,
        max_groups=2,
        ring_rows=n_tokens,
        bank_rows=5,
        device=device,
    )
    bank, tap = state.bank, 1
    bank.vectors[1:] = torch.randn(5, width, device=device)
    bank.norm[2] = bank.norm[4] = 1
    bank.link[3], bank.link[5] = 4, 2
    bank.table[1:, tap] = torch.tensor([3, 1, 5, 2, 0], device=device)
    state.tokens[:, 0] = torch.randint(0, 6, (n_tokens,), device=device)
    state.tokens[:, 1] = torch.randint(-1, 2, (n_tokens,), device=device)
    state.tokens[:, 2] = torch.arange(n_tokens, device=device)
    state.base[0, tap] = 0  # the other group does not capture here
    state.header[1] = origin = n_tokens  # the second half of the ring
    # Padding behind the tokens that the maps describe.
    described = max(1, n_tokens - 5)
    state.header[0] = described
    hidden = torch.randn(n_tokens, width, device=device).to(dtype)
    residual = torch.randn(n_tokens, width, device=device).to(dtype) if is_fused else None
    ring = state.ring
    ring.fill_(7.0)
    expected, expected_ring = hidden.clone(), ring.clone()
    rows = bank.table[:, tap][state.tokens[:, 0].long()]
    slots = ring_rows(state.tokens, state.base[:, tap].contiguous(), origin)
    rows[described:], slots[described:] = 0, -1
    steer_rows(expected, residual, rows, bank)
    capture_rows(expected, residual, slots, expected_ring)
    state.flags[tap] = 3

    def run() -> None:
        launch(hidden, residual, tap=tap, state=state)

    before = hidden.clone()
    run()
    plain = rows == 0
    assert torch.equal(hidden[plain], before[plain]), "tokens without a row keep their bits"
    # The norm is summed in another order, so an edited value may be rounded to the other side;
    # where the halves of the stream cancel, that step is large beside what is left.
    # In float32 the norm's own last bits are what differs, times the vector's size.
    step = 4 * torch.finfo(dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(hidden, expected, rtol=0, atol=step)
    torch.testing.assert_close(ring, expected_ring, rtol=0, atol=step)
    hidden.copy_(before)
    state.flags.zero_()
    run()
    assert torch.equal(hidden, before)
