"""The layouts of `tests/engine/test_architectures.py` on a GPU: compiled, with graphs, in bfloat16.

`--architecture-results tests/gpu/architectures.json` keeps what they measured, for the table of
models. With `-n` a crash ends one test alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.test_architectures import check_case, check_refusal
from tests.kit.architectures import CASES, Case
from tests.kit.model_results import CHECK

# Forked children of a process that has looked at a GPU cannot use one.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

# Several of them fit beside each other.
MEMORY = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.05}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_architecture_equals_hugging_face(
    case: Case, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    if case.refusal:
        check_refusal(case, tmp_path, "resid_post", case.refusal, dtype="bfloat16", **MEMORY)
        return
    check_case(
        case,
        tmp_path,
        dtype=torch.bfloat16,
        note=lambda *found: record_property(CHECK, list(found)),
        **MEMORY,
    )
