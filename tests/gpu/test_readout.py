"""What probes read on a GPU, against the formula in float64, where rows lie as in a ring."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inspect_lens._engine.readout.readers import ProbeReader, warm_up_readout
from inspect_lens.spec import EngineProbe, TapPoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

LAYERS = (0, 3, 4)


def _linear(rng: np.random.Generator, width: int) -> EngineProbe:
    weight = rng.standard_normal((len(LAYERS), width)).astype(np.float32)
    return EngineProbe(layers=LAYERS, tensors={"weight": weight})


def _mlp(rng: np.random.Generator, width: int) -> EngineProbe:
    shapes = {"w1": (len(LAYERS), 5, width), "b1": (5,), "w2": (5,), "b2": ()}
    tensors = {
        name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }
    return EngineProbe(kind="mlp", layers=LAYERS, tensors=tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [128, 200, 4096, 7168])
@pytest.mark.parametrize(("steps", "tokens"), [(1, 1), (1, 300), (8, 1), (7, 65)])
@pytest.mark.parametrize("columns", [1, 16, 17, 130])
@pytest.mark.parametrize("has_scratch", [False, True])
def test_scores_are_as_exact_as_float32(
    dtype: torch.dtype, width: int, steps: int, tokens: int, columns: int, has_scratch: bool
) -> None:
    device, rng = torch.device("cuda"), np.random.default_rng(columns)
    torch.manual_seed(width)
    scratch = torch.full((1 << 20,), torch.nan, device=device) if has_scratch else None
    probes = [_linear(rng, width) for _ in range(columns)]
    taps = [TapPoint("resid_post", layer) for layer in LAYERS]
    readout = ProbeReader(probes, taps, device, scratch=scratch)
    # A round of a group with six taps, between rows of others.
    ring = torch.randn(6 * steps * tokens + steps * 11 + 64, width, device=device).to(dtype)
    apart = 6 * tokens + 11
    rows = ring.as_strided(
        (6, steps, tokens, width), (tokens * width, apart * width, width, 1), 7 * width
    )
    ranks = (0, 2, 5)
    readout.chunk = 4 * 65  # what is read in parts begins where rows of a step do, or between
    found = readout(rows, ranks)
    assert found.shape == (1, steps * tokens, columns)
    weight = np.stack([probe.tensors["weight"].to_float32() for probe in probes], axis=2)
    wide = rows[list(ranks)].flatten(1, 2).double().cpu()
    expected = torch.einsum("lth,lhc->tc", wide, torch.from_numpy(weight).double())
    # The sizes of what is summed tell the error of the sum.
    sizes = torch.einsum("lth,lhc->tc", wide.abs(), torch.from_numpy(weight).double().abs())
    assert ((found[0].double().cpu() - expected).abs() <= 1e-6 * sizes).all()


def test_an_mlp_and_a_linear_probe_of_some_steps() -> None:
    device, rng = torch.device("cuda"), np.random.default_rng(0)
    torch.manual_seed(0)
    probes = [_mlp(rng, 256), _linear(rng, 256)]
    taps = [TapPoint("resid_post", layer) for layer in LAYERS]
    rows = torch.randn(3, 4, 50, 256, device=device).bfloat16()
    found = ProbeReader(probes, taps, device)(rows)
    expected = ProbeReader(probes, taps, torch.device("cpu"))(rows.cpu())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-3)


def test_an_infinite_row_is_no_number_of_another() -> None:
    device, rng = torch.device("cuda"), np.random.default_rng(0)
    probe = _linear(rng, 256)
    rows = torch.randn(3, 70, 256, device=device).bfloat16()
    readout = ProbeReader([probe], [TapPoint("resid_post", layer) for layer in LAYERS], device)
    before = readout(rows)[0, :, 0].clone()
    rows[1, 5, 9], rows[0, 66, 3] = torch.inf, torch.nan
    after = readout(rows)[0, :, 0]
    kept = torch.ones(70, dtype=torch.bool, device=device)
    kept[[5, 66]] = False
    assert torch.equal(after[kept], before[kept])
    assert not after[~kept].isfinite().any()


def test_nothing_is_compiled_while_requests_run() -> None:
    from inspect_lens._engine.readout.kernels import readout_triton

    device, rng = torch.device("cuda"), np.random.default_rng(0)
    width = 320
    ring = torch.zeros(5000, width, dtype=torch.bfloat16, device=device)
    warm_up_readout(ring, torch.empty(1, device=device))

    def variants() -> int:
        return sum(len(caches[0]) for caches in readout_triton._multiply.device_caches.values())

    compiled = variants()
    assert compiled
    for columns in (1, 2, 16, 17, 64, 65, 100):
        for steps, tokens in ((1, 1), (1, 16), (8, 3), (2, 512)):
            probes = [_linear(rng, width) for _ in range(columns)]
            readout = ProbeReader(probes, [TapPoint("resid_post", n) for n in LAYERS], device)
            apart = 3 * tokens + 1
            readout(
                ring.as_strided(
                    (3, steps, tokens, width),
                    (tokens * width, apart * width, width, 1),
                    width,
                )
            )
    assert variants() == compiled
