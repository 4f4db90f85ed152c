"""What a lens reads of logits on a GPU, against the CPU's reading and float64."""

from __future__ import annotations

import pytest
import torch

from inspect_lens._engine.protocol.readouts import LensForm
from inspect_lens._engine.readout.logit_lens import read_logits, warm_up_lens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

TOKENS = (0, 17, 52)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [53, 5 * 256, 40 * 256 + 3, 50_257, 128_256])
@pytest.mark.parametrize("padding", [0, 1, 64])
def test_numbers_equal_their_definition(dtype: torch.dtype, vocab: int, padding: int) -> None:
    torch.manual_seed(vocab)
    whole = (4 * torch.randn(70, vocab + padding, device="cuda")).to(dtype)
    logits = whole[:, :vocab]
    logits[0] = torch.arange(vocab, device="cuda") / 100  # all of them at the end
    logits[1] = -logits[0]
    logits[2, :-7] = -torch.inf
    whole[:, vocab:] = 1000.0  # padding is no token
    form = LensForm((1,), 5, TOKENS)
    found = read_logits(logits, form).cpu().double()
    wide = logits.cpu().double()
    logprobs = wide - torch.logsumexp(wide, dim=-1, keepdim=True)
    ids = found[:, :5].long()
    assert all(len(set(row.tolist())) == 5 for row in ids)
    best = torch.topk(wide, 5, dim=-1).values
    # Of equal logits any may be named.
    assert torch.equal(wide.gather(1, ids), best)
    torch.testing.assert_close(found[:, 5:10], logprobs.gather(1, ids), rtol=1e-6, atol=2e-5)
    at = list(TOKENS)
    torch.testing.assert_close(found[:, 10:13], logprobs[:, at], rtol=1e-6, atol=2e-5)
    ranks = (wide[:, None, :] > wide[:, at, None]).sum(dim=-1)
    assert torch.equal(found[:, 13:].long(), ranks)


def test_rows_without_a_number_are_as_on_the_cpu() -> None:
    logits = torch.randn(5, 9 * 256, device="cuda")
    logits[0] = -torch.inf
    logits[1, 700] = torch.inf
    logits[2, 3] = torch.nan
    logits[3, :256] = -torch.inf
    form = LensForm((1,), 0, (9, 700))
    found, expected = read_logits(logits, form).cpu(), read_logits(logits.cpu(), form)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("vocab", [32_064, 50_257])
def test_nothing_is_compiled_while_requests_run(vocab: int) -> None:
    from inspect_lens._engine.readout.kernels import logits_triton

    def variants() -> int:
        return sum(len(caches[0]) for caches in logits_triton._scan.device_caches.values())

    warm_up_lens(vocab, torch.bfloat16, torch.device("cuda"))
    compiled = variants()
    assert compiled
    for rows in (1, 16, 300):
        padded = torch.zeros(rows, -(-vocab // 64) * 64, dtype=torch.bfloat16, device="cuda")
        read_logits(padded[:, :vocab], LensForm((1,), 5, TOKENS))
    assert variants() == compiled
