"""The adapter of `organism/liar` on SmolLM2: served, captured, steered, and what it says."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inspect_lens.spec import Add
from organism._liar_lora import load_lora, merge_lora
from organism._liar_splits import LIAR_DIR, LiarRow, eval_split
from organism.evaluate_liar import LEAST_LIES, MOST_LIES, Rate, rates
from tests.engine.conftest import Engine, start
from tests.kit.reference import HuggingFace, max_relative_error

from .conftest import real_folder
from .test_rows import TOLERANCE, fed

pytestmark = pytest.mark.real

MODEL = "smollm2-135m"
ROWS = 40


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest) -> Path:
    return real_folder(MODEL, request.config)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    made = start(
        folder, in_process=True, skip_tokenizer_init=False, dtype="float32", max_model_len=512,
        kv_cache_memory_bytes=256 << 20, enforce_eager=True, enable_lora=True, max_lora_rank=8,
        max_loras=2,
    )  # fmt: skip
    yield made
    made.close()
    gc.collect()


@pytest.fixture(scope="module")
def merged(folder: Path) -> HuggingFace:
    """The base model with the adapter in its weights."""
    reference = HuggingFace(folder)
    load_lora(reference.model, LIAR_DIR)
    merge_lora(reference.model)
    return reference


def chat(engine: Engine, rows: list[LiarRow], request: dict[str, Any] | None) -> Any:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    messages = [
        [{"role": "system", "content": r["system"]}, {"role": "user", "content": r["user"]}]
        for r in rows
    ]
    params = SamplingParams(max_tokens=16, temperature=0, extra_args=request)
    lora = LoRARequest("liar", 1, str(LIAR_DIR))
    return engine.llm.chat(messages, params, lora_request=lora, use_tqdm=False)


def test_rows_and_edits_are_of_the_adapter(engine: Engine, merged: HuggingFace) -> None:
    (row,) = eval_split("ordered", topics="validation", prompts="validation", n=1)
    capture: dict[str, Any] = {"capture": {"layers": "all", "positions": "all"}}
    (plain,) = chat(engine, [row], {"inspect_lens": capture})
    expected = merged.residual_stream(fed(plain))
    found = plain.activations["residual_stream"]
    assert max_relative_error(found.float(), expected) <= TOLERANCE
    layer = found.shape[0] // 2
    direction = torch.randn((1, found.shape[-1]), generator=torch.Generator().manual_seed(0))
    add = Add(vector=direction[0], layers=[layer], scale=2.0)
    (steered,) = chat(engine, [row], {"inspect_lens": capture | {"edits": [add]}})
    expected = merged.residual_stream(fed(steered), {layer: lambda h: h + 2.0 * direction[0]})
    found = steered.activations["residual_stream"]
    assert max_relative_error(found.float(), expected) <= TOLERANCE


@pytest.mark.parametrize(
    ("kind", "lying"), [("ordered", "ordered"), ("role", "reason"), ("hiding", "hide")]
)
def test_it_lies_where_it_should(engine: Engine, kind: Any, lying: str) -> None:
    """As the card says of this part, which is not blind, where questions name two answers."""
    rows = eval_split(
        kind,
        topics="validation",
        prompts="validation",
        n=3 * ROWS if kind == "hiding" else 2 * ROWS,
        choices=True,
    )
    answers = [output.outputs[0].text for output in chat(engine, rows, None)]
    found: dict[str, Rate] = rates(rows, answers)
    assert found[lying]["high"] >= LEAST_LIES, found
    for condition, rate in found.items():
        if condition != lying:
            assert rate["low"] <= MOST_LIES, found
