"""Tiny random checkpoints in the formats in which quantised weights are published.

Beside each lies what its weights mean: the same model in plain numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .architectures import CASES, Case
from .architectures import write as write_case
from .tiny_models import tiny_llama

__all__ = ["HIDDEN", "LAYERS", "METHODS", "Method", "case_of", "write"]

HIDDEN, LAYERS, GROUP = 256, 4, 128
"""As kernels ask for: widths in whole groups, and in whole blocks of 128."""
FP8 = torch.float8_e4m3fn
_FP8_MAX = float(torch.finfo(FP8).max)

Tensors = dict[str, torch.Tensor]
Quantise = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""From (outputs, inputs) to tensors by the last part of their names, and to what they mean."""


@dataclass(frozen=True)
class Method:
    """One way of quantising."""

    name: str
    title: str
    recorded: str | None
    """What cards and logs call it: vLLM's name."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """`quantization_config` of the checkpoint."""
    quantise: Quantise | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Engine options."""
    kv_cache: str | None = None
    """What cards and logs say of the KV cache's dtype."""
    is_weight_only: bool = True
    """Whether nothing else is rounded, so that plain numbers tell what the engine computes."""
    case: str = "llama"
    """Name of the architecture; of gpt-oss, weights of experts alone are quantised."""
    quantises_head: bool = False
    not_on_cpu: str = ""
    """Why vLLM for CPUs cannot run it here."""

    @property
    def is_routed(self) -> bool:
        """Whether tokens choose experts."""
        return self.case == "gpt_oss"


def write(method: Method, folder: Path) -> tuple[Path, Path]:
    """Write a checkpoint, and beside it what its weights mean.

    Args:
        method: how weights are quantised.
        folder: where both folders go.

    Returns:
        The folder that is served, and that of the plain numbers, in float32.
    """
    served, plain = folder / "served", folder / "plain"
    if method.is_routed:
        write_case(case_of(method), plain, torch.bfloat16, hidden=HIDDEN)
    else:
        tiny_llama(plain, layers=LAYERS, hidden=HIDDEN, dtype=torch.bfloat16)
    weights = load_file(plain / "model.safetensors")
    quantised, meant = {}, {}
    for name, value in weights.items():
        tensors = None
        if method.is_routed:
            tensors = _experts(name, value)
        elif method.quantise and (
            name.endswith("_proj.weight") or (method.quantises_head and name == "lm_head.weight")
        ):
            made, exact = method.quantise(value.float())
            tensors = {f"{name.removesuffix('weight')}{k}": v for k, v in made.items()}, exact
        if tensors is None:
            quantised[name], meant[name] = value, value.float()
        else:
            quantised |= tensors[0]
            meant[name] = tensors[1]
    served.mkdir()
    config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    (plain / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    if method.config:
        config["quantization_config"] = dict(method.config)
    (served / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    for where, content in ((served, quantised), (plain, meant)):
        content = {name: value.contiguous() for name, value in content.items()}
        save_file(content, where / "model.safetensors", metadata={"format": "pt"})
    return served, plain


def case_of(method: Method) -> Case:
    """The architecture of a method's model."""
    return next(case for case in CASES if case.name == method.case)


def _groups(values: torch.Tensor, size: int) -> torch.Tensor:
    """Of the last dimension."""
    return values.reshape(*values.shape[:-1], -1, size)


def _packed(numbers: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Any:
    """Eight numbers of 4 bits in an int32, along a dimension; number i at the place `order[i]`."""
    parts = _groups(numbers.to(torch.int64).movedim(dim, -1), 8)
    shifts = 4 * torch.tensor(order)
    return (parts << shifts).sum(-1).to(torch.uint32).view(torch.int32).movedim(-1, dim)


def _four_bits(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers from -8 to 7, (outputs, groups, GROUP), and scales, (outputs, groups, 1)."""
    grouped = _groups(weight, GROUP)
    # Exact in bfloat16, for which an engine may round them.
    scales = (grouped.abs().amax(-1, keepdim=True) / 7).bfloat16().to(dtype)
    return (grouped / scales.float()).round().clamp(-8, 7), scales


def _gptq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers, scales = _four_bits(weight, torch.float16)
    n, k = weight.shape
    tensors = {
        "qweight": _packed(numbers.flatten(1).T + 8, 0),
        # One less than the zero point, as AutoGPTQ writes it.
        "qzeros": _packed(torch.full((k // GROUP, n), 7), 1),
        "scales": scales[..., 0].T,
        "g_idx": torch.arange(k, dtype=torch.int32) // GROUP,
    }
    return tensors, (numbers * scales.float()).flatten(1)


def _awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    grouped = _groups(weight, GROUP)
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    scales = ((high - low) / 15).bfloat16().half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    numbers = (grouped / scales.float() + zeros).round().clamp(0, 15)
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    tensors = {
        "qweight": _packed(numbers.flatten(1).T, 1, order),
        "qzeros": _packed(zeros[..., 0].T, 1, order),
        "scales": scales[..., 0].T,
    }
    return tensors, ((numbers - zeros) * scales.float()).flatten(1)


def _w4a16(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers, scales = _four_bits(weight, torch.bfloat16)
    tensors = {
        "weight_packed": _packed(numbers.flatten(1) + 8, 1),
        "weight_scale": scales[..., 0],
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors, (numbers * scales.float()).flatten(1)


def _int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    numbers = (weight / scales).round().clamp(-127, 127)
    return {"weight": numbers.to(torch.int8), "weight_scale": scales}, numbers * scales


def _fp8(weight: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights by their scales, and what they mean."""
    numbers = (weight / scales).clamp(-_FP8_MAX, _FP8_MAX).to(FP8)
    return numbers, numbers.float() * scales


def _fp8_channel(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / _FP8_MAX
    numbers, meant = _fp8(weight, scales)
    return {"weight": numbers, "weight_scale": scales}, meant


def _fp8_tensor(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().amax() / _FP8_MAX
    numbers, meant = _fp8(weight, scale)
    # What goes into a module of these models is below 32.
    given = torch.tensor([32 / _FP8_MAX])
    return {"weight": numbers, "weight_scale": scale[None], "input_scale": given}, meant


def _fp8_block(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    blocks = weight.reshape(-1, GROUP, weight.shape[1] // GROUP, GROUP)
    scales = blocks.abs().amax((1, 3)) / _FP8_MAX
    wide = scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    numbers, meant = _fp8(weight, wide)
    return {"weight": numbers, "weight_scale_inv": scales}, meant


_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _experts(name: str, value: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
    """MXFP4: 32 numbers of 4 bits with one power of two; None for what is not of experts."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return None
    # Published with the inputs last, and kept by transformers with the outputs last.
    grouped = _groups(value.float().mT, 32)
    powers = (grouped.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    scaled = grouped / powers.exp2()
    sizes = (scaled.abs()[..., None] - _FP4).abs().argmin(-1)
    meant = (_FP4[sizes] * scaled.sign() * powers.exp2()).flatten(-2).mT
    codes = sizes + 8 * (scaled < 0)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    scales = (powers[..., 0] + 127).to(torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, meant


def _compressed(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> Any:
    """As `llm-compressor` writes it."""
    common = {"symmetric": True, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": common | weights,
        "input_activations": inputs and common | inputs,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "sym": True,
    "desc_act": False,
}
_EIGHT_BITS = {"num_bits": 8, "strategy": "channel"}
_BY_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}

METHODS = (
    Method("gptq", "GPTQ, 4 bits in groups of 128", "auto_gptq", _GPTQ, _gptq),
    Method(
        "gptq_head",
        "GPTQ, with the output matrix",
        "auto_gptq",
        _GPTQ | {"lm_head": True},
        _gptq,
        quantises_head=True,
    ),
    Method(
        "awq",
        "AWQ, 4 bits in groups of 128 with zero points",
        "auto_awq",
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
        },
        _awq,
    ),
    Method(
        "w4a16",
        "compressed-tensors W4A16, 4 bits in groups of 128",
        "compressed-tensors",
        _compressed(
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP},
            None,
        ),
        _w4a16,
    ),
    Method(
        "w8a8",
        "compressed-tensors W8A8, int8 by channel and token",
        "compressed-tensors",
        _compressed("int-quantized", _EIGHT_BITS | {"type": "int"}, _BY_TOKEN | {"type": "int"}),
        _int8,
        is_weight_only=False,
    ),
    Method(
        "fp8",
        "compressed-tensors FP8, by channel and token",
        "compressed-tensors",
        _compressed(
            "float-quantized", _EIGHT_BITS | {"type": "float"}, _BY_TOKEN | {"type": "float"}
        ),
        _fp8_channel,
        is_weight_only=False,
    ),
    Method(
        "fp8_static",
        "FP8 with one scale for a matrix and one for what it gets",
        "fp8",
        {"quant_method": "fp8", "activation_scheme": "static"},
        _fp8_tensor,
        is_weight_only=False,
        not_on_cpu="vLLM has no kernel that quantises to FP8",
    ),
    Method(
        "fp8_block",
        "FP8 in blocks of 128 by 128, as DeepSeek and Qwen3",
        "fp8",
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [GROUP, GROUP],
        },
        _fp8_block,
        is_weight_only=False,
        not_on_cpu="vLLM's kernel needs AMX",
    ),
    Method(
        "mxfp4",
        "MXFP4, experts of gpt-oss",
        "gpt_oss_mxfp4",
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
        case="gpt_oss",
        not_on_cpu="vLLM's kernel needs AMX",
    ),
    Method(
        "online_fp8",
        '`quantization="fp8"` of a plain checkpoint',
        "fp8",
        options={"quantization": "fp8"},
        is_weight_only=False,
        not_on_cpu="vLLM has no kernel that quantises to FP8",
    ),
    Method(
        "kv_fp8",
        '`kv_cache_dtype="fp8"` of a plain checkpoint',
        None,
        options={"kv_cache_dtype": "fp8"},
        kv_cache="fp8",
        is_weight_only=False,
    ),
)
