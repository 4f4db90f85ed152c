"""How wide the rows of a site are that are not as wide as the stream, from the configuration.

The worker holds the model's modules against it when the first pass runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inspect_lens.errors import SpecError
from inspect_lens.spec import Site, SiteWidth

__all__ = ["width_of"]

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NEURONS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")


def width_of(site: Site, model: Any, parallel: Any, ranks: int) -> SiteWidth:
    """Work out the width of a site.

    Args:
        site: one that is not as wide as the stream.
        model: vLLM's `ModelConfig`.
        parallel: vLLM's `ParallelConfig`.
        ranks: tensor-parallel ranks.

    Raises:
        SpecError: the model does not have it.
    """
    config = model.hf_text_config
    is_latent = bool(getattr(model, "use_mla", False))
    if site in ("q", "k", "v") and is_latent:
        raise _missing(site, "its attention keeps no keys per head (MLA)")
    if site == "router_logits":
        return SiteWidth(site, _number(site, config, _EXPERTS, "it has no experts"))
    if site == "mlp_hidden":
        return SiteWidth(site, _number(site, config, _NEURONS, "it names no number of them"), ranks)
    size = int(config.v_head_dim if is_latent else model.get_head_size())
    if site in ("k", "v"):
        heads = int(model.get_total_num_kv_heads())
        return SiteWidth(site, heads * size, min(heads, ranks), heads)
    heads = int(model.get_num_attention_heads(parallel)) * ranks
    return SiteWidth(site, heads * size, ranks, heads)


def _number(site: Site, config: Any, names: Sequence[str], why: str) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise _missing(site, why)


def _missing(site: Site, why: str) -> SpecError:
    return SpecError(f"INSPECT_LENS_SITES: this model has no {site}: {why}; leave the site out")
