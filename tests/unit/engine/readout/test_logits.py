"""Numbers of a logit lens against float64, one row at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inspect_lens._engine.protocol.readouts import LensForm
from inspect_lens._engine.readout.logit_lens import LOGIT_BYTES, read_logits, rows_at_once

VOCAB = 53


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("top_k", "tokens"), [(4, (0, 52, 7)), (0, (3,)), (5, ()), (VOCAB, (1,))])
def test_numbers_equal_their_definition(
    dtype: torch.dtype, top_k: int, tokens: tuple[int, ...]
) -> None:
    logits = (9 * torch.randn(31, VOCAB, generator=torch.Generator().manual_seed(0))).to(dtype)
    form = LensForm((1,), top_k, tokens)
    found = read_logits(logits, form).numpy()
    assert found.shape == (31, form.columns)
    for row, values in zip(found, logits.double().numpy(), strict=True):
        logprobs = values - values.max() - np.log(np.exp(values - values.max()).sum())
        ids = row[:top_k].astype(int)
        assert len(set(ids)) == top_k
        np.testing.assert_allclose(logprobs[ids], -np.sort(-logprobs)[:top_k], atol=1e-12)
        np.testing.assert_allclose(row[top_k : 2 * top_k], logprobs[ids], atol=2e-5)
        rest = row[2 * top_k :]
        for i, token in enumerate(tokens):
            assert rest[i] == pytest.approx(logprobs[token], abs=2e-5)
            assert rest[len(tokens) + i] == (values > values[token]).sum()


@pytest.mark.parametrize("vocab", [5 * 256, 20 * 256 - 1, 20 * 256, 40 * 256 + 3])
def test_the_largest_of_long_rows_are_found_wherever_they_lie(vocab: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, vocab, generator=generator)
    logits[0] = torch.arange(vocab)  # all of them at the end
    logits[1] = -logits[0]
    logits[2, :-2] = float("-inf")
    values, ids = torch.topk(logits, 5, dim=-1)
    found = read_logits(logits, LensForm((1,), 5, ()))
    rows = [0, 1, *range(3, 64)]
    assert torch.equal(found[rows, :5].long(), ids[rows])
    assert set(found[2, :2].tolist()) == {vocab - 1, vocab - 2}
    assert len(set(found[2, :5].tolist())) == 5
    expected = values - torch.logsumexp(logits, dim=-1, keepdim=True)
    assert torch.equal(found[:, 5:], expected)


def test_tokens_of_equal_logits_have_one_rank() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    found = read_logits(logits, LensForm((0,), 0, (0, 1, 2, 3)))
    assert found[0, 4:].tolist() == [3, 0, 0, 2]


@pytest.mark.parametrize("vocab", [100, 152_064, 1 << 25])
def test_logits_that_are_made_at_once_have_a_bound(vocab: int) -> None:
    rows = rows_at_once(vocab)
    step = 128 if rows >= 128 else 1
    assert rows % step == 0
    assert rows == 1 or 4 * vocab * rows <= LOGIT_BYTES < 4 * vocab * (rows + step)
