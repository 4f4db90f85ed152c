"""Several data sets through one engine, which starts once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
from inspect_ai.model import GenerateConfig, get_model

from inspect_lens.collect import collect_async
from inspect_lens.data import ActivationStore, ProbeDataset

__all__ = ["collect_all"]


def collect_all(
    checkpoint: str,
    sets: Mapping[str, ProbeDataset],
    work: str | Path,
    *,
    base_url: str = "",
    max_model_len: int = 1024,
    **options: Any,
) -> dict[str, ActivationStore]:
    """Collect every set into a folder of its name, in float32.

    In float32 every engine says the same; in the checkpoints' bfloat16 a fifth of the answers
    differ in a word from run to run, with what else is in the batch.

    Args:
        checkpoint: folder of the model.
        sets: by name.
        work: where the folders are; those that are complete are read again.
        base_url: of a running server, started with `--dtype float32`; one is started without it.
        max_model_len: of the engine that is started.
        **options: of `collect_async`.

    Returns:
        The stores by name.
    """
    # A small cache does, and leaves the memory of a laptop alone.
    server: dict[str, Any] = {"base_url": base_url} if base_url else {
        "dtype": "float32", "max_model_len": max_model_len, "kv_cache_memory_bytes": 256 << 20
    }  # fmt: skip
    config = GenerateConfig(max_connections=64)

    async def run() -> dict[str, ActivationStore]:
        model = get_model(f"vllm-lens/{checkpoint}", config=config, memoize=False, **server)
        async with model:
            return {
                name: await collect_async(model, data, f"{work}/{name}", **options)
                for name, data in sets.items()
            }

    return anyio.run(run)
