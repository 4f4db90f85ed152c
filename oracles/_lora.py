"""Low-rank adapters in plain torch, and the folder in which PEFT and vLLM expect one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

__all__ = ["TARGETS", "LoRA", "inject"]

TARGETS: Final = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
"""All linear modules of a block."""


class LoRA(torch.nn.Module):
    """`W + alpha / rank * B A` for every target; the model's own weights stay as they are."""

    def __init__(self, model: LlamaForCausalLM, *, rank: int, alpha: int) -> None:
        """Make an adapter that changes nothing yet.

        Args:
            model: whose blocks are adapted.
            rank: of each update.
            alpha: its scale is alpha / rank.
        """
        super().__init__()
        self.rank, self.alpha = rank, alpha
        self.paths: list[str] = []
        self.a, self.b = torch.nn.ParameterList(), torch.nn.ParameterList()
        self._base: list[torch.Tensor] = []
        for path, module in model.named_modules():
            if path.rpartition(".")[2] in TARGETS and isinstance(module, torch.nn.Linear):
                out, width = module.weight.shape
                self.paths.append(path)
                self._base.append(module.weight)
                device = module.weight.device
                a = torch.randn(rank, width, device=device) / width**0.5
                self.a.append(torch.nn.Parameter(a))
                self.b.append(torch.nn.Parameter(torch.zeros(out, rank, device=device)))

    def merged(self) -> dict[str, torch.Tensor]:
        """The adapted weights by parameter name, through which gradients reach A and B."""
        scale = self.alpha / self.rank
        return {
            f"{path}.weight": w + scale * (b @ a)
            for path, w, a, b in zip(self.paths, self._base, self.a, self.b, strict=True)
        }

    @torch.no_grad()
    def round_(self, dtype: torch.dtype) -> None:
        """Round A and B as they are stored, so that what is measured is what is shipped."""
        for p in self.parameters():
            p.copy_(p.to(dtype).float())

    def save(self, folder: Path, *, base: str, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write `adapter_config.json` and `adapter_model.safetensors`.

        Args:
            folder: an existing folder.
            base: name of the base model.
            dtype: of the stored weights.
        """
        weights = {}
        for path, a, b in zip(self.paths, self.a, self.b, strict=True):
            for part, p in (("A", a), ("B", b)):
                name = f"base_model.model.{path}.lora_{part}.weight"
                weights[name] = p.detach().to("cpu", dtype).contiguous()
        file = folder / "adapter_model.safetensors"
        save_file(weights, file, metadata={"format": "pt"})
        file.chmod(0o644)  # safetensors makes it private
        config: dict[str, Any] = {
            "base_model_name_or_path": base,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "modules_to_save": None,
            "peft_type": "LORA",
            "r": self.rank,
            "target_modules": list(TARGETS),
            "task_type": "CAUSAL_LM",
            "use_dora": False,
            "use_rslora": False,
        }
        text = json.dumps(config, indent=2) + "\n"
        (folder / "adapter_config.json").write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, model: LlamaForCausalLM, folder: Path) -> LoRA:
        """Read what `save` wrote.

        Args:
            model: the base model.
            folder: of the adapter.

        Returns:
            The adapter.
        """
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        made = cls(model, rank=config["r"], alpha=config["lora_alpha"])
        weights: Mapping[str, torch.Tensor] = load_file(folder / "adapter_model.safetensors")
        with torch.no_grad():
            for path, a, b in zip(made.paths, made.a, made.b, strict=True):
                a.copy_(weights[f"base_model.model.{path}.lora_A.weight"])
                b.copy_(weights[f"base_model.model.{path}.lora_B.weight"])
        return made


@contextmanager
def inject(
    model: LlamaForCausalLM, layer: int, units: torch.Tensor, *, coefficient: float = 1.0
) -> Iterator[None]:
    """Add `coefficient * ||h|| * u` to the output of a block while the context lasts.

    Args:
        model: the model.
        layer: index of the block.
        units: (rows, tokens, hidden) unit vectors, zero where nothing is added.
        coefficient: strength.
    """

    def hook(module: torch.nn.Module, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        # The published hook gives no gradient through the norm.
        norm = hidden.detach().norm(dim=-1, keepdim=True)
        added = hidden + coefficient * norm * units[:, : hidden.shape[1]].to(hidden.dtype)
        return (added, *output[1:]) if isinstance(output, tuple) else added

    handle = model.model.layers[layer].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
