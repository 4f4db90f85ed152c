"""What tests of the glue share."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from inspect_lens._engine.collect import result_memory
from tests.kit.collectors import close_collectors

# What is tested here needs vLLM, and the FastAPI that comes with it.
collect_ignore_glob = [] if find_spec("vllm") and find_spec("fastapi") else ["*"]

__all__ = ["close_collectors"]


@pytest.fixture(autouse=True)
def _few_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of tests has hundreds of front-ends, and vLLM freezes some of their garbage."""
    monkeypatch.setattr(result_memory, "_RESERVE", 1 << 36)
