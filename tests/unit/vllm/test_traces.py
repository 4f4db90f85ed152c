"""Spans of lens requests: their place in a trace, what they say, and that none does harm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("fastapi")

from fastapi import FastAPI
from fastapi.testclient import TestClient
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from vllm.tracing import extract_trace_context, instrument_manual

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._vllm import traces
from inspect_lens._vllm.clients import NotesClient
from inspect_lens._vllm.compat.api_server import parent_of
from inspect_lens._vllm.compat.guard import pass_over
from inspect_lens._vllm.frontend import wrappers
from inspect_lens._vllm.frontend.wrappers import FRONT_END_WRAPPERS
from inspect_lens._vllm.http import responses, server
from inspect_lens._vllm.http.bodies import LensBodies
from inspect_lens._vllm.http.payloads import PayloadStore
from inspect_lens._vllm.http.routes import add_routes
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.spec import ENVELOPE_KEY, LENS_KEYS
from tests.kit.steps import HIDDEN
from tests.unit.vllm.frontend.test_doors_front import state_of
from tests.unit.vllm.results.test_ahead import N_MAX, N_PROMPT, Engine
from tests.unit.vllm.results.test_arrivals import attach
from tests.unit.vllm.results.test_results import completion, output

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CLIENT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
N_COMPLETION = N_MAX - N_PROMPT + 1


class Sent:
    """Spans that have ended."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def __call__(self, name: str | None = None) -> list[ReadableSpan]:
        found = self.exporter.get_finished_spans()
        return [span for span in found if name in (None, span.name)]

    def one(self, name: str) -> Any:
        (span,) = self(name)
        return span


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """vLLM's tracer provider, and nothing of ours."""
    made = Sent()
    monkeypatch.setattr(trace, "get_tracer", made.provider.get_tracer)
    monkeypatch.setattr(traces._holder, "made", None)
    for name in ("TRACEPARENT", "TRACESTATE", "traceparent", "tracestate"):
        monkeypatch.delenv(name, raising=False)
    return made


@pytest.fixture
def sent(off: Sent) -> Sent:
    traces.begin(parent_of)
    return off


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    made = Engine()
    front = SimpleNamespace(results=made.results, registry=made.registry)
    for module in (wrappers, wrappers):
        monkeypatch.setattr(module, "front_end", lambda: front)
    yield made
    monkeypatch.undo()
    assert made.results.n_open == 0
    made.worker.stepper.close()
    made.collector.close()


class Request(SimpleNamespace):
    """What vLLM hands to its output processor."""

    trace_headers: dict[str, str] | None


def begun(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str] | None, **asked: Any
) -> Request:
    """Add a request as vLLM does, with the trace headers that it was given."""
    lens = LensRequest(**asked or {"capture": CaptureSpec(layers=(0, 2))})
    key = engine.start(lens)
    packed = engine.results.expected(key).packed  # type: ignore[union-attr]
    params = SimpleNamespace(extra_args={ENVELOPE_KEY: packed}, max_tokens=N_COMPLETION)
    request = Request(
        request_id=key,
        external_req_id=f"cmpl-{key}",
        sampling_params=params,
        trace_headers=headers,
        arrival_time=time.time() - 1,
    )
    monkeypatch.setattr(wrappers, "expect", lambda *args: None)
    processor = SimpleNamespace(request_states={key: SimpleNamespace(queue=None)})
    FRONT_END_WRAPPERS["add_request"](lambda *args: None)(processor, request, "a prompt")
    return request


def vllm_ends(request: Request) -> None:
    """Do what vLLM does where it traces a request that has ended."""
    now = time.time_ns()
    context = extract_trace_context(request.trace_headers)
    instrument_manual(span_name="llm_request", start_time=now, context=context)


def answered(engine: Engine, request: Request) -> Any:
    """Run a request to its end, and put its results into a response."""
    key = request.request_id
    engine.step([key], 0, N_PROMPT)
    engine.run([key])
    make = FRONT_END_WRAPPERS["new_completion_output"](lambda *args: completion(0))
    choice = make(state_of(key), [1], "length", None)
    assert choice.inspect_lens_ticket.n_completion == N_COMPLETION
    vllm_ends(request)
    engine.worker.stepper.leave([key])
    one = output(choice)
    engine.results.attach(one)
    engine.worker.stepper.remove(key)
    choice.inspect_lens_json = responses.as_json(choice)
    traces.delivered([one])
    return one


def headers_of(span: Any) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


@pytest.mark.parametrize("headers", [CLIENT, None], ids=["of a client", "none"])
def test_a_span_stands_between_the_clients_and_vllms(
    engine: Engine, sent: Sent, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str] | None
) -> None:
    request = begun(engine, monkeypatch, headers)
    assert request.trace_headers is not None
    one = answered(engine, request)
    ours, theirs = sent.one(traces.REQUEST), sent.one("llm_request")
    assert theirs.parent.span_id == ours.context.span_id
    assert theirs.context.trace_id == ours.context.trace_id
    assert request.trace_headers["traceparent"] == headers_of(ours)
    if headers is None:
        assert ours.parent is None
    else:
        assert f"{ours.context.trace_id:032x}" == TRACE
        assert f"{ours.parent.span_id:016x}" == PARENT
        assert request.trace_headers["tracestate"] == "vendor=1"
    assert ours.start_time == int(request.arrival_time * 1e9)
    assert ours.end_time >= theirs.end_time
    receipt = one.outputs[0].inspect_lens
    found = dict(ours.attributes)
    assert 0 <= found.pop("inspect_lens.wait_seconds") < 5
    assert found == {
        "gen_ai.request.id": request.external_req_id,
        "inspect_lens.asked": ("capture",),
        "inspect_lens.layers": (0, 2),
        "inspect_lens.rows": receipt.capture.rows,
        "inspect_lens.cached_positions": 0,
        "inspect_lens.bytes": 2 * N_MAX * HIDDEN * 4,
    }
    assert ours.status.status_code is StatusCode.UNSET
    assert traces._holder.made is not None
    assert not traces._holder.made.open


def test_an_unsampled_trace_stays_unsampled_and_keeps_its_parent(
    engine: Engine, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    request = begun(engine, monkeypatch, dict(headers))
    assert request.trace_headers == headers
    answered(engine, request)
    assert sent() == []


def test_a_trace_of_the_environment_is_taken_as_vllm_takes_it(
    engine: Engine, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEPARENT", CLIENT["traceparent"])
    answered(engine, begun(engine, monkeypatch, None))
    assert f"{sent.one(traces.REQUEST).parent.span_id:016x}" == PARENT


def test_nothing_is_done_where_vllm_does_not_trace(
    engine: Engine, off: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = begun(engine, monkeypatch, None)
    assert request.trace_headers is None
    answered(engine, request)
    assert {span.name for span in off()} == {"llm_request"}


def late(engine: Engine, request: Request) -> BaseException:
    engine.results.timeout_s = 0.1
    (error,) = attach(engine, [output(completion(0, request.request_id))])
    assert error is not None
    return error


def lost(engine: Engine, request: Request) -> BaseException:
    error = CaptureError("a worker on another host has gone")
    running = engine.results.running
    loop: Any = SimpleNamespace(call_soon_threadsafe=lambda put, error: None)
    running._queues[request.request_id] = loop, SimpleNamespace(put=None)
    running.end({request.request_id: error})
    engine.results.abandon([request.request_id])
    return error


@pytest.mark.parametrize("fails", [late, lost])
def test_a_request_that_fails_says_why(
    engine: Engine,
    sent: Sent,
    monkeypatch: pytest.MonkeyPatch,
    fails: Callable[[Engine, Request], BaseException],
) -> None:
    request = begun(engine, monkeypatch, None)
    error = fails(engine, request)
    span = sent.one(traces.REQUEST)
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == str(error)
    assert span.attributes["error.type"] == "CaptureError"
    assert "inspect_lens.aborted" not in span.attributes


def test_a_request_whose_client_goes_away_is_aborted(
    engine: Engine, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = begun(engine, monkeypatch, None)
    aborts = FRONT_END_WRAPPERS["abort_requests"](lambda self, ids, internal: ids)
    aborts(None, [request.request_id], True)
    span = sent.one(traces.REQUEST)
    assert span.attributes["inspect_lens.aborted"]
    assert span.status.status_code is StatusCode.UNSET


def test_a_result_that_cannot_be_encoded_is_a_failure(
    engine: Engine, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = begun(engine, monkeypatch, None)
    with pytest.raises(KeyError), traces.ends([request.request_id]):
        raise KeyError("x")
    assert sent.one(traces.REQUEST).attributes["error.type"] == "KeyError"
    engine.results.abandon([request.request_id])
    assert len(sent(traces.REQUEST)) == 1


def app_with(store: PayloadStore) -> TestClient:
    app = FastAPI()
    add_routes(app, lambda: None, store)

    @app.post("/refuses")
    def refuses() -> None:
        pass_over(SpecError("layers 0 to 5"), uses_lens=True)

    app.add_middleware(NotesClient)
    return TestClient(app, raise_server_exceptions=False)


def test_a_refusal_is_a_span_in_its_clients_trace(sent: Sent) -> None:
    with app_with(PayloadStore()) as client:
        client.post("/refuses", headers=CLIENT)
        client.post("/refuses")
    first, second = sent(traces.REFUSAL)
    assert first.parent is not None
    assert f"{first.parent.span_id:016x}" == PARENT
    assert second.parent is None, "of another request"
    assert first.status.description == "layers 0 to 5"
    assert first.attributes == {"error.type": "SpecError", "http.response.status_code": 400}


def test_what_middleware_refuses_is_in_the_trace_too(
    sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = FastAPI()
    monkeypatch.setattr(server._Front, "end", SimpleNamespace(facts=None))
    server._routers(LENS_KEYS, lambda app: None)(app)
    wrong = {"prompt": "a", "max_tokens": 1, "inspect_lens": {"capture": {"layer": 1}}}
    with TestClient(app) as client:
        answer = client.post("/v1/completions", json=wrong, headers=CLIENT)
    assert answer.status_code == 400
    assert app.user_middleware[0].cls is NotesClient
    assert LensBodies in [item.cls for item in app.user_middleware]
    span = sent.one(traces.REFUSAL)
    assert f"{span.parent.span_id:016x}" == PARENT


@pytest.mark.parametrize("headers", [CLIENT, {}], ids=["of a client", "none"])
def test_a_fetch_is_in_its_clients_trace_or_in_that_of_its_request(
    engine: Engine, sent: Sent, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]
) -> None:
    store = PayloadStore()
    monkeypatch.setattr(responses, "payloads", store)
    binary = CaptureSpec(layers=(0,), transport="binary")
    one = answered(engine, begun(engine, monkeypatch, None, capture=binary))
    (entry,) = one.outputs[0].inspect_lens_json["activations"].values()
    with app_with(store) as client:
        fetched = client.get(f"/v1/activations/{entry['handle']}", headers=headers)
    made, span = sent.one(traces.REQUEST).context, sent.one(traces.FETCH)
    assert span.attributes == {
        "http.response.status_code": 200,
        "inspect_lens.bytes": len(fetched.content),
    }
    if headers:
        assert f"{span.parent.span_id:016x}" == PARENT
        assert [link.context.span_id for link in span.links] == [made.span_id]
    else:
        assert (span.parent.trace_id, span.parent.span_id) == (made.trace_id, made.span_id)


def test_a_fetch_without_a_result_is_an_error(sent: Sent) -> None:
    store = PayloadStore(ttl_s=0.0)
    with app_with(store) as client:
        client.get(f"/v1/activations/{store.put(b'x')}")
        client.get("/v1/activations/unknown")
    found = sent(traces.FETCH)
    assert [span.attributes["http.response.status_code"] for span in found] == [410, 404]
    assert all(span.status.status_code is StatusCode.ERROR for span in found)


def test_a_fault_turns_spans_off_and_hurts_nobody(
    engine: Engine, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(headers: Any) -> Any:
        raise KeyError("x")

    assert traces._holder.made is not None
    monkeypatch.setattr(traces._holder.made, "parent_of", broken)
    request = begun(engine, monkeypatch, CLIENT)
    assert not traces.is_on()
    assert request.trace_headers == CLIENT
    answered(engine, request)
