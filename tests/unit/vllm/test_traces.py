"""Spans of lens requests: their place in a trace, what they say, and that none does harm."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from starlette.responses import JSONResponse
from vllm.tracing import extract_trace_context, instrument_manual

from inspect_lens._vllm import telemetry
from inspect_lens._vllm.http.bodies import SERVED, LensBodies
from inspect_lens._vllm.http.payloads import PayloadStore
from inspect_lens._vllm.http.server import add_routes
from inspect_lens.errors import CaptureError
from inspect_lens.spec import CaptureReceipt, ProbeReceipt, Receipt, SteerReceipt

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CLIENT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
LENS = {"prompt": "a", "inspect_lens": {"capture": {"layers": [0, 2]}, "probes": ["p"]}}


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
    monkeypatch.setattr(telemetry._span_holder, "made", None)
    return made


@pytest.fixture
def sent(off: Sent) -> Sent:
    telemetry.begin_spans()
    return off


def probe(name: str, alarm: int | None) -> ProbeReceipt:
    return ProbeReceipt(
        name=name, sha256="", aggregate="mean", score=0.5, n_tokens=1, first_position=0,
        alarm_position=alarm,
    )  # fmt: skip


RECEIPT = Receipt(
    n_prompt=3,
    n_completion=2,
    capture=CaptureReceipt(
        site="resid_post", layers=(0, 2), n_positions=4, first_position=0, dtype="float32",
        reduce="none", rows=8, cached_positions=1,
    ),
    steer=SteerReceipt(layers=(2,), sites=("resid_post",), n_tokens=4, cached_tokens=0, vectors=()),
    probes=(probe("p", 3), probe("q", None)),
    cache_salted=True,
    paths=(),
    engine="inspect_lens",
    version="0",
    vllm_version="0",
)  # fmt: skip


class Server:
    """Answers as vLLM's handlers do: each request has a span, in the trace of its headers."""

    def __init__(self, error: Exception | None = None, *, is_left: bool = False) -> None:
        self.app, self.store, self.error = FastAPI(), PayloadStore(), error
        self.headers: list[dict[str, str]] = []
        self.is_left = is_left
        add_routes(self.app, lambda: None, self.store)
        self.app.add_route("/v1/completions", self.answer, methods=["POST"])
        self.app.add_middleware(LensBodies, front_end=lambda: None)
        self.client = TestClient(self.app)

    async def answer(self, request: Any) -> Any:
        body, headers = SERVED.get(), dict(request.headers)
        self.headers.append(headers)
        context = extract_trace_context(headers)
        instrument_manual(span_name="llm_request", start_time=time.time_ns(), context=context)
        if self.error is not None and body is not None:
            body.error = self.error
            return JSONResponse({}, status_code=500)
        if body is not None and not self.is_left:
            entry = {"residual_stream": {"handle": self.store.put(b"abc")}}
            body.results[0] = {"inspect_lens": RECEIPT.model_dump(mode="json")}
            body.results[0]["activations"] = entry
            telemetry.remember(body.span, body.results[0])
        return JSONResponse({"choices": [{}]})

    def ask(self, body: dict[str, Any] = LENS, **headers: str) -> Any:
        return self.client.post("/v1/completions", json=body, headers=headers)


def headers_of(span: Any) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


@pytest.mark.parametrize("headers", [CLIENT, {}], ids=["of a client", "none"])
def test_a_span_stands_between_the_clients_and_vllms(sent: Sent, headers: dict[str, str]) -> None:
    server = Server()
    assert server.ask(**headers).status_code == 200
    ours, theirs = sent.one(telemetry.REQUEST), sent.one("llm_request")
    assert theirs.parent.span_id == ours.context.span_id
    assert theirs.context.trace_id == ours.context.trace_id
    (told,) = server.headers
    assert told["traceparent"] == headers_of(ours)
    if headers:
        assert f"{ours.context.trace_id:032x}" == TRACE
        assert f"{ours.parent.span_id:016x}" == PARENT
        assert told["tracestate"] == "vendor=1"
    else:
        assert ours.parent is None
    assert ours.end_time >= theirs.end_time
    assert dict(ours.attributes) == {
        "inspect_lens.asked": ("capture", "probe"),
        "inspect_lens.layers": (0, 2),
        "inspect_lens.rows": 8,
        "inspect_lens.cached_positions": 1,
        "inspect_lens.steered_layers": (2,),
        "inspect_lens.steered_tokens": 4,
        "inspect_lens.probes": ("p", "q"),
        "inspect_lens.alarms": ("p",),
        "http.response.status_code": 200,
    }
    assert ours.status.status_code is StatusCode.UNSET


def test_an_unsampled_trace_stays_unsampled_and_keeps_its_parent(sent: Sent) -> None:
    server, headers = Server(), {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    assert server.ask(**headers).status_code == 200
    assert server.headers[0]["traceparent"] == headers["traceparent"]
    assert sent() == []


@pytest.mark.parametrize("body", [{"prompt": "a"}, {"prompt": 'what is "inspect_lens"?'}])
def test_a_request_that_asks_nothing_has_vllms_span_alone(sent: Sent, body: Any) -> None:
    server = Server()
    server.ask(body, **CLIENT)
    assert server.headers[0]["traceparent"] == CLIENT["traceparent"]
    assert {span.name for span in sent()} == {"llm_request"}


def test_nothing_is_done_where_vllm_does_not_trace(off: Sent) -> None:
    server = Server()
    server.ask(**CLIENT)
    assert server.headers[0]["traceparent"] == CLIENT["traceparent"]
    assert {span.name for span in off()} == {"llm_request"}


def test_a_request_that_fails_says_why(sent: Sent) -> None:
    Server(CaptureError("a worker has gone")).ask()
    span = sent.one(telemetry.REQUEST)
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "a worker has gone"
    assert span.attributes["error.type"] == "CaptureError"
    assert "inspect_lens.aborted" not in span.attributes


def test_a_request_whose_client_goes_away_is_aborted(sent: Sent) -> None:
    Server(is_left=True).ask()
    span = sent.one(telemetry.REQUEST)
    assert span.attributes["inspect_lens.aborted"]
    assert span.status.status_code is StatusCode.UNSET


def test_a_refusal_is_in_its_clients_trace(sent: Sent) -> None:
    wrong = {"prompt": "a", "inspect_lens": {"capture": {"layer": 1}}}
    answer = Server().ask(wrong, **CLIENT)
    span = sent.one(telemetry.REQUEST)
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.status.description == answer.json()["error"]["message"]
    assert span.attributes == {"error.type": "SpecError", "http.response.status_code": 400}


@pytest.mark.parametrize("headers", [CLIENT, {}], ids=["of a client", "none"])
def test_a_fetch_is_in_its_clients_trace_or_in_that_of_its_request(
    sent: Sent, headers: dict[str, str]
) -> None:
    server = Server()
    handle = server.ask().json()["activations"]["residual_stream"]["handle"]
    assert server.client.get(f"/v1/activations/{handle}", headers=headers).content == b"abc"
    made, span = sent.one(telemetry.REQUEST).context, sent.one(telemetry.FETCH)
    assert span.attributes == {"http.response.status_code": 200, "inspect_lens.bytes": 3}
    if headers:
        assert f"{span.parent.span_id:016x}" == PARENT
        assert [link.context.span_id for link in span.links] == [made.span_id]
    else:
        assert (span.parent.trace_id, span.parent.span_id) == (made.trace_id, made.span_id)
    assert server.client.get(f"/v1/activations/{handle}").status_code == 410
    failed = sent(telemetry.FETCH)[-1]
    assert failed.attributes["http.response.status_code"] == 410
    assert failed.status.status_code is StatusCode.ERROR


def test_a_fault_turns_spans_off_and_hurts_nobody(
    sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry._span_holder.made, "propagator", None)
    server = Server()
    assert json.loads(server.ask(**CLIENT).content)["inspect_lens"]
    assert not telemetry.is_on()
    assert server.headers[0]["traceparent"] == CLIENT["traceparent"]
