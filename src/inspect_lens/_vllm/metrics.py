"""Metrics of an API server for Prometheus, on the `/metrics` that vLLM serves.

vLLM's route shows every metric of the process's default registry, or of all API servers together
where several run. So metrics that are registered there need no route of their own. They are
made when a server learns of an engine that the lens serves. Before, and in every other process,
each function here does nothing. None is called for a single token or step, and none raises.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from inspect_lens._base.partial import Partial
from inspect_lens.errors import LensError
from inspect_lens.spec import LensRequest, TierReceipt

from .clients import KINDS, Holder, kinds_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger("vllm.inspect_lens")

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


_holder: Holder[dict[str, Any]] = Holder("metrics")
"""Metrics by name; none where nobody could read them."""


def begin(registry: CollectorRegistry | None = None) -> None:
    """Register the metrics of this process; once is enough.

    Without `prometheus_client`, which vLLM depends on, there are none.
    """
    if _holder.made is not None:
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
    _holder.made = made


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


@_holder.guarded
def add(made: dict[str, Any], name: str, amount: float = 1, *labels: str) -> None:
    metric = made[name]
    (metric.labels(*labels) if labels else metric).inc(amount)


@_holder.guarded
def note(made: dict[str, Any], name: str, value: float, *labels: str) -> None:
    metric = made[name]
    (metric.labels(*labels) if labels else metric).set(value)


@_holder.guarded
def requested(made: dict[str, Any], request: LensRequest, has_hooks: bool) -> None:
    for kind in kinds_of(request, has_hooks=has_hooks):
        made["inspect_lens_requests_total"].labels(kind).inc()


@_holder.guarded
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


@_holder.guarded
def delivered(made: dict[str, Any], completion: Any) -> None:
    if not completion.inspect_lens_tensors:
        return
    if (capture := completion.inspect_lens.capture) is not None:
        made["inspect_lens_rows_total"].inc(capture.rows)
    n_bytes = sum(tensor.nbytes for tensor in completion.inspect_lens_tensors.values())
    made["inspect_lens_bytes_total"].inc(n_bytes)


@_holder.guarded
def streamed(made: dict[str, Any], part: Partial) -> None:
    made["inspect_lens_rows_total"].inc(part.n_rows)
    made["inspect_lens_bytes_total"].inc(part.nbytes)


@_holder.guarded
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
