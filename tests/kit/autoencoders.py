"""Sparse autoencoders by their definition in torch, and the files that SAELens and Google write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

__all__ = ["Definition", "H", "N", "write_gemma_1", "write_gemma_2", "write_saelens"]

H, N = 24, 60


class Definition(torch.nn.Module):
    """An SAE as SAELens and Gemma Scope define its features, in torch."""

    def __init__(
        self,
        kind: str,
        *,
        subtract: bool,
        k: int = 5,
        scale: float = 1.0,
        width: int = H,
        latents: int = N,
    ) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.kind, self.subtract, self.k, self.scale = kind, subtract, k, scale
        self.rescaled = False
        self.factor: torch.Tensor | None = None
        self.w_enc = torch.randn(width, latents, generator=rng)
        self.w_dec = torch.randn(latents, width, generator=rng)
        self.b_enc = torch.randn(latents, generator=rng)
        self.b_dec = torch.randn(width, generator=rng)
        self.threshold = torch.rand(latents, generator=rng) * 6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale - self.subtract * self.b_dec
        pre = x @ self.w_enc + self.b_enc
        if self.kind == "jumprelu":
            return torch.relu(pre) * (pre > self.threshold)
        if self.rescaled:
            pre = pre * self.w_dec.norm(dim=1)
        if self.kind == "topk":
            best = torch.topk(pre, self.k, dim=-1)
            return torch.zeros_like(pre).scatter_(-1, best.indices, torch.relu(best.values))
        return torch.relu(pre)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        norms = self.w_dec.norm(dim=1) if self.rescaled else 1.0
        latents = latents if self.factor is None else latents * self.factor
        return (latents / norms @ self.w_dec + self.b_dec) / self.scale

    def tensors(self, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        made = {"W_enc": self.w_enc, "W_dec": self.w_dec, "b_enc": self.b_enc, "b_dec": self.b_dec}
        if self.kind == "jumprelu":
            made["threshold"] = self.threshold
        if self.factor is not None:
            made["finetuning_scaling_factor"] = self.factor
        return {key: value.to(dtype) for key, value in made.items()}


def write_saelens(folder: Path, sae: Definition, **facts: Any) -> Path:
    """What `SAE.save_model` of SAELens 6 writes."""
    meta = {"hook_name": "blocks.9.hook_resid_post", "model_name": "made-up"}
    known = {
        "architecture": sae.kind, "d_in": len(sae.b_dec), "d_sae": len(sae.b_enc),
        "dtype": "float32", "device": "cpu",
        "apply_b_dec_to_input": sae.subtract, "normalize_activations": "none",
        "reshape_activations": "none", "metadata": meta,
    }  # fmt: skip
    if sae.kind == "topk":
        known["k"] = sae.k
    save_file(sae.tensors(), folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps(known | facts))
    return folder


def write_gemma_1(folder: Path, sae: Definition) -> Path:
    arrays: dict[str, Any] = {k: v.numpy() for k, v in sae.tensors().items()}
    np.savez(folder / "params.npz", **arrays)
    return folder / "params.npz"


def write_gemma_2(folder: Path, sae: Definition) -> Path:
    save_file({k.lower(): v for k, v in sae.tensors().items()}, folder / "params.safetensors")
    facts = {"architecture": "jump_relu", "hf_hook_point_in": "model.layers.9.output"}
    (folder / "config.json").write_text(json.dumps(facts))
    return folder
