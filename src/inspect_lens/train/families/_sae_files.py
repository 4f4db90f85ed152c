"""Encoders of sparse autoencoders, from the files that people have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file

from inspect_lens.errors import ArtifactError

__all__ = ["SparseEncoder", "read_sae"]

Floats = NDArray[np.float32]
_SAELENS: Final = ("sae_weights.safetensors", "cfg.json")
_KINDS: Final = {
    "standard": "relu", "jumprelu": "jumprelu", "batchtopk": "jumprelu",
    "matryoshka_batchtopk": "jumprelu", "topk": "topk",
}  # fmt: skip
"""Batch-top-k encoders are saved for use with the threshold that they had on average."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SparseEncoder:
    """What makes features of activations: an encoder, and when a feature counts.

    A feature is `relu(weight · x + bias)`; 0 where that is not above its `threshold` (JumpReLU),
    or where it is not among the `top_k` largest of its token (TopK).
    """

    weight: Floats
    """(features, hidden)."""
    bias: Floats
    """(features,), with what is subtracted from the input folded in."""
    threshold: Floats | None = None
    """(features,) of a JumpReLU."""
    top_k: int = 0
    """Features that a token keeps; 0 keeps all that are positive."""
    hook: str = ""
    """Where it reads, as its file says: `blocks.9.hook_resid_post` and `model.layers.9.output` are
    our layer 9, and `blocks.9.hook_resid_pre` is layer 8."""


def read_sae(path: str | Path, *, norm_scale: float | None = None) -> SparseEncoder:
    """Read the encoder of a sparse autoencoder.

    Args:
        path: a folder of SAELens (`cfg.json`, `sae_weights.safetensors`) of the architectures
            standard, jumprelu, topk and batchtopk; of Gemma Scope (`params.npz`) or Gemma Scope 2
            (`params.safetensors`); or one of these files of Gemma Scope.
        norm_scale: what activations are multiplied by before the encoder, for an SAE of SAELens
            with `normalize_activations: expected_average_only_in`; it is folded into the weights.

    Returns:
        The encoder, float32.

    Raises:
        ArtifactError: a file is missing or damaged, or the SAE computes something else: another
            architecture, or a normalisation of each row.

    Example:
        ```python
        import numpy as np

        from inspect_lens.train import read_sae

        rng = np.random.default_rng(0)
        w, b = rng.standard_normal((32, 64)), np.zeros(64)
        np.savez("params.npz", W_enc=w, b_enc=b, threshold=b + 0.5)  # as Gemma Scope has it
        encoder = read_sae("params.npz")
        assert encoder.weight.shape == (64, 32)
        ```
    """
    where = Path(path)
    try:
        file = where
        if where.is_dir():
            names = (_SAELENS[0], "params.safetensors", "params.npz")
            file = next((where / n for n in names if (where / n).exists()), where / names[0])
        if file.name == _SAELENS[0]:
            facts = json.loads((file.parent / _SAELENS[1]).read_text(encoding="utf-8"))
            return _read_saelens(_load(file), facts, where, norm_scale)
        made = _read_gemma(_load(file), file, where)
    except ArtifactError:
        raise
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{where}: not an SAE ({type(error).__name__}: {error}); needed are cfg.json and "
            "sae_weights.safetensors of SAELens, or params.npz or params.safetensors of Gemma Scope"
        ) from None
    if norm_scale is not None:
        raise ArtifactError(
            f"{where}: norm_scale={norm_scale:g}, and Gemma Scope reads activations as they are; "
            "leave it out"
        )
    return made


def _load(file: Path) -> dict[str, Floats]:
    """Tensors by name, bfloat16 widened."""
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as arrays:
            return {key: np.asarray(arrays[key], dtype=np.float32) for key in arrays}
    return {key: tensor.float().numpy() for key, tensor in load_file(file).items()}


def _read_gemma(tensors: Mapping[str, Floats], file: Path, where: Path) -> SparseEncoder:
    """Version 1 has upper-case names and no configuration, version 2 lower-case names."""
    lower = {key.lower(): value for key, value in tensors.items()}
    beside = file.with_name("config.json")
    facts = json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {}
    kind = facts.get("architecture", "jump_relu")
    if kind != "jump_relu":
        raise ArtifactError(f"{where}: architecture {kind!r}; allowed of Gemma Scope is jump_relu")
    hook = str(facts.get("hf_hook_point_in", ""))
    return _encoder(lower["w_enc"], lower["b_enc"], where, threshold=lower["threshold"], hook=hook)


def _read_saelens(
    tensors: Mapping[str, Floats], facts: Mapping[str, Any], where: Path, norm_scale: float | None
) -> SparseEncoder:
    kind, top_k = _activation(facts, where)
    reshaped = facts.get("reshape_activations") or "none"
    if reshaped != "none" or facts.get("hook_head_index") is not None:
        raise ArtifactError(
            f"{where}: reads attention heads, not the residual stream; choose an SAE of "
            "hook_resid_post or hook_resid_pre"
        )
    weight, bias = tensors["W_enc"].astype(np.float64), tensors["b_enc"].astype(np.float64)
    weight = weight * _norm_scale(facts, where, norm_scale)
    if facts.get("apply_b_dec_to_input", True):
        # What is subtracted lies behind the scale.
        bias = bias - tensors["b_dec"].astype(np.float64) @ tensors["W_enc"].astype(np.float64)
    threshold = tensors["threshold"].astype(np.float64) if kind == "jumprelu" else None
    if facts.get("rescale_acts_by_decoder_norm"):
        norms = np.linalg.norm(tensors["W_dec"].astype(np.float64), axis=1)
        weight, bias = weight * norms, bias * norms
    meta = facts.get("metadata") or facts.get("meta") or {}
    hook = str(meta.get("hook_name") or facts.get("hook_name") or "")
    return _encoder(weight, bias, where, threshold=threshold, top_k=top_k, hook=hook)


def _activation(facts: Mapping[str, Any], where: Path) -> tuple[str, int]:
    """`relu`, `jumprelu` or `topk`, and how many features are kept."""
    architecture = facts.get("architecture", "standard")
    kind = _KINDS.get(architecture)
    # Older files name the function apart from the architecture.
    named = facts.get("activation_fn_str") or facts.get("activation_fn") or "relu"
    settings = facts.get("activation_fn_kwargs") or {}
    if kind == "relu" and named == "topk":
        kind = "topk"
    if kind is None or named not in ("relu", "topk"):
        raise ArtifactError(
            f"{where}: architecture {architecture!r} with {named!r}; allowed are "
            f"{', '.join(_KINDS)} with relu; choose such an SAE"
        )
    top_k = int(facts.get("k") or settings.get("k") or 0) if kind == "topk" else 0
    if kind == "topk" and top_k < 1:
        raise ArtifactError(f"{where}: a TopK SAE without k; cfg.json has to name it")
    return kind, top_k


def _norm_scale(facts: Mapping[str, Any], where: Path, given: float | None) -> float:
    normalised = facts.get("normalize_activations") or "none"
    if normalised == "expected_average_only_in":
        if given is None or not (np.isfinite(given) and given > 0):
            raise ArtifactError(
                f"{where}: normalize_activations {normalised!r} and norm_scale={given}; allowed is "
                "the factor that its training found for this model and layer; pass norm_scale=, "
                "or fold it with SAELens' fold_activation_norm_scaling_factor and save again"
            )
        return given
    if normalised != "none":
        raise ArtifactError(
            f"{where}: normalize_activations {normalised!r}, which scales each row by its own "
            "norm; allowed are 'none' and 'expected_average_only_in', as a probe reads activations "
            "as they are; choose another SAE"
        )
    if given is not None:
        raise ArtifactError(f"{where}: norm_scale={given:g}, and it normalises nothing; leave it")
    return 1.0


def _encoder(
    weight: NDArray[Any],
    bias: NDArray[Any],
    where: Path,
    *,
    threshold: NDArray[Any] | None = None,
    top_k: int = 0,
    hook: str = "",
) -> SparseEncoder:
    """Check shapes; files have (hidden, features)."""
    n = weight.shape[-1]
    shapes = [bias.shape] + ([] if threshold is None else [threshold.shape])
    if weight.ndim != 2 or any(shape != (n,) for shape in shapes) or top_k > n:
        raise ArtifactError(
            f"{where}: encoder {weight.shape} with {shapes} and k={top_k}; allowed are (hidden, "
            "features), one bias and one threshold for each feature, and no larger k"
        )
    narrow = np.ascontiguousarray(weight.T, dtype=np.float32)
    return SparseEncoder(
        weight=narrow,
        bias=bias.astype(np.float32),
        threshold=None if threshold is None else threshold.astype(np.float32),
        top_k=top_k,
        hook=hook,
    )
