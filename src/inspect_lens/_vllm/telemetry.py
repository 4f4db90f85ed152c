"""What an API server tells about its requests: whose they are, their traces, and its metrics.

A tenant is whoever shows one API key. Where a server asks for none, `cache_salt` of a request tells
tenants apart, as it does in vLLM's prefix cache.

vLLM's `/metrics` shows every metric of the process's default registry, or of all API servers
together where several run. So metrics that are registered there need no route of their own. They
are made when a server learns of an engine that the lens serves. Before, and in every other process,
what notes spans and metrics does nothing; it never raises.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar

import inspect_lens
from inspect_lens._base.partial import Partial
from inspect_lens.errors import LensError
from inspect_lens.spec import LensRequest, TierReceipt

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger("vllm.inspect_lens")

_TRACE = (b"traceparent", b"tracestate")


class Caller:
    """Whose request is served; worked out when somebody asks, as few requests need it."""

    def __init__(
        self,
        scope: Mapping[str, Any] = MappingProxyType({"headers": ()}),
        shown_key: Callable[[Mapping[str, Any]], str | None] = lambda scope: "",
    ) -> None:
        """By the scope of ASGI; `shown_key` finds the key of the server that it shows."""
        self._scope, self._shown_key = scope, shown_key
        # A mounted application puts itself there, and has no keys.
        self._app = scope.get("app")

    @cached_property
    def client(self) -> str:
        """An address, and the key of the server: made-up ones are one client together."""
        scope = {**self._scope, "app": self._app}
        address = (scope.get("client") or ("",))[0]
        return f"{address} {self._shown_key(scope) or ''}"

    @cached_property
    def tenant(self) -> str:
        """The hash of the key; empty without one, and in an engine of one's own process."""
        key = next((v for k, v in self._scope["headers"] if k == b"authorization"), b"")
        return hashlib.sha256(key).hexdigest()[:16] if key else ""

    @property
    def trace(self) -> dict[str, str]:
        """Trace headers, as W3C Trace Context has them."""
        headers = self._scope["headers"]
        return {k.decode(): v.decode("latin-1") for k, v in headers if k in _TRACE}


CALLER: ContextVar[Caller] = ContextVar("inspect_lens_caller", default=Caller())  # noqa: B039

KINDS = ("capture", "edit", "probe", "lens", "qk", "hook")
"""What a request may ask for, each the value of a label."""


def kinds_of(request: LensRequest, *, has_hooks: bool = False) -> list[str]:
    """Those that a request asks for; hooks also where they run on every request."""
    asked = (
        *(request.capture, request.edits or request.edits_named, request.probes),
        *(request.lens, request.qk, request.hooks or has_hooks),
    )
    return [kind for kind, is_asked in zip(KINDS, asked, strict=True) if is_asked]


T = TypeVar("T")
P = ParamSpec("P")


class Holder(Generic[T]):
    """Holds what notes things in this process, once there is somebody to read them."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.made: T | None = None

    def guarded(self, note: Callable[Concatenate[T, P], None]) -> Callable[P, None]:
        """Make a function do nothing where nothing is held, and never raise."""

        @functools.wraps(note)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            if (made := self.made) is None:
                return
            try:
                note(made, *args, **kwargs)
            except Exception:
                # Once: what fails for one request would for all.
                self.made = None
                logger.exception("inspect_lens: %s are off from now on", self._what)

        return run


REQUEST, FETCH = "inspect_lens_request", "inspect_lens_fetch"
"""Names of spans."""

ATTRIBUTES: dict[str, str] = {
    "inspect_lens.asked": f"What it asks for, of {', '.join(f'`{kind}`' for kind in KINDS)}.",
    "inspect_lens.layers": "Layers whose rows were captured.",
    "inspect_lens.rows": "Captured rows of all choices: one for each layer and token.",
    "inspect_lens.cached_positions": "Positions whose rows were known from an earlier request.",
    "inspect_lens.bytes": "On a fetch, bytes that were fetched.",
    "inspect_lens.steered_layers": "Layers that were edited.",
    "inspect_lens.steered_tokens": "Tokens that were edited.",
    "inspect_lens.probes": "Names of probes.",
    "inspect_lens.alarms": "Names of those that raised an alarm.",
    "inspect_lens.aborted": "True where the client went away.",
    "error.type": "The error, if there is one; the status of the span has its text.",
    "http.response.status_code": "Of the answer.",
}
"""Attributes of spans, and what they say."""

_HANDLES = 4096
"""As many results are remembered with the span of their request."""
_LONGEST = 500
"""Characters of an error's text: a span is no log."""


@dataclass
class _Spans:
    tracer: Any
    propagator: Any
    handles: OrderedDict[str, Any] = field(default_factory=OrderedDict)
    """Context of the span of the request whose result a handle is."""


_span_holder: Holder[_Spans] = Holder("spans for OpenTelemetry")


def begin_spans() -> None:
    if _span_holder.made is not None:
        return
    try:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Of the provider that vLLM sets, or has set.
        tracer = trace.get_tracer("inspect_lens", inspect_lens.__version__)
        _span_holder.made = _Spans(tracer, TraceContextTextMapPropagator())
    except Exception as error:  # noqa: BLE001 - a server must not fail for want of spans
        logger.warning("inspect_lens: no spans: %s: %s", type(error).__name__, error)


def is_on() -> bool:
    return _span_holder.made is not None


class Asked:
    """The span of an HTTP request that may ask for the lens."""

    def __init__(self, scope: Mapping[str, Any]) -> None:
        self.scope = scope
        """For vLLM: with this span as the trace that it continues."""
        self.span: Any = None
        """None where there are no spans, or the trace is not sampled."""
        _begin(self)

    def end(
        self,
        status: int | None,
        request: LensRequest | None = None,
        results: Iterable[Mapping[str, Any]] = (),
        error: BaseException | None = None,
    ) -> None:
        """Send it; without this it is as if it had not been."""
        if self.span is not None:
            _end(self.span, status, request, list(results), error)


@_span_holder.guarded
def _begin(spans: _Spans, asked: Asked) -> None:
    from opentelemetry.trace.propagation import set_span_in_context

    span = spans.tracer.start_span(REQUEST, context=spans.propagator.extract(CALLER.get().trace))
    if not span.is_recording():
        return  # not sampled: vLLM's is not either, and has the parent that it would have had
    told: dict[str, str] = {}
    spans.propagator.inject(told, set_span_in_context(span))
    given = {name.encode(): value.encode() for name, value in told.items()}
    headers = [*(h for h in asked.scope["headers"] if h[0] not in given), *given.items()]
    asked.span, asked.scope = span, {**asked.scope, "headers": headers}


@_span_holder.guarded
def _end(
    spans: _Spans,
    span: Any,
    status: int | None,
    request: LensRequest | None,
    results: list[Mapping[str, Any]],
    error: BaseException | None,
) -> None:
    if request is not None:
        span.set_attribute("inspect_lens.asked", kinds_of(request))
    span.set_attributes(_attributes([result["inspect_lens"] for result in results]))
    if error is None and not results and status in (None, 200):
        span.set_attribute("inspect_lens.aborted", True)
    if status is not None:
        span.set_attribute("http.response.status_code", status)
    if error is not None or (status or 0) >= 400:
        _set_error(span, error)
    span.end()


def _attributes(receipts: list[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if captures := [c for r in receipts if (c := r.get("capture"))]:
        found["inspect_lens.layers"] = captures[0]["layers"]
        for name in ("rows", "cached_positions"):
            found[f"inspect_lens.{name}"] = sum(capture[name] for capture in captures)
    if steered := [s for r in receipts if (s := r.get("steer"))]:
        found["inspect_lens.steered_layers"] = steered[0]["layers"]
        found["inspect_lens.steered_tokens"] = sum(one["n_tokens"] for one in steered)
    if probes := [probe for receipt in receipts for probe in receipt.get("probes") or ()]:
        alarms = [probe for probe in probes if probe["alarm_position"] is not None]
        for name, some in (("probes", probes), ("alarms", alarms)):
            found[f"inspect_lens.{name}"] = list(dict.fromkeys(probe["name"] for probe in some))
    return found


def _set_error(span: Any, error: BaseException | None) -> None:
    from opentelemetry.trace import Status, StatusCode

    if error is None:
        span.set_status(Status(StatusCode.ERROR))
        return
    span.set_attribute("error.type", type(error).__name__)
    if isinstance(error, LensError):
        span.set_attribute("http.response.status_code", error.status)
    span.set_status(Status(StatusCode.ERROR, str(error)[:_LONGEST]))


@_span_holder.guarded
def remember(spans: _Spans, span: Any, result: Mapping[str, Any]) -> None:
    """Remember whose results the handles of a choice are."""
    for entry in result.get("activations", {}).values():
        if span is not None and (handle := entry.get("handle")) is not None:
            spans.handles[handle] = span.get_span_context()
    while len(spans.handles) > _HANDLES:
        spans.handles.popitem(last=False)


@_span_holder.guarded
def fetched(spans: _Spans, handle: str, began: int, status: int, n_bytes: int) -> None:
    """Send a span of a fetch: in the trace that its client names, else in its request's."""
    from opentelemetry.trace import Link, NonRecordingSpan
    from opentelemetry.trace.propagation import set_span_in_context

    headers, request = CALLER.get().trace, spans.handles.get(handle)
    parent = spans.propagator.extract(headers)
    if not headers and request is not None:
        parent = set_span_in_context(NonRecordingSpan(request))
    span = spans.tracer.start_span(
        FETCH,
        context=parent,
        start_time=began,
        links=[Link(request)] if headers and request is not None else [],
        attributes={"http.response.status_code": status, "inspect_lens.bytes": n_bytes},
    )
    if status >= 400:
        _set_error(span, None)
    span.end()


_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)


@dataclass(frozen=True)
class Metric:
    """A metric, as it is registered and documented."""

    name: str
    """As `/metrics` shows it; a histogram's is followed by `_bucket`, `_sum` and `_count`."""
    kind: Literal["counter", "gauge", "histogram"]
    doc: str
    labels: tuple[str, ...] = ()


METRICS: tuple[Metric, ...] = (
    Metric(
        "inspect_lens_requests_total",
        "counter",
        "Requests handed to the engine, by what they ask for; one that asks for two things counts "
        "in both.",
        ("kind",),
    ),
    Metric("inspect_lens_running", "gauge", "Choices of lens requests under way."),
    Metric(
        "inspect_lens_refusals_total",
        "counter",
        "Requests refused before they cost anything, and handles without a result, by HTTP status "
        "and error.",
        ("status", "error"),
    ),
    Metric(
        "inspect_lens_failures_total",
        "counter",
        "Requests that began and ended with an error, by error; none is answered in part.",
        ("error",),
    ),
    Metric("inspect_lens_rows_total", "counter", "Captured rows put into responses."),
    Metric("inspect_lens_bytes_total", "counter", "Bytes of tensors put into responses."),
    Metric(
        "inspect_lens_wait_seconds",
        "histogram",
        "Seconds between the end of a text and its results.",
    ),
    Metric("inspect_lens_store_results", "gauge", "Results that wait to be fetched."),
    Metric("inspect_lens_store_bytes", "gauge", "Bytes of results that are held in memory."),
    Metric("inspect_lens_store_limit_bytes", "gauge", "Bytes of results that may be held."),
    Metric("inspect_lens_store_expired_total", "counter", "Results that expired before a fetch."),
    Metric("inspect_lens_row_cache_bytes", "gauge", "Bytes of rows kept from earlier prompts."),
    Metric(
        "inspect_lens_row_cache_queries_total",
        "counter",
        "Captured prompt positions looked up in the row cache.",
    ),
    Metric("inspect_lens_row_cache_hits_total", "counter", "Those of them whose rows it had."),
    Metric(
        "inspect_lens_tier_requests_total",
        "counter",
        "Requests on which something acted that they did not bring: the `server`'s tier, or a "
        "`named` configuration; and those that `opted_out` of the server's.",
        ("tier",),
    ),
    Metric("inspect_lens_alarms_total", "counter", "Alarms of the server's probes.", ("probe",)),
    Metric(
        "inspect_lens_alerts_total",
        "counter",
        "Alerts, by what became of them: `delivered`, `dead` (written to the dead-letter file), or "
        "`lost`, which that file could not take.",
        ("status",),
    ),
    Metric("inspect_lens_alerts_waiting", "gauge", "Alerts that wait for the webhook."),
    Metric(
        "inspect_lens_sink_results_total",
        "counter",
        "Results at a sink, by what became of them; one that is spilled counts again when it is "
        "written.",
        ("sink", "status"),
    ),
    Metric("inspect_lens_sink_rows_total", "counter", "Tokens written to a sink.", ("sink",)),
    Metric("inspect_lens_sink_bytes_total", "counter", "Bytes of rows written to it.", ("sink",)),
    Metric(
        "inspect_lens_sink_queue_bytes",
        "gauge",
        "Bytes of results that wait in memory for a sink.",
        ("sink",),
    ),
    Metric(
        "inspect_lens_sink_spilled_bytes",
        "gauge",
        "Bytes of results that wait on a disk for it.",
        ("sink",),
    ),
)
"""Every metric; `docs/how-to/serve.md` lists the same, and a test compares."""


_metric_holder: Holder[dict[str, Any]] = Holder("metrics")
"""Metrics by name; none where nobody could read them."""


def begin_metrics(registry: CollectorRegistry | None = None) -> None:
    """Register the metrics of this process; once is enough.

    Without `prometheus_client`, which vLLM depends on, there are none.
    """
    if _metric_holder.made is not None:
        return
    try:
        # Here: what is imported earlier than vLLM has prepared for several processes counts alone.
        import prometheus_client

        into = prometheus_client.REGISTRY if registry is None else registry
        made = {metric.name: _made(metric, into) for metric in METRICS}
        for kind in KINDS:
            # A counter that is shown before it counts has a rate from the first request on.
            made["inspect_lens_requests_total"].labels(kind)
    except Exception as error:  # noqa: BLE001 - a server must not fail for want of metrics
        logger.warning("inspect_lens: no metrics: %s: %s", type(error).__name__, error)
        return
    _metric_holder.made = made


def _made(metric: Metric, registry: CollectorRegistry) -> Any:
    from prometheus_client import Counter, Gauge, Histogram

    if metric.kind == "counter":
        return Counter(metric.name, metric.doc, metric.labels, registry=registry)
    if metric.kind == "histogram":
        return Histogram(
            metric.name, metric.doc, metric.labels, registry=registry, buckets=_SECONDS
        )
    # Of several API servers: what they have together.
    return Gauge(
        metric.name, metric.doc, metric.labels, registry=registry, multiprocess_mode="livesum"
    )


E = TypeVar("E", bound=BaseException)


@_metric_holder.guarded
def add(made: dict[str, Any], name: str, amount: float = 1, *labels: str) -> None:
    metric = made[name]
    (metric.labels(*labels) if labels else metric).inc(amount)


@_metric_holder.guarded
def note(made: dict[str, Any], name: str, value: float, *labels: str) -> None:
    metric = made[name]
    (metric.labels(*labels) if labels else metric).set(value)


@_metric_holder.guarded
def requested(made: dict[str, Any], request: LensRequest, has_hooks: bool) -> None:
    for kind in kinds_of(request, has_hooks=has_hooks):
        made["inspect_lens_requests_total"].labels(kind).inc()


@_metric_holder.guarded
def tiers_acted(made: dict[str, Any], tiers: Iterable[TierReceipt]) -> None:
    for one in tiers:
        tier = "opted_out" if one.opted_out else one.tier
        made["inspect_lens_tier_requests_total"].labels(tier).inc()


def refused_as(status: int, error: str) -> None:
    """Count a refusal by its HTTP status and the name of its error."""
    add("inspect_lens_refusals_total", 1, str(status), error)


def refused(error: E) -> E:
    """Count a request that is refused, and return its error for whoever raises it."""
    if isinstance(error, LensError):
        if error.status < 500:
            refused_as(error.status, type(error).__name__)
        else:
            failed(error)
    return error


def failed(error: E) -> E:
    """Count a request that ends without its results, and return its error."""
    # Classes of others are many; a metric has one series for each value of a label.
    name = type(error).__name__ if isinstance(error, LensError) else "Fault"
    add("inspect_lens_failures_total", 1, name)
    return error


@_metric_holder.guarded
def delivered(made: dict[str, Any], completion: Any) -> None:
    if not completion.inspect_lens_tensors:
        return
    if (capture := completion.inspect_lens.capture) is not None:
        made["inspect_lens_rows_total"].inc(capture.rows)
    n_bytes = sum(tensor.nbytes for tensor in completion.inspect_lens_tensors.values())
    made["inspect_lens_bytes_total"].inc(n_bytes)


@_metric_holder.guarded
def streamed(made: dict[str, Any], part: Partial) -> None:
    made["inspect_lens_rows_total"].inc(part.n_rows)
    made["inspect_lens_bytes_total"].inc(part.nbytes)


@_metric_holder.guarded
def _waited(made: dict[str, Any], seconds: float) -> None:
    made["inspect_lens_wait_seconds"].observe(seconds)


@contextlib.contextmanager
def waited() -> Iterator[None]:
    """Measure how long the results of an output take that has ended."""
    began = time.perf_counter()
    try:
        yield
    finally:
        _waited(time.perf_counter() - began)


def stored(waiting: int, n_bytes: int, most: int, expired: int) -> None:
    """Note what the store of results holds."""
    note("inspect_lens_store_results", waiting)
    note("inspect_lens_store_bytes", n_bytes)
    note("inspect_lens_store_limit_bytes", most)
    add("inspect_lens_store_expired_total", expired)
