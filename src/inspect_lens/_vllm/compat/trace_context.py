"""Where vLLM traces requests, and the context in which it would begin the span of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .features import is_off

__all__ = ["is_traced", "parent_of"]


def is_traced(vllm_config: Any) -> bool:
    """Whether an engine was started with `--otlp-traces-endpoint`."""
    observability = getattr(vllm_config, "observability_config", None)
    endpoint = getattr(observability, "otlp_traces_endpoint", None)
    return endpoint is not None and is_off("traces") is None


def parent_of(headers: Mapping[str, str] | None) -> Any:
    """The context of OpenTelemetry that vLLM would take for a span; None where it takes none."""
    from vllm.tracing.otel import _get_smart_context, extract_trace_context

    found = extract_trace_context(headers)
    return _get_smart_context() if found is None else found
