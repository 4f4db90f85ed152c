"""The Triton kernel against its definition, over dtypes, layouts and widths."""

from __future__ import annotations

import pytest
import torch

from inspect_lens._engine._bank import BankTensors

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
    from inspect_lens._engine._kernels.tap_reference import capture_rows, steer_rows
    from inspect_lens._engine._kernels.tap_triton import launch

    torch.manual_seed(n_tokens)
    device = torch.device("cuda")
    bank = BankTensors.allocate(6, width, device)
    bank.vectors[1:] = torch.randn(5, width, device=device)
    bank.norm[2] = bank.norm[4] = 1
    bank.link[3], bank.link[5] = 4, 2
    site, sites = 1, 3
    steer_map = torch.zeros(sites, n_tokens, dtype=torch.int32, device=device)
    steer_map[site] = torch.randint(0, 6, (n_tokens,), device=device)
    slots = torch.full((sites, n_tokens), -1, dtype=torch.int32, device=device)
    chosen = torch.randperm(n_tokens, device=device)[: (n_tokens + 1) // 2]
    slots[site, chosen] = torch.arange(len(chosen), dtype=torch.int32, device=device)
    hidden = torch.randn(n_tokens, width, device=device).to(dtype)
    residual = torch.randn(n_tokens, width, device=device).to(dtype) if is_fused else None
    ring = torch.full((n_tokens, width), 7.0, device=device, dtype=dtype)
    expected, expected_ring = hidden.clone(), ring.clone()
    steer_rows(expected, residual, steer_map[site], bank)
    capture_rows(expected, residual, slots[site], expected_ring)
    flags = torch.tensor([0, 3, 0], dtype=torch.int32, device=device)

    def run() -> None:
        launch(
            hidden,
            residual,
            site=site,
            flags=flags,
            steer_rows=steer_map,
            slots=slots,
            bank=bank,
            ring=ring,
        )

    before = hidden.clone()
    run()
    plain = steer_map[site] == 0
    assert torch.equal(hidden[plain], before[plain]), "tokens without a row keep their bits"
    # The norm is summed in another order, so an edited value may be rounded to the other side;
    # where the halves of the stream cancel, that step is large beside what is left.
    # In float32 the norm's own last bits are what differs, times the vector's size.
    step = 4 * torch.finfo(dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(hidden, expected, rtol=0, atol=step)
    torch.testing.assert_close(ring, expected_ring, rtol=0, atol=step)
    hidden.copy_(before)
    flags.zero_()
    run()
    assert torch.equal(hidden, before)
