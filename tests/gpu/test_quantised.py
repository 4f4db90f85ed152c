"""Every way of quantising of `tests/engine/test_quantised.py` on a GPU: compiled, with graphs.

`--quantised-results tests/gpu/quantised.json` keeps what they measured, for the table of models.
With `-n` a crash ends one test alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.test_quantised import check_method
from tests.kit.model_results import CHECK
from tests.kit.quantised_models import METHODS, Method

# Forked children of a process that has looked at a GPU cannot use one.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_quantised_engine_serves_what_it_computes(
    method: Method, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    # One class of models is compiled in this process again and again.
    torch.compiler.reset()
    check_method(
        method,
        tmp_path,
        lambda *found: record_property(CHECK, list(found)),
        kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.05,
    )
