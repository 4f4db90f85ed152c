"""Low-rank adapters of a Llama's linear layers, saved in the format of the library `peft`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

__all__ = ["CONFIG", "LoraLinear", "add_lora", "load_lora", "merge_lora", "save_lora"]

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
TARGETS: Final = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
)  # fmt: skip


class LoraLinear(nn.Module):
    """A frozen linear layer plus `scale · B A`, where A and B are float32 and trained."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base = base
        self.scale = scale
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=5**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output with what the adapter adds, in the dtype of `x`."""
        low = functional.linear(x, self.lora_a.to(x.dtype))
        added = functional.linear(low, self.lora_b.to(x.dtype))
        return cast("torch.Tensor", self.base(x)) + self.scale * added


def add_lora(model: Any, *, rank: int, alpha: float, first_layer: int = 0) -> list[nn.Parameter]:
    """Freeze a model and put an adapter on the linear layers of its blocks.

    Args:
        model: A `LlamaForCausalLM` or another model with the same names.
        rank: Of A and B.
        alpha: The adapter counts `alpha / rank` times.
        first_layer: Blocks before this one stay as they are, and need no gradient.

    Returns:
        The parameters to train. A new adapter changes nothing, since B is zero.
    """
    model.requires_grad_(False)
    made: list[nn.Parameter] = []
    for block in model.model.layers[first_layer:]:
        for parent in (block.self_attn, block.mlp):
            for name in TARGETS:
                linear = getattr(parent, name, None)
                if linear is not None:
                    lora = LoraLinear(linear, rank, alpha / rank)
                    setattr(parent, name, lora)
                    made += [lora.lora_a, lora.lora_b]
    return made


def _loras(model: Any) -> Iterator[tuple[str, LoraLinear]]:
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def save_lora(model: Any, folder: Path, *, base: str) -> None:
    """Write the adapter of a model in bfloat16, as `peft` and vLLM read it.

    Args:
        model: What `add_lora` or `load_lora` changed.
        folder: Where to.
        base: The name of the base model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights: dict[str, torch.Tensor] = {}
    blocks: set[int] = set()
    for name, lora in _loras(model):
        rank, scale = lora.lora_a.shape[0], lora.scale
        blocks.add(int(name.split(".")[2]))
        for part, value in (("A", lora.lora_a), ("B", lora.lora_b)):
            key = f"base_model.model.{name}.lora_{part}.weight"
            weights[key] = value.detach().to("cpu", torch.bfloat16).contiguous()
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)  # safetensors makes it private
    config = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "layers_to_transform": sorted(blocks),
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": list(TARGETS),
        "task_type": "CAUSAL_LM",
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def load_lora(model: Any, folder: Path) -> list[nn.Parameter]:
    """Put a saved adapter on a model; returns its parameters, as `add_lora` does."""
    config = json.loads((folder / CONFIG).read_text())
    made = add_lora(
        model,
        rank=config["r"],
        alpha=config["lora_alpha"],
        first_layer=min(config["layers_to_transform"]),
    )
    weights = load_file(folder / WEIGHTS)
    with torch.no_grad():
        for name, lora in _loras(model):
            lora.lora_a.copy_(weights.pop(f"base_model.model.{name}.lora_A.weight"))
            lora.lora_b.copy_(weights.pop(f"base_model.model.{name}.lora_B.weight"))
    if weights:
        raise ValueError(f"{folder / WEIGHTS} has weights of no layer here: {sorted(weights)[:3]}")
    return made


def merge_lora(model: Any) -> None:
    """Add each adapter to its layer's weight, put the plain layer back, and thaw the model."""
    for name, lora in list(_loras(model)):
        with torch.no_grad():
            delta = lora.scale * (lora.lora_b @ lora.lora_a)
            lora.base.weight.add_(delta.to(lora.base.weight.dtype))
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, lora.base)
    # `matmul` copies a frozen head's matrix for each row of a batch; one that may train it reads.
    model.requires_grad_(True)
