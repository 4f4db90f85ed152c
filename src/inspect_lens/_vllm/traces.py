"""Spans of OpenTelemetry for what the lens does, in the traces that vLLM sends.

With `--otlp-traces-endpoint` vLLM sends a span `llm_request` for each request. A lens request then
has a span of ours around it, which ends when its results are there. It begins in the trace that
the client named (`traceparent`, W3C Trace Context), and vLLM's span becomes a part of it.

Without that option there is no tracer, and each function here does nothing. None raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import inspect_lens
from inspect_lens._engine.hooks.runner import EAGER_KEY
from inspect_lens._engine.protocol.envelope import Envelope
from inspect_lens.errors import LensError

from .clients import TRACE

logger = logging.getLogger("vllm.inspect_lens")

KINDS = ("capture", "edit", "probe", "lens", "qk", "hook")
"""What a request may ask for, each the value of a label."""

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


REQUEST, REFUSAL, FETCH = (
    "inspect_lens_request",
    "inspect_lens_refusal",
    "inspect_lens_fetch",
)
"""Names of spans."""

ATTRIBUTES: dict[str, str] = {
    "gen_ai.request.id": "The request, as vLLM's span names it.",
    "inspect_lens.asked": f"What it asks for, of {', '.join(f'`{kind}`' for kind in KINDS)}.",
    "inspect_lens.layers": "Layers whose rows were captured.",
    "inspect_lens.rows": "Captured rows: one for each layer and token.",
    "inspect_lens.cached_positions": "Positions whose rows were known from an earlier request.",
    "inspect_lens.bytes": "Bytes of tensors in the response; on a fetch, bytes that were fetched.",
    "inspect_lens.steered_layers": "Layers that were edited.",
    "inspect_lens.steered_tokens": "Tokens that were edited.",
    "inspect_lens.probes": "Names of probes.",
    "inspect_lens.alarms": "Names of those that raised an alarm.",
    "inspect_lens.wait_seconds": "Seconds between the end of the text and its results.",
    "inspect_lens.aborted": "True where the client went away.",
    "error.type": "The error, if there is one; the status of the span has its text.",
    "http.response.status_code": "Of a refusal, a failure and a fetch.",
}
"""Attributes of spans, and what they say."""

_HANDLES = 4096
"""As many results are remembered with the span of their request."""
_LONGEST = 500
"""Characters of an error's text: a span is no log."""


Parent = Callable[[Mapping[str, str] | None], Any]


@dataclass(slots=True)
class _Open:
    """A choice in flight."""

    span: Any
    text_ended: float | None = None


@dataclass
class _Spans:
    tracer: Any
    parent_of: Parent
    open: dict[str, _Open] = field(default_factory=dict)
    """By key of the choice."""
    handles: OrderedDict[str, Any] = field(default_factory=OrderedDict)
    """Context of the span of the request whose result a handle is."""

    def remember(self, completion: Any, context: Any) -> None:
        """Remember whose results the handles of a choice are."""
        entries = getattr(completion, "inspect_lens_json", {}).get("activations", {})
        for entry in entries.values():
            if (handle := entry.get("handle")) is not None:
                self.handles[handle] = context
        while len(self.handles) > _HANDLES:
            self.handles.popitem(last=False)


_holder: Holder[_Spans] = Holder("spans for OpenTelemetry")


def begin(parent_of: Parent) -> None:
    """Trace lens requests from now on."""
    if _holder.made is not None:
        return
    try:
        from opentelemetry import trace

        # Of the provider that vLLM sets, or has set.
        tracer = trace.get_tracer("inspect_lens", inspect_lens.__version__)
    except Exception as error:  # noqa: BLE001 - a server must not fail for want of spans
        logger.warning("inspect_lens: no spans: %s: %s", type(error).__name__, error)
        return
    _holder.made = _Spans(tracer, parent_of)


def is_on() -> bool:
    """Whether spans are made in this process."""
    return _holder.made is not None


@_holder.guarded
def requested(spans: _Spans, request: Any, packed: Mapping[str, Any]) -> None:
    """Begin the span of a choice that is handed to the engine, and have vLLM's begin in it."""
    from opentelemetry.trace.propagation import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    envelope = Envelope.unpack(packed)
    asked = (
        *(envelope.capture, envelope.edits, envelope.probes),
        *(envelope.lens, envelope.qk, EAGER_KEY in packed),
    )
    kinds = [kind for kind, is_asked in zip(KINDS, asked, strict=True) if is_asked]
    span = spans.tracer.start_span(
        REQUEST,
        context=spans.parent_of(request.trace_headers),
        start_time=int(request.arrival_time * 1e9),
        attributes={
            "gen_ai.request.id": getattr(request, "external_req_id", None) or request.request_id,
            "inspect_lens.asked": kinds,
        },
    )
    if not span.is_recording():
        return  # not sampled: vLLM's is not either, and has the parent that it would have had
    spans.open[request.request_id] = _Open(span)
    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers, set_span_in_context(span))
    request.trace_headers = headers


@_holder.guarded
def text_ended(spans: _Spans, key: str) -> None:
    """Note that the text of a choice has ended, and its results are waited for."""
    if (one := spans.open.get(key)) is not None:
        one.text_ended = time.perf_counter()


@_holder.guarded
def delivered(spans: _Spans, outputs: Iterable[Any]) -> None:
    """End the spans of choices that have their results."""
    for output in outputs:
        for completion in output.outputs:
            ticket = getattr(completion, "inspect_lens_ticket", None)
            if ticket is None or not hasattr(completion, "inspect_lens"):
                continue
            if (one := spans.open.pop(ticket.key, None)) is not None:
                spans.remember(completion, one.span.get_span_context())
                one.span.set_attributes(_attributes(completion))
                _end(one)


def _attributes(completion: Any) -> dict[str, Any]:
    receipt = completion.inspect_lens
    found: dict[str, Any] = {}
    if (capture := receipt.capture) is not None:
        found["inspect_lens.layers"] = capture.layers
        found["inspect_lens.rows"] = capture.rows
        found["inspect_lens.cached_positions"] = capture.cached_positions
    if tensors := completion.inspect_lens_tensors:
        found["inspect_lens.bytes"] = sum(tensor.nbytes for tensor in tensors.values())
    if (steer := receipt.steer) is not None:
        found["inspect_lens.steered_layers"] = steer.layers
        found["inspect_lens.steered_tokens"] = steer.n_tokens
    if receipt.probes:
        found["inspect_lens.probes"] = [probe.name for probe in receipt.probes]
        alarms = [probe.name for probe in receipt.probes if probe.alarm_position is not None]
        found["inspect_lens.alarms"] = alarms
    return found


@_holder.guarded
def failed(spans: _Spans, key: str, error: BaseException) -> None:
    """End the span of a choice that ends without its results; one that has ended stays so."""
    if (one := spans.open.pop(key, None)) is not None:
        _set_error(one.span, error)
        _end(one)


@_holder.guarded
def left(spans: _Spans, key: str) -> None:
    """End the span of a choice that was aborted, and had not ended."""
    if (one := spans.open.pop(key, None)) is not None:
        one.span.set_attribute("inspect_lens.aborted", True)
        _end(one)


@contextlib.contextmanager
def ends(keys: Iterable[str]) -> Iterator[None]:
    """End the spans of choices if what is done for them raises, or is cancelled."""
    try:
        yield
    except asyncio.CancelledError:
        for key in keys:
            left(key)
        raise
    except BaseException as error:
        for key in keys:
            failed(key, error)
        raise


def _end(one: _Open) -> None:
    if one.text_ended is not None:
        waited = time.perf_counter() - one.text_ended
        one.span.set_attribute("inspect_lens.wait_seconds", waited)
    one.span.end()


def _set_error(span: Any, error: BaseException) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", type(error).__name__)
    if isinstance(error, LensError):
        span.set_attribute("http.response.status_code", error.status)
    span.set_status(Status(StatusCode.ERROR, str(error)[:_LONGEST]))


@_holder.guarded
def refused(spans: _Spans, error: BaseException) -> None:
    """Send a span of a request that is refused before it costs anything."""
    span = spans.tracer.start_span(REFUSAL, context=spans.parent_of(TRACE.get()))
    _set_error(span, error)
    span.end()


@_holder.guarded
def fetched(spans: _Spans, handle: str, began: int, status: int, n_bytes: int) -> None:
    """Send a span of a fetch: in the trace that its client names, else in its request's."""
    from opentelemetry.trace import Link, NonRecordingSpan, Status, StatusCode
    from opentelemetry.trace.propagation import set_span_in_context

    headers, request = TRACE.get(), spans.handles.get(handle)
    parent = spans.parent_of(headers)
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
        span.set_status(Status(StatusCode.ERROR))
    span.end()
