"""Layers that were named by hand: served where the start-up check shows them to be the stream's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import Engine, stand_in, start
from tests.engine.test_architectures import Judge, check_rows, check_steering
from tests.engine.test_start import check
from tests.kit.architectures import CASES

pytestmark = pytest.mark.engine

LLAMA = CASES[0]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("INSPECT_LENS_SITES", ",".join(LLAMA.sites))
    monkeypatch.delenv("INSPECT_LENS_REQUIRED", raising=False)


def start_as(name: str, folder: Path, **options: Any) -> Engine:
    """An engine that runs a model of the kit in the place of Llama."""
    model = stand_in(f"unclear_layers:{name}LlamaForCausalLM")
    return start(folder, enforce_eager=True, **model, **options)


def test_layers_that_are_not_found_are_served_by_their_path(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSPECT_LENS_LAYER_PATH", "model.layers.{i}")
    engine = start_as("Unclear", tiny_folder, enable_prefix_caching=False)
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
    model: str, path: str, reason: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSPECT_LENS_LAYER_PATH", path)
    monkeypatch.setenv("INSPECT_LENS_SITES", "resid_post")
    check(start_as(model, tiny_folder, max_model_len=64), reason)
