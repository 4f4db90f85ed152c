"""Facts of a small engine, for tests that judge requests without one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from inspect_lens.spec import EngineFacts, Site, tap_points

__all__ = ["engine_facts"]


def engine_facts(
    *,
    n_layers: int = 4,
    layers: Iterable[int] | None = None,
    sites: tuple[Site, ...] = ("resid_post",),
    **others: Any,
) -> EngineFacts:
    """Facts of an engine that has a tap at each of its sites in each of its layers."""
    served = tuple(range(n_layers) if layers is None else layers)
    usual = {
        "model": "m", "hidden": 8, "dtype": "float32", "max_step_tokens": 16, "ring_rows": 64,
        "bank_rows": 8, "vllm_version": "0", "taps": tap_points(sites, served),
    }  # fmt: skip
    return EngineFacts(n_layers=n_layers, layers=served, sites=sites, **usual | others)  # type: ignore[arg-type]
