"""Metrics of an API server: what each event adds, and that none of them hurts anybody."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry, multiprocess

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._vllm import telemetry
from inspect_lens._vllm.compat.features import pass_over
from inspect_lens._vllm.frontend import state, wrappers
from inspect_lens._vllm.frontend.state import FrontEnd
from inspect_lens._vllm.http import bodies, payloads
from inspect_lens._vllm.http.payloads import PayloadStore
from inspect_lens._vllm.http.refusals import refuse
from inspect_lens._vllm.http.server import add_routes, shows_key
from inspect_lens._vllm.registered.rows import BLOCK, RowCache, reuse_of, with_known_rows
from inspect_lens.errors import CapacityError, CaptureError, LensError, SpecError
from inspect_lens.spec import ENVELOPE_KEY, TensorData
from tests.kit.repository import ROOT
from tests.kit.waiting import until
from tests.unit.vllm.frontend.test_front import facts, probe
from tests.unit.vllm.frontend.test_sealing import IDS, call, extra, parameters, process, steer
from tests.unit.vllm.results.test_ahead import N_PROMPT, Engine
from tests.unit.vllm.results.test_streaming import going_on


class Read:
    """Values of a registry; None where a series is not shown."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"inspect_lens_{name}", labels)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    monkeypatch.setattr(telemetry._metric_holder, "made", None)
    registry = CollectorRegistry()
    telemetry.begin_metrics(registry)
    return Read(registry)


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    front = FrontEnd()
    front.engines = [facts(8)]
    front.register("p", probe(8))
    monkeypatch.setattr(state._Holder, "front_end", front)
    return SimpleNamespace(
        inspect_lens_facts=facts(8),
        inspect_lens_refusal=None,
        model_config=SimpleNamespace(max_model_len=64),
    )


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.worker.stepper.close()
    made.collector.close()


def test_registered_are_the_metrics_that_the_page_lists(read: Read) -> None:
    shown = {
        sample.name
        for family in read.registry.collect()
        for sample in family.samples
        if not sample.name.endswith(("_created", "_bucket", "_sum"))
    }
    labelled = {m.name for m in telemetry.METRICS if m.labels} - {"inspect_lens_requests_total"}
    expected = {m.name for m in telemetry.METRICS} - labelled
    assert {name.removesuffix("_count") for name in shown} == expected
    page = (ROOT / "docs/how-to/serve.md").read_text(encoding="utf-8")
    table = page.partition("<!-- /metrics")[0]
    assert set(re.findall(r"^\| `(inspect_lens_\w+)`", table, re.MULTILINE)) == {
        m.name for m in telemetry.METRICS
    }
    assert all(f"`{kind}`" in page for kind in telemetry.KINDS)


def test_a_request_counts_once_for_each_kind_when_it_is_sealed(read: Read, processor: Any) -> None:
    call(processor, IDS, parameters(extra(capture={}), {}))
    assert read("requests_total", kind="capture") == 0, "judged, and not handed on yet"
    process(processor, IDS, parameters(extra(capture={}, probes=["p"]), {}))
    process(processor, IDS, parameters(steer(), {}))
    process(processor, IDS, parameters({}, {}))
    found = {kind: read("requests_total", kind=kind) for kind in telemetry.KINDS}
    assert found == dict.fromkeys(telemetry.KINDS, 0) | {"capture": 1, "probe": 1, "edit": 1}


@pytest.mark.parametrize("edge", [call, process])
def test_a_refusal_counts_once_by_status_and_error(read: Read, processor: Any, edge: Any) -> None:
    with pytest.raises(SpecError):
        edge(processor, IDS, parameters(extra(capture={"layers": [9]}), {}))
    assert read("refusals_total", status="400", error="SpecError") == 1
    assert read("requests_total", kind="capture") == 0


def test_a_full_store_refuses_before_a_request_is_scheduled(
    read: Read, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise CapacityError("full")

    monkeypatch.setattr(wrappers, "judge_early", full)
    with pytest.raises(Exception, match="full"):
        call(processor, IDS, parameters(extra(capture={}), {}))
    assert read("refusals_total", status="429", error="CapacityError") == 1


def test_a_fault_of_ours_is_a_failure_and_that_of_a_plain_request_is_nobodys(read: Read) -> None:
    with pytest.raises(CaptureError):
        pass_over(KeyError("x"), uses_lens=True)
    pass_over(KeyError("x"), uses_lens=False)
    assert read("failures_total", error="CaptureError") == 1


def test_refusals_of_middleware_and_of_keys(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    async def send(message: Any) -> None:
        pass

    asyncio.run(refuse(SpecError("no"), send))
    assert read("refusals_total", status="400", error="SpecError") == 1
    monkeypatch.setenv("INSPECT_LENS_REGISTRY_KEY", "k")
    assert shows_key(SimpleNamespace(headers={"authorization": "Bearer k"}), "registry_key")
    assert read("refusals_total", status="401", error="Unauthorized") is None
    assert not shows_key(SimpleNamespace(headers={}), "registry_key")
    assert read("refusals_total", status="401", error="Unauthorized") == 1


def captured(engine: Engine, n_fed: int = N_PROMPT) -> str:
    key = engine.start(LensRequest(capture=CaptureSpec(layers=(0,), transport="binary")))
    if n_fed:
        engine.step([key], 0, n_fed)
    return key


def test_a_result_that_the_store_cannot_take_is_a_failure(
    read: Read, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = engine.end([captured(engine)], n_completion=1)
    monkeypatch.setattr(bodies, "payloads", PayloadStore(max_bytes=2, each_bytes=0))
    with pytest.raises(LensError, match="half of the binary store"):
        bodies.as_json(one.outputs[0], [])
    assert read("failures_total", error="UnsupportedError") == 1
    assert read("rows_total") == 0


def test_rows_that_are_streamed_count_once_and_as_the_receipt_counts_them(
    read: Read, engine: Engine
) -> None:
    key = engine.start(LensRequest(capture=CaptureSpec(layers=(0, 5)), stream_results=True))
    engine.step([key], 0, N_PROMPT)
    engine.settle()
    first = going_on(key, 1)
    engine.results.carry(first, is_kept=True)
    for _ in range(2):  # as where another choice of the output has ended
        wrappers._encode(first, bodies.Body())
    assert read("rows_total") == 2 * N_PROMPT
    engine.run([key])
    (last,) = engine.end([key])
    wrappers._encode(last, bodies.Body())
    assert read("rows_total") == last.inspect_lens.capture.rows
    assert read("bytes_total") == last.activations["residual_stream"].nbytes


def held(read: Read, store: PayloadStore) -> tuple[float | None, ...]:
    store.report()
    return read("store_results"), read("store_bytes"), read("store_expired_total")


def test_the_store_shows_what_waits_and_what_nobody_fetched(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.chain([0.0] * 3, itertools.repeat(61.0))
    monkeypatch.setattr(payloads, "time", SimpleNamespace(monotonic=clock.__next__))
    store = PayloadStore(max_bytes=40, each_bytes=0, ttl_s=60, on_change=telemetry.stored)
    store.report()
    assert read("store_limit_bytes") == 40
    first, second = store.put(b"x" * 8), store.put(b"y" * 4)
    assert held(read, store) == (2, 12, 0)
    store.get(first)
    assert held(read, store) == (1, 4, 0)
    assert store.get(second) is None
    assert held(read, store) == (0, 0, 1)
    store.discard([store.put(b"z")])
    assert held(read, store) == (0, 0, 1)


def test_the_store_tells_what_it_holds_once_for_many_results_and_when_it_is_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream has a result for each event, and gauges take as long as all else of one."""
    monkeypatch.setattr(payloads, "_LOOK_S", 0.2)
    told: list[tuple[int, int]] = []
    store = PayloadStore(
        max_bytes=400, each_bytes=0, on_change=lambda n, n_bytes, *_: told.append((n, n_bytes))
    )
    handles = [store.put(b"x" * 4) for _ in range(20)]
    assert not told
    assert until(lambda: told)
    assert told == [(20, 80)]
    for handle in handles:
        store.get(handle)
    assert until(lambda: told[1:])
    assert told[1:] == [(0, 0)]


def test_handles_without_a_result_count_by_status(read: Read) -> None:
    app, store = FastAPI(), PayloadStore(ttl_s=0.0)
    add_routes(app, lambda: None, store)
    with TestClient(app) as client:
        assert client.get(f"/v1/activations/{store.put(b'x')}").status_code == 410
        assert client.get("/v1/activations/unknown").status_code == 404
    assert read("refusals_total", status="410", error="ExpiredHandle") == 1
    assert read("refusals_total", status="404", error="UnknownHandle") == 1


def test_positions_whose_rows_are_known_are_hits(read: Read, processor: Any) -> None:
    cache, n = RowCache(1 << 20, is_served=True), 2 * BLOCK + 3
    prompt = {"prompt_token_ids": list(range(n))}
    for turn in range(2):
        core = process(processor, prompt, parameters(extra(capture={"layers": [1]}), {}))
        vars(core).update(lora_request=None, mm_features=None)
        packed = with_known_rows(core.sampling_params.extra_args[ENVELOPE_KEY], core, cache)
        reuse = reuse_of(packed)
        assert reuse is not None
        assert read("row_cache_queries_total") == (turn + 1) * n
        assert read("row_cache_hits_total") == turn * 2 * BLOCK == reuse.n_positions
        rows = np.ones((1, n, 8), np.float32)
        if not turn:
            reuse.whole(TensorData(rows, "float32"), ())
            cache.settle()


def test_a_fault_of_a_metric_turns_them_off_and_hurts_nobody(
    read: Read, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {**(telemetry._metric_holder.made or {})}
    del made["inspect_lens_requests_total"]
    monkeypatch.setattr(telemetry._metric_holder, "made", made)
    core = process(processor, IDS, parameters(extra(capture={}), {}))
    assert core.sampling_params.extra_args
    assert telemetry._metric_holder.made is None


def test_metrics_that_cannot_be_registered_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry._metric_holder, "made", None)
    registry = CollectorRegistry()
    telemetry.begin_metrics(registry)
    telemetry.begin_metrics(registry)
    assert len(telemetry._metric_holder.made or {}) == len(telemetry.METRICS), (
        "a second engine changes nothing"
    )
    monkeypatch.setattr(telemetry._metric_holder, "made", None)
    telemetry.begin_metrics(registry)
    assert telemetry._metric_holder.made is None, "somebody has these names"
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    telemetry.begin_metrics()
    assert telemetry._metric_holder.made is None
    telemetry.note("inspect_lens_running", 3)


def test_several_api_servers_show_their_sum(tmp_path: Any) -> None:
    code = (
        "from inspect_lens._vllm import telemetry; telemetry.begin_metrics(); "
        "telemetry.note('inspect_lens_running', 2); "
        "telemetry.stored(1, 10, 100, 0); telemetry.refused_as(400, 'SpecError'); "
        "input('made\\n')"
    )
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    run: dict[str, Any] = {"env": environment, "text": True, "stdout": subprocess.PIPE}
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, **run)
        for _ in range(2)
    ]
    try:
        for one in both:
            assert one.stdout is not None
            assert "made" in one.stdout.readline()
        # As vLLM's `get_prometheus_registry` does.
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry, str(tmp_path))
        read = Read(registry)
        assert read("running") == 4
        assert read("store_limit_bytes") == 200
        assert read("refusals_total", status="400", error="SpecError") == 2
    finally:
        for one in both:
            one.communicate("\n")


def test_a_process_that_serves_nothing_imports_nothing() -> None:
    note = "m.note('inspect_lens_running', 1)"
    code = f"import sys, inspect_lens._vllm.telemetry as m; {note}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "prometheus_client" not in run.stdout.split()
