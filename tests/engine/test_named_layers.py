"""Layers that were named by hand: served where the start-up check shows them to be the stream's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import start
from tests.engine.test_architectures import Judge, check_rows, check_steering
from tests.engine.test_start import check
from tests.kit.architectures import CASES

pytestmark = pytest.mark.engine

LLAMA = CASES[0]


@pytest.fixture
def unclear(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kit's models, known to vLLM in this process, in which engines then run."""
    from tests.kit import unclear_layers

    unclear_layers.register()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("INSPECT_LENS_SITES", ",".join(LLAMA.sites))
    monkeypatch.delenv("INSPECT_LENS_REQUIRED", raising=False)
    return unclear_layers


def test_layers_that_are_not_found_are_served_by_their_path(
    unclear: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSPECT_LENS_LAYER_PATH", "model.layers.{i}")
    folder = unclear.write_as(unclear.UnclearLlamaForCausalLM, tiny_folder, tmp_path / "model")
    engine = start(folder, enable_prefix_caching=False, enforce_eager=True)
    judge = Judge(LLAMA, tiny_folder, torch.float32)
    try:
        check_rows(LLAMA, engine, judge)
        check_steering(engine, judge)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("model", "path", "reason"),
    [
        ("Unclear", "", r"2 lists of 4 layers with attention.*INSPECT_LENS_LAYER_PATH"),
        ("Unclear", "model.mixers.{i}", r"do not return the residual stream"),
        ("Unclear", "model.transforms.{i}", r"do not return the residual stream"),
        ("Lying", "model.layers.{i}", r"do not return the residual stream"),
        ("Unclear", "model.blocks.{i}", r"lists of 4 modules: model\.layers\.\{i\}, model"),
    ],
)
def test_what_is_not_the_stream_is_not_served(
    model: str,
    path: str,
    reason: str,
    unclear: Any,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INSPECT_LENS_LAYER_PATH", path)
    monkeypatch.setenv("INSPECT_LENS_SITES", "resid_post")
    named = getattr(unclear, f"{model}LlamaForCausalLM")
    folder = unclear.write_as(named, tiny_folder, tmp_path / "model")
    check(start(folder, max_model_len=64, enforce_eager=True), reason)
