"""Control latents against a search through all latents."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inspect_lens.errors import SpecError
from inspect_lens.sae import SparseEncoder, matched_latents

H, N = 8, 40


def encoder(seed: int) -> SparseEncoder:
    rng = np.random.default_rng(seed)
    weight, bias = rng.standard_normal((N, H)), rng.standard_normal(N)
    return SparseEncoder(weight=weight.astype(np.float32), bias=bias.astype(np.float32))


@given(st.integers(0, 99), st.integers(0, N - 1), st.integers(1, 6))
def test_no_other_latent_is_nearer(seed: int, latent: int, n: int) -> None:
    sae = encoder(seed)
    rows = np.random.default_rng(seed + 1).standard_normal((5, H))
    left_out = [(latent + 1) % N, (latent + 2) % N]
    found = matched_latents(sae, rows, latent, n=n, seed=seed, exclude=left_out)
    means = np.maximum(rows @ sae.weight.T.astype(np.float64) + sae.bias, 0.0).mean(axis=0)
    assert found.mean == pytest.approx(means[latent])
    assert list(found.means) == pytest.approx(means[list(found.latents)])
    assert len(set(found.latents)) == n
    others = set(range(N)) - {latent, *left_out}
    assert set(found.latents) <= others
    nearest = sorted(abs(means[i] - means[latent]) for i in others)[:n]
    assert [abs(m - found.mean) for m in found.means] == pytest.approx(nearest)


def test_of_a_small_draw_the_nearest_are_taken_and_another_seed_draws_others() -> None:
    sae, rows = encoder(0), np.random.default_rng(1).standard_normal((5, H))
    draws = {matched_latents(sae, rows, 0, n=2, pool=2, seed=seed).latents for seed in range(20)}
    assert len(draws) > 10
    assert matched_latents(sae, rows, 0, n=2, pool=2, seed=3) == matched_latents(
        sae, rows, 0, n=2, pool=2, seed=3
    )
    # Among latents that are all off, chance decides, and not the number.
    off = SparseEncoder(weight=sae.weight, bias=np.full(N, -1e3, np.float32))
    found = [matched_latents(off, rows, 0, n=1, seed=seed) for seed in range(20)]
    assert {match.means for match in found} == {(0.0,)}
    assert len({match.latents for match in found}) > 5


def test_what_cannot_be_matched_is_refused() -> None:
    sae, rows = encoder(0), np.zeros((3, H))
    for options, said in (
        ({"n": N}, f"1 to {N - 1}"),
        ({"n": 0}, f"1 to {N - 1}"),
        ({"n": N - 1, "exclude": [1]}, f"1 to {N - 2}"),
    ):
        with pytest.raises(SpecError, match=said):
            matched_latents(sae, rows, 0, **options)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="at least one row"):
        matched_latents(sae, np.zeros((0, H)), 0)
    with pytest.raises(SpecError, match="allowed are 0 to"):
        matched_latents(sae, rows, N)
