"""A collector of OpenTelemetry: takes spans over HTTP, as those that servers send theirs to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from .waiting import until

__all__ = ["Collector", "Span", "collector"]


@dataclass(frozen=True)
class Span:
    """A span that has ended."""

    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    is_error: bool


@dataclass
class Collector:
    """Where it listens, and what has come."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """What a server needs to send its spans here, and soon."""
        return {
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    def of(self, trace: str, count: int, timeout_s: float = 60.0) -> list[Span]:
        """Spans of a trace, once so many have come."""
        found: list[Span] = []

        def come() -> bool:
            found[:] = [span for span in tuple(self.spans) if span.trace == trace]
            return len(found) >= count

        until(come, timeout_s)
        return found


def _value(any_value: Any) -> Any:
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in any_value.array_value.values]
    return getattr(any_value, kind)


def _spans(body: bytes) -> Iterator[Span]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    {one.key: _value(one.value) for one in span.attributes},
                    span.status.code == span.status.STATUS_CODE_ERROR,
                )


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """Listen for a while."""
    made = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            made.spans.extend(_spans(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join(10)
