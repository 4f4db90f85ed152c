"""Which KV connectors are known, and what is refused beside one that is not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from inspect_lens import CaptureSpec, LensRequest, SteeringVector
from inspect_lens._settings import Settings
from inspect_lens._vllm.compat import features
from inspect_lens._vllm.compat.connectors import behaviours_of, no_steering
from inspect_lens._vllm.compat.engine_facts import facts_of, refusal
from inspect_lens._vllm.registered.rows import keeps_rows
from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec import Zero, check_request
from tests.unit.vllm.compat.test_facts import config

MINE = "MyConnector"


def engine(name: str = "ExampleConnector", **options: Any) -> Any:
    transfer = KVTransferConfig(kv_connector=name, kv_role="kv_both", **options)
    return config(kv_transfer_config=transfer, model_config__is_hybrid=False)


def several(*parts: dict[str, Any]) -> Any:
    return engine("MultiConnector", kv_connector_extra_config={"connectors": list(parts)})


@pytest.mark.parametrize(
    ("made", "found"),
    [
        (config(), {}),
        (engine(), {"ExampleConnector": "tokens"}),
        (engine("OffloadingConnector"), {"OffloadingConnector": "blocks"}),
        (engine("NixlConnector"), {"NixlConnector": "request"}),
        (engine(MINE, kv_connector_module_path="mine.connector"), {MINE: None}),
        # Somebody else's by a name that we know.
        (engine(kv_connector_module_path="mine"), {"ExampleConnector": None}),
        (
            engine(
                "LMCacheConnectorV1Dynamic",
                kv_connector_module_path="lmcache.integration.vllm.lmcache_connector_v1",
            ),
            {"LMCacheConnectorV1Dynamic": "tokens"},
        ),
        (
            several(
                {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
                {"kv_connector": MINE, "kv_connector_module_path": "mine"},
            ),
            {"NixlConnector": "request", MINE: None},
        ),
        (
            several(
                {"kv_connector": "ExampleConnector", "kv_connector_module_path": "mine"},
                {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
            ),
            {"ExampleConnector": None},
        ),
    ],
)
def test_what_connectors_find_blocks_by(made: Any, found: dict[str, Any]) -> None:
    assert behaviours_of(made, Settings()) == found
    assert refusal(made) is None
    assert bool(no_steering(made, Settings())) == (None in found.values())


def test_the_operator_says_what_a_connector_does() -> None:
    made = engine(MINE, kv_connector_module_path="mine")
    told = Settings(kv_connectors=f"Other=blocks, {MINE}=tokens")
    assert behaviours_of(made, told) == {MINE: "tokens"}
    assert no_steering(made, told) == ""


@pytest.mark.parametrize("text", [MINE, f"{MINE}=block", "=blocks", f"{MINE}=blocks=tokens"])
def test_a_wrong_word_of_the_operator_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("INSPECT_LENS_KV_CONNECTORS", text)
    with pytest.raises(SpecError, match="blocks, tokens, request"):
        facts_of(engine(), Settings.load())
    assert facts_of(config(), Settings.load()).no_steering == ""


def test_beside_an_unknown_connector_only_what_steers_is_refused() -> None:
    made = engine(MINE, kv_connector_module_path="mine")
    facts = replace(facts_of(made, Settings()), allows_code=True)
    check_request(LensRequest(capture=CaptureSpec(layers=[1])), facts)
    vector = SteeringVector(activations=[[1.0] * 8], layer_indices=[1])
    for field, asked in (
        ("edits", LensRequest(edits=(vector,))),
        ("edits", LensRequest(edits=(Zero(layers=[1]),))),
    ):
        with pytest.raises(UnsupportedError, match=rf"^{field}: .*{MINE}=tokens"):
            check_request(asked, facts)
        check_request(asked, replace(facts, no_steering=""))


def test_beside_a_scheduler_of_somebody_else_nothing_is_served() -> None:
    made = engine()
    made.scheduler_config.scheduler_cls = "mine.Scheduler"
    assert "scheduler" in str(refusal(made))
    made.scheduler_config.scheduler_cls = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
    assert refusal(made) is None


def test_without_a_name_of_vllm_engines_with_a_connector_are_not_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(features._Off, "reasons", {})
    features.turn_off("connectors", "this vLLM has no such name")
    assert "no such name" in str(refusal(engine()))
    assert refusal(config()) is None


def test_a_hybrid_model_with_blocks_of_other_engines_keeps_no_rows() -> None:
    def made(name: str, hybrid: bool) -> Any:
        found = engine(name)
        found.model_config.is_hybrid = hybrid
        return found

    assert keeps_rows(made("NixlConnector", hybrid=False), Settings())
    assert keeps_rows(made("OffloadingConnector", hybrid=True), Settings())
    assert not keeps_rows(made("NixlConnector", hybrid=True), Settings())


def test_persistent_hooks_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from inspect_lens._vllm.frontend import admission

    facts = facts_of(engine(MINE, kv_connector_module_path="mine"), Settings())
    processor = SimpleNamespace(
        inspect_lens_facts=facts, inspect_lens_book=SimpleNamespace(hooks=[object()])
    )
    with pytest.raises(UnsupportedError, match="persistent hooks"):
        admission.compiled_of(processor, SimpleNamespace(extra_args=None, n=1))
