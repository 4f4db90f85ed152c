"""Whose HTTP request is served, and of which trace: what one client has is counted and kept apart.

A tenant is whoever shows one API key. Where a server asks for none, `cache_salt` of a request tells
tenants apart, as it does in vLLM's prefix cache.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import inspect_lens
from inspect_lens.errors import LensError
from inspect_lens.spec import LensRequest

logger = logging.getLogger("vllm.inspect_lens")

CLIENT: ContextVar[str] = ContextVar("inspect_lens_client", default="")
"""An address and the key that it shows."""

TENANT: ContextVar[str] = ContextVar("inspect_lens_tenant", default="")
"""The hash of the key; empty without one, and in an engine of one's own process."""


TRACE: ContextVar[Mapping[str, str] | None] = ContextVar("inspect_lens_trace", default=None)
"""Trace headers of a request, as W3C Trace Context has them."""
_TRACE = (b"traceparent", b"tracestate")


class NotesClient:
    """ASGI middleware that notes whose request is served, and of which trace it is a part."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            key = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
            tenant = hashlib.sha256(key).hexdigest()[:16] if key else ""
            TENANT.set(tenant)
            CLIENT.set(f"{(scope.get('client') or ('',))[0]} {tenant}")
            found = {k.decode(): v.decode("latin-1") for k, v in scope["headers"] if k in _TRACE}
            TRACE.set(found or None)
        await self._app(scope, receive, send)


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


_holder: Holder[_Spans] = Holder("spans for OpenTelemetry")


def begin() -> None:
    if _holder.made is not None:
        return
    try:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Of the provider that vLLM sets, or has set.
        tracer = trace.get_tracer("inspect_lens", inspect_lens.__version__)
        _holder.made = _Spans(tracer, TraceContextTextMapPropagator())
    except Exception as error:  # noqa: BLE001 - a server must not fail for want of spans
        logger.warning("inspect_lens: no spans: %s: %s", type(error).__name__, error)


def is_on() -> bool:
    return _holder.made is not None


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


@_holder.guarded
def _begin(spans: _Spans, asked: Asked) -> None:
    from opentelemetry.trace.propagation import set_span_in_context

    span = spans.tracer.start_span(REQUEST, context=spans.propagator.extract(TRACE.get() or {}))
    if not span.is_recording():
        return  # not sampled: vLLM's is not either, and has the parent that it would have had
    told: dict[str, str] = {}
    spans.propagator.inject(told, set_span_in_context(span))
    given = {name.encode(): value.encode() for name, value in told.items()}
    headers = [*(h for h in asked.scope["headers"] if h[0] not in given), *given.items()]
    asked.span, asked.scope = span, {**asked.scope, "headers": headers}


@_holder.guarded
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


@_holder.guarded
def remember(spans: _Spans, span: Any, result: Mapping[str, Any]) -> None:
    """Remember whose results the handles of a choice are."""
    for entry in result.get("activations", {}).values():
        if span is not None and (handle := entry.get("handle")) is not None:
            spans.handles[handle] = span.get_span_context()
    while len(spans.handles) > _HANDLES:
        spans.handles.popitem(last=False)


@_holder.guarded
def fetched(spans: _Spans, handle: str, began: int, status: int, n_bytes: int) -> None:
    """Send a span of a fetch: in the trace that its client names, else in its request's."""
    from opentelemetry.trace import Link, NonRecordingSpan
    from opentelemetry.trace.propagation import set_span_in_context

    headers, request = TRACE.get(), spans.handles.get(handle)
    parent = spans.propagator.extract(headers or {})
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
