"""Where spans and metrics are on, and what a process without them does."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from inspect_lens._vllm import telemetry
from inspect_lens._vllm.compat.api_server import is_traced
from inspect_lens._vllm.frontend import state
from inspect_lens._vllm.frontend.state import FrontEnd
from tests.kit.repository import ROOT
from tests.unit.vllm.test_traces import Sent, off

__all__ = ["off"]


def test_a_process_without_spans_imports_nothing() -> None:
    code = (
        "import sys, inspect_lens._vllm.telemetry as t; t.Asked({}).end(200); "
        "t.fetched('h', 0, 200, 1); print(*sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {name for name in run.stdout.split() if name.startswith("opentelemetry")}


def test_without_the_package_there_are_no_spans(off: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    telemetry.begin_spans()
    assert not telemetry.is_on()


@pytest.mark.parametrize(
    ("serves", "endpoint"),
    [(True, None), (True, "http://localhost:4317"), (False, "http://localhost:4317")],
)
def test_a_process_that_serves_begins_metrics_and_spans_where_its_engine_is_traced(
    off: Sent, monkeypatch: pytest.MonkeyPatch, serves: bool, endpoint: str | None
) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(telemetry, "begin_metrics", lambda: begun.append(True))
    monkeypatch.setattr(state, "refusal", lambda config: None)
    monkeypatch.setattr(state, "is_serving", lambda: serves)
    monkeypatch.setattr(
        state,
        "facts_of",
        lambda config, settings: SimpleNamespace(allows_code=False, numerics=None),
    )
    monkeypatch.setattr(state, "install_when_serving", lambda front: None)
    monkeypatch.setattr(state, "links_of", lambda *args: None)
    monkeypatch.setattr(state, "keeps_rows", lambda config, settings: False)
    config = SimpleNamespace(
        lora_config=None,
        parallel_config=SimpleNamespace(
            nnodes=1,
            distributed_executor_backend=None,
            _api_process_count=1,
            data_parallel_external_lb=False,
            data_parallel_hybrid_lb=False,
            data_parallel_rank_local=None,
            data_parallel_size_local=1,
            data_parallel_size=1,
        ),
        observability_config=SimpleNamespace(otlp_traces_endpoint=endpoint),
    )
    front = FrontEnd()
    front.learn(SimpleNamespace(), config)
    # What waits for a disk is done here, and not at the first request.
    assert (front.results._collector is not None) is serves
    if serves:
        front.results.the_collector().close()
    assert is_traced(config) is (endpoint is not None)
    assert telemetry.is_on() is (serves and endpoint is not None)
    assert begun == [True] * serves


def test_the_page_lists_every_span() -> None:
    page = (ROOT / "docs/how-to/serve.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(inspect_lens_\w+)` \| [^|]+ \| [^|]+ \|$", page, re.MULTILINE)
    assert rows == [telemetry.REQUEST, telemetry.FETCH]
