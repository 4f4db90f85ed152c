"""Loaded by the process that `preloaded` forks from: what processes of vLLM import."""

from __future__ import annotations

import gc
from importlib import import_module

from .preloaded import become_server

MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)


def _load() -> None:
    # Millions of objects are made, and none is let go of.
    gc.disable()
    for name in MODULES:
        import_module(name)
    gc.freeze()
    gc.enable()


become_server()
_load()
