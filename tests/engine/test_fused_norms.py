"""Blocks that leave a sum over ranks, or a first norm, to what comes before or behind them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inspect_lens import SteeringVector
from tests.engine.conftest import HIDDEN, Engine, stand_in, start, tokens
from tests.engine.test_architectures import Judge, check_rows, check_steering
from tests.engine.test_capture import fed
from tests.engine.test_start import check
from tests.kit.architectures import CASES

pytestmark = pytest.mark.engine

LLAMA = CASES[0]
SITES = {1: LLAMA.sites, 2: ("resid_pre", "resid_post")}
"""By ranks: with two, attention and feed-forward modules return shares, which are refused."""
TWO = {"tensor_parallel_size": 2}
BOTH = TWO | {"pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("FusedLlamaForCausalLM", {}),
        ("FusedLlamaForCausalLM", TWO),
        ("FusedLlamaForCausalLM", BOTH),
        ("PartlyFusedLlamaForCausalLM", TWO),
        ("PartlyFusedLlamaForCausalLM", BOTH),
    ],
)
def test_rows_and_steering_equal_hugging_face(
    model: str, options: dict[str, Any], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(LLAMA, sites=SITES[options.get("tensor_parallel_size", 1)])
    monkeypatch.setenv("INSPECT_LENS_SITES", ",".join(case.sites))
    monkeypatch.setenv("INSPECT_LENS_REQUIRED", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join("01" * len(options)) or "0")
    options = stand_in(f"fused_layers:{model}") | options
    engine = start(tiny_folder, enable_prefix_caching=False, enforce_eager=True, **options)
    judge = Judge(case, tiny_folder, torch.float32)
    try:
        check_rows(case, engine, judge)
        check_steering(engine, judge)
        check_first(engine, judge)
    finally:
        engine.close()


def test_a_share_that_nobody_completes_is_refused_without_the_check_as_well(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSPECT_LENS_SITES", "resid_post")
    monkeypatch.setenv("INSPECT_LENS_SELF_CHECK", "0")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    model = stand_in("fused_layers:OtherLlamaForCausalLM")
    reason = r"resid_post\.0.*each tensor-parallel rank has its own share of a sum"
    check(start(tiny_folder, max_model_len=64, enforce_eager=True, **model, **TWO), reason)


def check_first(engine: Engine, judge: Judge) -> None:
    """A vector in front of the first block reaches that block's norm."""
    v = 4.0 * torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(1))
    vector = SteeringVector(activations=v, layer_indices=[0], site="resid_pre")
    asked = {"apply_steering_vectors": [vector], "output_residual_stream": True}
    (output,) = engine.run([tokens(40)], asked, max_tokens=4)
    edited = judge.sites(fed(output), ["resid_post"], {("resid_pre", 0): lambda rows: rows + v[0]})
    judge.check("steered", output.activations["residual_stream"], edited["resid_post"])
