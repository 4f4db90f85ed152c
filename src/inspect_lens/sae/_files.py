"""Sparse autoencoders from the files that people have: SAELens and Gemma Scope."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import deserialize

from inspect_lens._base.arguments import judged_arguments
from inspect_lens._base.untrusted import parse_json, parsing, read_npz, read_regular
from inspect_lens.errors import ArtifactError
from inspect_lens.spec import TensorData

from ._encoder import SparseAutoencoder, SparseEncoder

__all__ = ["read_autoencoder", "read_sae"]

Floats = NDArray[np.float32]
_DTYPES: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_SAELENS: Final = ("sae_weights.safetensors", "cfg.json")
_KINDS: Final = {
    "standard": "relu", "jumprelu": "jumprelu", "batchtopk": "jumprelu",
    "matryoshka_batchtopk": "jumprelu", "topk": "topk",
}  # fmt: skip
"""Batch-top-k encoders are saved for use with the threshold that they had on average."""
_NORM_BEHIND: Final = re.compile(r"gemma-?[234]|olmo-?[23]", re.IGNORECASE)
"""Models with a norm between a module and the stream, behind which TransformerLens has its hook."""
_GEMMA_OTHERS: Final = re.compile(r"gemma-scope-[\w.]+-(?:pt|it)-(?:att|mlp|transcoders)")
"""Repositories of Gemma Scope that read no residual stream; their files do not say so."""


@judged_arguments
def read_sae(path: str | Path, *, norm_scale: float | None = None) -> SparseEncoder:
    """Read the encoder of a sparse autoencoder.

    Args:
        path: a folder of SAELens (`cfg.json`, `sae_weights.safetensors`) of the architectures
            standard, jumprelu, topk and batchtopk; of Gemma Scope (`params.npz`) or Gemma Scope 2
            (`params.safetensors`); or one of these files of Gemma Scope.
        norm_scale: what activations are multiplied by before the encoder, for an SAE of SAELens
            with `normalize_activations: expected_average_only_in`; it is folded into the weights.

    Returns:
        The encoder, float32; its `place` is where it reads, as the file says.

    Raises:
        ArtifactError: a file is missing or damaged, or the SAE computes something else: another
            architecture, or a normalisation of each row.

    Example:
        ```python
        import numpy as np

        from inspect_lens.sae import read_sae

        rng = np.random.default_rng(0)
        w, b = rng.standard_normal((32, 64)), np.zeros(64)
        np.savez("params.npz", W_enc=w, b_enc=b, threshold=b + 0.5)  # as Gemma Scope has it
        encoder = read_sae("params.npz")
        assert encoder.weight.shape == (64, 32)
        ```
    """
    return SparseEncoder(**_read(path, norm_scale, decoder=False).encoder(Path(path)))


@judged_arguments
def read_autoencoder(path: str | Path, *, norm_scale: float | None = None) -> SparseAutoencoder:
    """Read encoder and decoder of a sparse autoencoder as float32, to edit latents.

    Args:
        path: as in `read_sae`.
        norm_scale: as in `read_sae`; it is taken back out of the decoder, whose output is then in
            the units of the stream.

    Raises:
        ArtifactError: as in `read_sae`, or the file has no decoder.

    Example:
        ```python
        import numpy as np

        from inspect_lens.sae import read_autoencoder

        rng = np.random.default_rng(0)
        w, b = rng.standard_normal((32, 64)), np.zeros(64)
        np.savez("params.npz", W_enc=w, b_enc=b, threshold=b + 0.5, W_dec=w.T, b_dec=np.zeros(32))
        sae = read_autoencoder("params.npz")
        edit = sae.latents({17: 10.0}, layers=[4])
        assert edit.threshold.to_float32() == [0.5]
        ```
    """
    return _read(path, norm_scale, decoder=True).autoencoder(Path(path))


class _Parts(NamedTuple):
    """What files say, before shapes are checked; weights (hidden, features), wide."""

    weight: NDArray[Any]
    bias: NDArray[Any]
    threshold: NDArray[Any] | None
    top_k: int
    hook: str
    decoder: NDArray[Any] | None
    """(features, hidden); None where it was not asked for."""
    decoder_bias: NDArray[Any] | None

    def autoencoder(self, where: Path) -> SparseAutoencoder:
        assert self.decoder is not None  # or it was not asked for
        assert self.decoder_bias is not None
        hidden, n = self.weight.shape
        if self.decoder.shape != (n, hidden) or self.decoder_bias.shape != (hidden,):
            raise ArtifactError(
                f"{where}: decoder {self.decoder.shape} with bias {self.decoder_bias.shape} for an "
                f"encoder {self.weight.shape}; allowed are {(n, hidden)} and {(hidden,)}"
            )
        return SparseAutoencoder(
            **self.encoder(where),
            decoder=np.ascontiguousarray(self.decoder, dtype=np.float32),
            decoder_bias=self.decoder_bias.astype(np.float32),
        )

    def encoder(self, where: Path) -> dict[str, Any]:
        """Its fields, checked; files have (hidden, features)."""
        n = self.weight.shape[-1]
        shapes = [self.bias.shape] + ([] if self.threshold is None else [self.threshold.shape])
        if self.weight.ndim != 2 or any(s != (n,) for s in shapes) or self.top_k > n:
            raise ArtifactError(
                f"{where}: encoder {self.weight.shape} with {shapes} and k={self.top_k}; allowed "
                "are (hidden, features), one bias and one threshold for each feature, and no "
                "larger k"
            )
        return {
            "weight": np.ascontiguousarray(self.weight.T, dtype=np.float32),
            "bias": self.bias.astype(np.float32),
            "threshold": None if self.threshold is None else self.threshold.astype(np.float32),
            "top_k": self.top_k,
            "hook": self.hook,
        }


def _read(path: str | Path, norm_scale: float | None, *, decoder: bool) -> _Parts:
    where = Path(path).expanduser()
    needed = (
        "needed are cfg.json and sae_weights.safetensors of SAELens, or params.npz or "
        "params.safetensors of Gemma Scope"
    )
    with parsing(where, "an SAE", needed, unread=needed):
        file = where
        if where.is_dir():
            names = (_SAELENS[0], "params.safetensors", "params.npz")
            file = next((where / n for n in names if (where / n).exists()), where / names[0])
        if file.name == _SAELENS[0]:
            facts = parse_json(read_regular(file.parent / _SAELENS[1]))
            return _read_saelens(_load(file), facts, where, norm_scale, decoder=decoder)
        made = _read_gemma(_load(file), file, where, decoder=decoder)
    if norm_scale is not None:
        raise ArtifactError(
            f"{where}: norm_scale={norm_scale:g}, and Gemma Scope reads activations as they are; "
            "leave it out"
        )
    return made


def _load(file: Path) -> dict[str, Floats]:
    """Tensors of floats by name, bfloat16 widened."""
    if file.suffix == ".npz":
        return read_npz(file)
    # The numpy front-end of safetensors knows no bfloat16.
    return {
        name: _widen(part["dtype"], part["data"]).reshape(part["shape"])
        for name, part in deserialize(read_regular(file))  # type: ignore[no-untyped-call]
        if part["dtype"] in _DTYPES or part["dtype"] == "BF16"
    }


def _widen(dtype: str, data: bytes) -> Floats:
    if dtype == "BF16":
        return TensorData(np.frombuffer(data, "<u2"), "bfloat16").to_float32()
    return np.frombuffer(data, _DTYPES[dtype]).astype(np.float32, copy=False)


def _read_gemma(tensors: Mapping[str, Floats], file: Path, where: Path, *, decoder: bool) -> _Parts:
    """Version 1 has upper-case names and no configuration, version 2 lower-case names."""
    lower = {key.lower(): value for key, value in tensors.items()}
    beside = file.with_name("config.json")
    facts = parse_json(read_regular(beside)) if beside.exists() else {}
    kind = facts.get("architecture", "jump_relu")
    if kind != "jump_relu":
        raise ArtifactError(f"{where}: architecture {kind!r}; allowed of Gemma Scope is jump_relu")
    hook, written = (str(facts.get(f"hf_hook_point_{end}") or "") for end in ("in", "out"))
    if not facts and (named := _GEMMA_OTHERS.search(str(where.absolute()))) is not None:
        hook = named[0]
    if decoder and written not in ("", hook):
        raise ArtifactError(
            f"{where}: reads {hook} and writes {written}; allowed are autoencoders, which write "
            "where they read"
        )
    return _Parts(
        lower["w_enc"], lower["b_enc"], lower["threshold"], 0, hook,
        lower["w_dec"] if decoder else None, lower["b_dec"] if decoder else None,
    )  # fmt: skip


def _read_saelens(
    tensors: Mapping[str, Floats],
    facts: Mapping[str, Any],
    where: Path,
    norm_scale: float | None,
    *,
    decoder: bool,
) -> _Parts:
    kind, top_k = _activation(facts, where)
    reshaped = facts.get("reshape_activations") or "none"
    # Heads one behind the other are our site z.
    if reshaped not in ("none", "hook_z") or facts.get("hook_head_index") is not None:
        raise ArtifactError(
            f"{where}: reads one attention head (hook_head_index "
            f"{facts.get('hook_head_index')}, reshape_activations {reshaped!r}); allowed are whole "
            "rows of a site; choose an SAE of hook_z or of the residual stream"
        )
    weight, bias = tensors["W_enc"].astype(np.float64), tensors["b_enc"].astype(np.float64)
    scale = _norm_scale(facts, where, norm_scale)
    weight = weight * scale
    if facts.get("apply_b_dec_to_input", True):
        # What is subtracted lies behind the scale.
        bias = bias - tensors["b_dec"].astype(np.float64) @ tensors["W_enc"].astype(np.float64)
    threshold = tensors["threshold"].astype(np.float64) if kind == "jumprelu" else None
    norms: NDArray[np.float64] | float = 1.0
    if facts.get("rescale_acts_by_decoder_norm"):
        norms = np.linalg.norm(tensors["W_dec"].astype(np.float64), axis=1)
        weight, bias = weight * norms, bias * norms
    meta = facts.get("metadata") or facts.get("meta") or {}
    hook = str(meta.get("hook_name") or facts.get("hook_name") or "")
    model = str(meta.get("model_name") or facts.get("model_name") or "")
    if _NORM_BEHIND.search(model) and hook.endswith(("attn_out", "mlp_out")):
        hook = f"{hook} behind its norm in {model}"
    made = _Parts(weight, bias, threshold, top_k, hook, None, None)
    if not decoder:
        return made
    # Its output is in the units that the encoder reads, those of the stream times the scale.
    back = tensors["W_dec"].astype(np.float64) / np.reshape(norms, (-1, 1)) / scale
    back *= _finetuned(tensors, facts, where)[:, None]
    return made._replace(decoder=back, decoder_bias=tensors["b_dec"].astype(np.float64) / scale)


def _finetuned(
    tensors: Mapping[str, Floats], facts: Mapping[str, Any], where: Path
) -> NDArray[np.float64]:
    """Factor of each latent in front of the decoder; SAELens called it `scaling_factor` first."""
    names = ("finetuning_scaling_factor", "scaling_factor")
    found = next((tensors[name] for name in names if name in tensors), None)
    asked = bool(facts.get("finetuning_scaling_factor"))
    n = len(tensors["W_dec"])
    if found is None:
        fits = not asked
    else:
        fits = found.shape == (n,) and (asked or bool((found == 1).all()))
    if not fits:
        shape = "none" if found is None else f"one of shape {found.shape}"
        raise ArtifactError(
            f"{where}: finetuning_scaling_factor {asked} in cfg.json, {shape} among the tensors; "
            "allowed is one factor per latent where it is true; restore the files"
        )
    return np.ones(n) if found is None else found.astype(np.float64)


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
