"""Which modules have weights as the checkpoint has them, by the methods of vLLM that use them."""

from __future__ import annotations

from typing import Any

_LAYERS = "vllm.model_executor.layers"
PLAIN = (
    f"{_LAYERS}.linear:UnquantizedLinearMethod",
    f"{_LAYERS}.vocab_parallel_embedding:UnquantizedEmbeddingMethod",
    f"{_LAYERS}.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
    # Attention has one, too, for scales of its cache.
    f"{_LAYERS}.quantization.kv_cache:BaseKVCacheMethod",
)
"""Methods that pack nothing, and what derives from them, such as kernels for routers."""
PLAIN_IN_ONE_MODEL = (
    "vllm.models.qwen4_exp.common.ngram_embedding:Qwen4ExpPLEUnquantizedEmbeddingMethod",
)
"""The same, of what a release may lack."""


def packed_by(module: Any) -> str | None:
    """The method that has packed a module's weights; None where they are as in the checkpoint."""
    method = getattr(getattr(module, "base_layer", module), "quant_method", None)
    # That of experts may be wrapped.
    method = getattr(method, "old_quant_method", method)
    # By name: to import them takes a second where a model has no experts.
    kinds = (f"{kind.__module__}:{kind.__qualname__}" for kind in type(method).__mro__)
    is_plain = method is None or not {*PLAIN, *PLAIN_IN_ONE_MODEL}.isdisjoint(kinds)
    return None if is_plain else type(method).__name__
