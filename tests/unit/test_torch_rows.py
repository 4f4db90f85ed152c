"""What an `LLM` captures are torch tensors of any dtype, and what reads rows takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens._patching.sweep import SweepSpec, to_body
from inspect_lens.attention import attention_patterns
from inspect_lens.lens import Lens, decompose, load_lens
from inspect_lens.oracle import fraction_explained
from inspect_lens.probe import load_probe
from inspect_lens.sae import SparseEncoder, matched_latents
from inspect_lens.spec import Add
from inspect_lens.vector import Vector, VectorCard

WIDTH = 256
LENS: Lens = load_lens("organism/jacobian")
PROBE: Any = load_probe("organism/deception-lr")
SAE = SparseEncoder(weight=np.eye(WIDTH, dtype=np.float32), bias=np.zeros(WIDTH, np.float32))
META = {"scale": 0.1, "num_heads": 4, "num_kv_heads": 4, "head_size": 64}
CARD = VectorCard(name="m/v", layers=(1,), hidden=WIDTH)


READERS: dict[str, Callable[[Any], Any]] = {
    "probe": PROBE.score_tokens,
    "sae": SAE.activations,
    "controls of a latent": lambda rows: matched_latents(SAE, rows, 0, n=2).means,
    "lens": lambda rows: LENS.translate(rows, LENS.layers[0]),
    "directions": lambda rows: LENS.token_direction(rows, LENS.layers[0]),
    "decomposition": lambda rows: decompose(rows[0], rows, k=2).coordinates,
    "attention": lambda rows: attention_patterns(
        rows.reshape(-1, 4, 64), rows.reshape(-1, 4, 64), META
    ),
    "reconstruction": lambda rows: fraction_explained(rows, rows).fraction,
    "vector": lambda rows: Vector.from_raw(rows[0], card=CARD).direction,
    "patches": lambda rows: to_body(
        SweepSpec(clean=[1], corrupted=[2], answer=3, source="rows", rows=rows[None]), "m"
    )["rows"]["shape"],
    "edit": lambda rows: Add(vector=[rows[0]], layers=[1]).vector.to_float32(),
}


@pytest.mark.parametrize("reader", READERS)
def test_rows_of_torch_are_read_as_those_of_numpy(reader: str) -> None:
    rows = torch.randn(6, WIDTH, generator=torch.manual_seed(0)).bfloat16()
    wanted = READERS[reader](rows.float().numpy())
    np.testing.assert_array_equal(READERS[reader](rows.clone().requires_grad_()), wanted)
