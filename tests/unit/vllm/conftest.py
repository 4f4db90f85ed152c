"""What tests of the glue share."""

from __future__ import annotations

from importlib.util import find_spec

from tests.kit.collectors import close_collectors

# What is tested here needs vLLM, and the FastAPI that comes with it.
collect_ignore_glob = [] if find_spec("vllm") and find_spec("fastapi") else ["*"]

__all__ = ["close_collectors"]
