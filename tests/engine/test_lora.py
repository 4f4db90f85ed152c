"""A LoRA adapter beside the base model: each request's rows are those of its own weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from inspect_lens import SteeringVector
from tests.engine.conftest import HIDDEN, LAYERS, Engine, start, tokens
from tests.engine.test_capture import ALL, TOLERANCE, fed
from tests.kit.reference import HuggingFace, max_relative_error

pytestmark = pytest.mark.engine

SITED = ("z", "attn_out", "resid_mid", "mlp_hidden", "mlp_out", "resid_post")

RANK, ALPHA = 8, 16


@pytest.fixture(scope="module")
def adapter(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter on two projections of every layer, as PEFT would write it."""
    reference = HuggingFace(tiny_folder)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(LAYERS):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            out, width = reference.model.get_submodule(f"model.layers.{layer}.{name}").weight.shape
            path = f"base_model.model.model.layers.{layer}.{name}"
            for part, shape in (("A", (RANK, width)), ("B", (out, RANK))):
                values = torch.randn(shape, generator=generator) / shape[1] ** 0.5
                weights[f"{path}.lora_{part}.weight"] = values
    folder = tmp_path_factory.mktemp("adapter")
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": ["o_proj", "down_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def merged(tiny_folder: Path, adapter: Path) -> HuggingFace:
    """The base model with the adapter added to its weights."""
    from safetensors.torch import load_file

    reference = HuggingFace(tiny_folder)
    weights = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, a in weights.items():
            if ".lora_A." in name:
                b = weights[name.replace(".lora_A.", ".lora_B.")]
                path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                reference.model.get_submodule(path).weight += ALPHA / RANK * (b @ a)
    return reference


@pytest.fixture(scope="module")
def adapted(tiny_folder: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(
            "INSPECT_LENS_SITES", "attn_out,resid_mid,z,mlp_hidden,mlp_out,resid_post"
        )
        # vLLM's LoRA kernels for CPUs read the slot -1 for a request without an adapter, which
        # is the last one: it has to stay empty, or base requests get its adapter.
        made = start(
            tiny_folder,
            in_process=True,
            enforce_eager=True,
            enable_lora=True,
            max_lora_rank=RANK,
            max_loras=2,
        )
    yield made
    made.close()


def run(engine: Engine, adapter: Path, prompts: list[list[int]], request: dict[str, Any]) -> Any:
    """Every second request uses the adapter."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    params = SamplingParams(
        max_tokens=8, temperature=0, ignore_eos=True, detokenize=False, extra_args=request
    )
    lora = LoRARequest("adapter", 1, str(adapter))
    return engine.llm.generate(
        [{"prompt_token_ids": p} for p in prompts],
        params,
        lora_request=[lora if i % 2 else None for i in range(len(prompts))],
        use_tqdm=False,
    )


def test_rows_are_those_of_each_requests_own_weights(
    adapted: Engine, adapter: Path, hugging_face: HuggingFace, merged: HuggingFace
) -> None:
    prompt = tokens(60)
    outputs = run(adapted, adapter, [prompt] * 4, ALL)
    for i, output in enumerate(outputs):
        own, other = (merged, hugging_face) if i % 2 else (hugging_face, merged)
        rows = output.activations["residual_stream"]
        assert max_relative_error(rows, own.residual_stream(fed(output))) <= TOLERANCE
        assert max_relative_error(rows, other.residual_stream(fed(output))) > 0.05


def test_modules_under_an_adapter_have_their_sites(
    adapted: Engine, adapter: Path, merged: HuggingFace
) -> None:
    request = {"inspect_lens": {"capture": {"site": list(SITED)}}}
    output = run(adapted, adapter, [tokens(5), tokens(60)], request)[1]
    expected = merged.sites(fed(output)) | merged.inner_sites(fed(output))
    for site in SITED[:-1]:
        assert max_relative_error(output.activations[site], expected[site]) <= TOLERANCE


def test_steering_on_top_of_an_adapter(adapted: Engine, adapter: Path, merged: HuggingFace) -> None:
    v = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(2))
    vector = SteeringVector(activations=v, layer_indices=[1], scale=3.0)
    request = {"apply_steering_vectors": [vector], **ALL}
    output = run(adapted, adapter, [tokens(5), tokens(60)], request)[1]
    expected = merged.residual_stream(fed(output), {1: lambda h: h + 3.0 * v[0]})
    assert max_relative_error(output.activations["residual_stream"], expected) <= TOLERANCE
