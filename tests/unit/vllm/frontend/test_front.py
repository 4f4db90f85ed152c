"""Several engines in one process: what one of them can use may be registered."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inspect_lens._engine.collect import collector
from inspect_lens._vllm.compat import features
from inspect_lens._vllm.frontend import state
from inspect_lens._vllm.frontend.state import FrontEnd
from inspect_lens._vllm.registered.probe_scores import Reading, Reads
from inspect_lens._vllm.registered.registry import Registry
from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec import (
    EngineAutoencoder,
    EngineFacts,
    EngineProbe,
    LensRequest,
    Splice,
    SteeringVector,
    check_request,
)
from tests.kit.facts import engine_facts


def facts(hidden: int, n_layers: int = 4) -> EngineFacts:
    return engine_facts(
        model=f"m{hidden}", hidden=hidden, n_layers=n_layers, max_step_tokens=32, ring_rows=128,
        bank_rows=16,
    )  # fmt: skip


def probe(hidden: int) -> EngineProbe:
    return EngineProbe(layers=(1,), tensors={"weight": np.ones((1, hidden))})


def test_a_probe_needs_one_engine_that_it_fits() -> None:
    front = FrontEnd()
    front.engines = ["it is disabled", facts(8), facts(16)]
    front.register("a", probe(16))
    with pytest.raises(SpecError, match="width 5"):
        front.register("b", probe(5))
    front.engines = ["it is disabled"]
    with pytest.raises(UnsupportedError, match="it is disabled"):
        front.register("c", probe(16))
    assert front.registry.describe().keys() == {"a"}


def test_a_request_is_judged_against_its_own_engine() -> None:
    front = FrontEnd()
    front.engines = [facts(8), facts(16)]
    front.register("a", probe(16))
    request = LensRequest(probes=["a"])
    check_request(request, facts(16), front.registry.probes)
    with pytest.raises(SpecError, match="m8"):
        check_request(request, facts(8), front.registry.probes)


def test_a_verdict_holds_for_its_engine_until_a_name_changes() -> None:
    front = FrontEnd()
    front.engines = [facts(8), facts(16)]
    ours, theirs = facts(8), facts(16)
    front.register("a", probe(8))
    vector = SteeringVector(activations=np.ones((1, 8)), layer_indices=[0])
    front.register("v", vector)
    request = LensRequest(probes=["a"], edits_named=[{"name": "v"}])
    compiled = front.compile(request, ours)
    assert compiled.request.edits == (vector,)
    assert front.compile(request, ours) is compiled
    with pytest.raises(SpecError, match="m16"):
        front.compile(request, theirs)
    front.register("a", probe(8))  # as it was
    assert front.compile(request, ours).request == compiled.request
    other = SteeringVector(activations=np.ones((1, 8)), layer_indices=[1])
    front.unregister("v")
    front.register("v", other)
    assert front.compile(request, ours).request.edits == (other,)
    front.unregister("a")
    with pytest.raises(SpecError, match="no probe is registered as 'a'"):
        front.compile(request, ours)
    front.register("a", probe(16))
    with pytest.raises(SpecError, match="m8"):
        front.compile(request, ours)


def test_where_graphs_cannot_be_left_out_autoencoders_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    front, eye = FrontEnd(), np.eye(8, dtype=np.float32)
    tensors = {"encoder": eye, "bias": eye[0], "decoder": eye, "decoder_bias": eye[0]}
    front.register("mine", EngineAutoencoder(kind="relu", tensors=tensors))
    request = LensRequest(edits=[Splice(sae="mine", layers=[1])])
    front.compile(request, facts(8))
    monkeypatch.setattr(features._Off, "reasons", {"splice": "this vLLM has no dispatcher"})
    with pytest.raises(UnsupportedError, match=r"whole autoencoders: off .* no dispatcher"):
        front.compile(LensRequest(edits=request.edits), facts(8))
    front.compile(LensRequest(capture={"layers": [1]}), facts(8))


def test_names_of_equal_weights_keep_what_is_their_own() -> None:
    registry = Registry()
    weight = {"weight": np.ones((1, 8))}
    low = EngineProbe(layers=(0,), tensors=weight, threshold=1.0, aggregate="max")
    high = EngineProbe(layers=(0,), tensors=weight, threshold=9.0, aggregate="mean")
    assert low.sha256 == high.sha256
    registry.add("low", low)
    registry.add("high", high)
    uses = [{"name": name, "alarm": "flag"} for name in ("low", "high")]
    reads = Reads(LensRequest(probes=uses).probes, registry.probes)
    reading = Reading(reads, lo=3, n_prompt=3, n_max=6)
    reading.feed(np.asarray([[[1.0, 1.0], [5.0, 5.0]]], dtype=np.float32))
    mine, theirs = reading.receipts()
    assert (mine.aggregate, mine.score, mine.threshold, mine.alarm_position) == ("max", 5, 1, 4)
    assert (theirs.aggregate, theirs.score, theirs.threshold) == ("mean", 3, 9)
    assert theirs.alarm_position is None


def config(n_processes: int) -> Any:
    """As much of vLLM's configuration as is looked at of an engine that is not served."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=1, _api_process_count=n_processes),
        model_config=SimpleNamespace(runner_type="pooling", is_encoder_decoder=False),
        speculative_config=None,
        scheduler_config=SimpleNamespace(async_scheduling=False),
        kv_transfer_config=None,
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace()),
    )


@pytest.mark.parametrize("warns", [True, False])
def test_servers_that_are_killed_at_once_warn_of_what_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, warns: bool
) -> None:
    monkeypatch.setattr(state.payloads, "serve", lambda **_: None)
    monkeypatch.setattr(state.alerts, "describe", lambda: {"to": "host.example"})
    for n, timeout_s in [(2, 0)] if warns else [(2, 15), (1, 0)]:
        front, engine = FrontEnd(), config(n)
        monkeypatch.setattr(front.registry, "share", lambda names: None)
        monkeypatch.setattr(state, "SharedNames", lambda *args: None)
        engine.shutdown_timeout = timeout_s
        front._share(engine)
    assert ("--shutdown-timeout 15" in caplog.text) == warns


def test_several_api_servers_without_a_folder_have_the_names_of_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*args: Any) -> None:
        raise PermissionError("no place")

    monkeypatch.setattr(state, "SharedNames", refused)
    monkeypatch.setattr(state, "install_when_serving", lambda front: None)
    monkeypatch.setattr(
        "inspect_lens._vllm.compat.engine_facts._may_span_hosts", lambda config: False
    )
    monkeypatch.setattr(state.payloads, "serve", lambda **_: None)
    front = FrontEnd()
    front.registry.add("of-the-start", probe(8))
    front.learn(SimpleNamespace(), config(2))
    front.engines = [facts(8)]
    assert front.describe()["api_servers"] == 2
    assert front.registry.describe().keys() == {"of-the-start"}
    vector = SteeringVector(activations=np.ones((1, 8)), layer_indices=[0])
    for change in (
        lambda: front.register("a", probe(8)),
        lambda: front.register("v", vector),
        lambda: front.unregister("of-the-start"),
    ):
        with pytest.raises(
            UnsupportedError, match=r"2 API server processes.*INSPECT_LENS_REGISTER"
        ):
            change()
    assert front.registry.describe().keys() == {"of-the-start"}
    front.learn(SimpleNamespace(), config(1))
    front.engines = [facts(8)]
    front.register("a", probe(8))
    front.unregister("a")


@pytest.mark.parametrize("n_processes", [1, 4])
def test_api_servers_share_the_memory_that_is_kept_of_results(
    monkeypatch: pytest.MonkeyPatch, n_processes: int
) -> None:
    monkeypatch.setattr(state, "install_when_serving", lambda front: None)
    monkeypatch.setattr(state, "SharedNames", lambda *args: SimpleNamespace(folder=Path("x")))
    monkeypatch.setattr(state.payloads, "serve", lambda **_: None)
    monkeypatch.setattr(
        "inspect_lens._vllm.compat.engine_facts._may_span_hosts", lambda config: False
    )
    monkeypatch.setattr(collector, "memory_bytes", lambda: 64 << 30)
    front = FrontEnd()
    monkeypatch.setattr(front.registry, "share", lambda names: None)
    front.learn(SimpleNamespace(), config(n_processes))
    assert front.results.address
    made = front.results.the_collector()
    try:
        assert made.memory.most_bytes == (16 << 30) // n_processes
    finally:
        made.close()
