"""The tiers that act on a request, put together in one place, and the file that sets the first."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from inspect_lens import engine
from inspect_lens._engine.protocol.messages import seal
from inspect_lens._vllm import plugin
from inspect_lens._vllm.frontend import state
from inspect_lens._vllm.frontend.admission import _placed, compiled_of, with_positions_of
from inspect_lens._vllm.frontend.state import FrontEnd
from inspect_lens._vllm.http.bodies import with_config_of
from inspect_lens._vllm.registered.contents import SERVER_NAME, compose, read_server_file
from inspect_lens.errors import LensError, SpecError, UnsupportedError
from inspect_lens.spec import (
    NO_REQUEST,
    Add,
    EngineConfig,
    EngineEdits,
    EngineProbe,
    Gate,
    LensRequest,
    Rule,
    ServerConfig,
)
from tests.unit.vllm.compat.test_facts import config as engine_config
from tests.unit.vllm.frontend.test_front import facts

HIDDEN = 8


def add(i: int) -> Add:
    return Add(vector=np.full(HIDDEN, i, np.float32), layers=[1])


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> FrontEnd:
    made = FrontEnd()
    made.engines = [facts(HIDDEN)]
    weights = {"weight": np.ones((1, HIDDEN))}
    made.register("p", EngineProbe(layers=(1,), tensors=weights, threshold=1.0, aggregate="last"))
    made.register("v", EngineEdits(edits=[add(1)]))
    made.register("a", EngineConfig(edits=[add(3)], edits_named=["v"], probes=["p"]))
    made.register("b", EngineConfig(edits=[add(4)]))
    monkeypatch.setattr(state._Holder, "front_end", made)
    return made


def serve(front: FrontEnd, **config: Any) -> ServerConfig:
    made = ServerConfig(**config)
    front.register(SERVER_NAME, made, replace=True)
    return made


def values(request: LensRequest) -> list[float]:
    return [float(edit.vector.to_float32()[0]) for edit in request.edits]


def test_tiers_act_in_their_order(front: FrontEnd) -> None:
    serve(front, edits=[add(2)], edits_named=["v"])
    asked = LensRequest(configs=["b", "a"], edits=[add(6)], edits_named=["v"])
    composed, tiers = compose(front.registry, asked)
    assert values(composed) == [1, 2, 4, 1, 3, 1, 6]
    assert [(t.tier, t.name, t.edits) for t in tiers.receipts] == [
        ("server", None, 2), ("named", "b", 1), ("named", "a", 2),
    ]  # fmt: skip
    assert (composed.configs, composed.edits_named, composed.server) == ((), (), None)


def test_a_client_opens_no_gate_that_the_operators_own_rule_denies(front: FrontEnd) -> None:
    gate = Gate(direction=np.ones(HIDDEN), layer=0, scope="rest", conversation=True)
    own = gate.model_copy(update={"threshold": 3.0})
    keys = (gate.key, own.key)
    asked = LensRequest(
        edits=[add(9).model_copy(update={"when": own, "positions": "completion"})], open_gates=keys
    )
    for rule, kept in ((gate, keys), (Rule(none=[gate]), keys[1:]), (Rule(any=[gate]), keys)):
        edit = add(7).model_copy(update={"when": rule, "positions": "completion"})
        serve(front, edits=[edit])
        made, tiers = compose(front.registry, asked)
        assert made.open_gates == kept
        denied = tuple(key for key in keys if key not in kept)
        assert tiers.receipts[0].denied_open_gates == denied, "the receipt says what was left out"


def test_a_request_says_how_its_configurations_probe_is_read_and_not_the_servers(
    front: FrontEnd,
) -> None:
    use = {"name": "p", "alarm": "flag"}
    serve(front, probes=[use])
    asked = LensRequest(configs=["a"], probes=[{"name": "p", "aggregate": "max"}])
    composed, tiers = compose(front.registry, asked)
    assert [(u.aggregate, u.alarm) for u in composed.probes] == [("max", None), (None, "flag")]
    assert tiers.n_own_probes == 1
    reads = front.compile(asked, front.engines[0]).reads
    assert reads is not None
    assert len(reads.uses) == 2


def test_two_configurations_do_not_read_one_probe_in_two_ways(front: FrontEnd) -> None:
    for name, aggregate in (("same", None), ("other", "max")):
        use = {"name": "p", "aggregate": aggregate}
        front.register(name, EngineConfig(edits=[add(1)], probes=[use]))
    composed, _ = compose(front.registry, LensRequest(configs=["a", "same"]))
    assert len(composed.probes) == 1
    with pytest.raises(SpecError, match=r"configs: 'other' has other options for probe 'p'"):
        compose(front.registry, LensRequest(configs=["a", "other"]))
    asked = LensRequest(configs=["a", "other"], probes=[{"name": "p", "aggregate": "mean"}])
    assert [use.aggregate for use in compose(front.registry, asked)[0].probes] == ["mean"]


def test_blocks_of_the_prefix_cache_differ_where_it_acts_and_are_those_of_the_same_edits(
    front: FrontEnd,
) -> None:
    known = front.engines[0]
    assert not isinstance(known, str)

    def salt(request: LensRequest) -> str | None:
        compiled = front.compile(request, known).request
        return seal(compiled, known, reply="", n_prompt=9, max_tokens=4).steer_hash

    inline = salt(LensRequest(edits=[add(2)]))
    assert salt(NO_REQUEST) is None
    serve(front, edits=[add(2)], may_opt_out=True)
    assert salt(NO_REQUEST) == inline != None  # noqa: E711
    assert salt(LensRequest(server=False)) is None
    assert salt(LensRequest(server=False, edits=[add(2)])) == inline
    assert salt(LensRequest(edits=[add(2)])) != inline


def test_what_was_compiled_before_is_compiled_anew_when_it_changes(front: FrontEnd) -> None:
    known = front.engines[0]
    first = serve(front, edits=[add(2)])
    compiled = front.compile(NO_REQUEST, known)
    assert front.compile(NO_REQUEST, known) is compiled
    second = serve(front, edits=[add(5)])
    found = front.compile(NO_REQUEST, known)
    assert values(compiled.request) == [2]
    assert values(found.request) == [5]
    hashes = [one.tiers.receipts[0].sha256 for one in (compiled, found)]
    assert hashes == [front.registry.sha256_of(one) for one in (first, second)]
    assert len(set(hashes)) == 2
    front.unregister(SERVER_NAME)
    assert not front.compile(NO_REQUEST, known).tiers.receipts


def test_what_it_names_stays_and_what_does_not_fit_changes_nothing(front: FrontEnd) -> None:
    serve(front, edits_named=["v"], probes=["p"])
    for name in ("v", "p"):
        with pytest.raises(SpecError, match="used by what this server does"):
            front.unregister(name)
    with pytest.raises(SpecError, match="used by what this server does"):
        front.register("v", EngineEdits(edits=[add(9)]), replace=True)
    with pytest.raises(LensError, match="no edits are registered as 'w'"):
        serve(front, edits_named=["w"])
    with pytest.raises(LensError):
        serve(front, edits=[Add(vector=np.ones(HIDDEN + 1), layers=[1])])
    assert front.describe_server()["acts"]["edits_named"] == ["v"]
    assert SERVER_NAME not in front.registry.describe()


def test_what_a_configuration_names_stays_while_it_is_there(front: FrontEnd) -> None:
    for change in (
        lambda: front.unregister("v"),
        lambda: front.unregister("p"),
        lambda: front.register("v", EngineEdits(edits=[add(9)]), replace=True),
    ):
        with pytest.raises(SpecError, match="is used by the configuration 'a'"):
            change()
    front.unregister("a")
    front.unregister("v")


def test_a_hash_is_of_the_contents_that_are_named(front: FrontEnd) -> None:
    def hashes() -> list[str]:
        tiers = compose(front.registry, LensRequest(configs=["a"]))[1]
        return [one.sha256 for one in tiers.receipts]

    config = front.registry.config("a")
    serve(front, edits_named=["v"])
    before, about = hashes(), front.describe_server()["acts"]["sha256"]
    assert about == before[0]
    assert front.registry.describe()["a"]["sha256"] == before[1]
    for name in (SERVER_NAME, "a"):
        front.unregister(name)
    front.register("v", EngineEdits(edits=[add(9)]), replace=True)
    front.register("a", config)
    serve(front, edits_named=["v"])
    assert not set(hashes()) & set(before)


def test_a_configuration_that_names_nothing_is_refused_under_the_lock(front: FrontEnd) -> None:
    for part in ({"edits_named": ["gone"]}, {"probes": ["gone"]}, {"probes": ["v"]}):
        for name, kind in (("c", EngineConfig), (SERVER_NAME, ServerConfig)):
            with pytest.raises(SpecError, match=r"(is|are) registered as"):
                front.registry.add(name, kind(**part), replace=True)


@pytest.mark.parametrize(
    "config",
    [
        {"edits_named": ["nothere"]},
        {"probes": ["gone"]},
        {"edits": [{"op": "zero", "layers": [99]}]},
    ],
)
def test_an_engine_whose_configurations_do_not_fit_says_so_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"config": config}))
    monkeypatch.setenv("INSPECT_LENS_REGISTER", f"x={path}")
    monkeypatch.setattr(state, "install_when_serving", lambda front: None)
    front = FrontEnd()
    processor = SimpleNamespace()
    front.learn(processor, engine_config())
    assert re.search("INSPECT_LENS_REGISTER: x: .*(99|nothere|gone)", front.refusal or "")


@pytest.mark.parametrize("item", [EngineEdits(edits=[add(1)]), EngineConfig(edits=[add(1)])])
def test_no_client_can_name_it(front: FrontEnd, item: Any) -> None:
    with pytest.raises(SpecError, match="allowed are 1 to 128 letters"):
        front.register(SERVER_NAME, item)
    with pytest.raises(SpecError, match="allowed are 1 to 128 letters"):
        LensRequest(configs=[SERVER_NAME])


def processor(front: FrontEnd) -> Any:
    return SimpleNamespace(
        inspect_lens_facts=front.engines[0],
        inspect_lens_refusal=None,
        get_tokenizer=lambda: None,
        tokenizer=None,
    )


def test_requests_that_ask_for_nothing_have_it_too(front: FrontEnd) -> None:
    plain = SimpleNamespace(extra_args=None, n=1)
    assert compiled_of(processor(front), plain) is None
    serve(front, edits=[add(2)])
    found = compiled_of(processor(front), plain)
    assert found is not None
    assert found.asked is NO_REQUEST
    assert found.tiers.acts
    assert compiled_of(processor(front), SimpleNamespace(extra_args=None)) is None, "it pools"
    out = SimpleNamespace(extra_args={"inspect_lens": {"server": False}}, n=1)
    with pytest.raises(UnsupportedError, match="allows none to leave them out"):
        compiled_of(processor(front), out)


def test_a_refusal_says_that_the_servers_edits_count_too(front: FrontEnd) -> None:
    serve(front, edits=[add(2)])
    wrong = LensRequest(capture={"layers": [99]})
    with pytest.raises(LensError, match="set for all requests count, too"):
        front.compile(wrong, front.engines[0])
    front.unregister(SERVER_NAME)
    chosen = wrong.model_copy(update={"configs": ("b",)})
    with pytest.raises(LensError, match="of the configurations that were chosen count, too"):
        front.compile(chosen, front.engines[0])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"edits": [{"op": "zero", "layers": [1], "positions": [99]}]}, r"edits\[2\].positions"),
        ({}, r"edits\[0\].positions"),
        ({"edits": [{"op": "zero", "layers": [1], "positions": {"token_ids": [9]}}]}, "edits"),
    ],
)
def test_a_refusal_for_a_prompt_says_whose_edits_count(
    front: FrontEnd, asked: dict[str, Any], said: str
) -> None:
    positions = [98] if not asked else "all"
    zero = {"op": "zero", "layers": [1], "positions": positions}
    serve(front, edits=[zero, zero | {"layers": [2]}])
    args = {"inspect_lens": asked} if asked else None
    params = SimpleNamespace(
        extra_args=args, n=1, max_tokens=2, stop=[], skip_reading_prefix_cache=None,
        stream_interval=None,
    )  # fmt: skip
    compiled = compiled_of(processor(front), params)
    assert compiled is not None
    message = rf"{said}.*set for all requests count, too: edits\[2\] is the first of the request"
    with pytest.raises(LensError, match=message):
        _placed(
            with_positions_of(compiled, [1, 2, 3], processor(front)),
            params,
            n_prompt=3,
            max_tokens=2,
        )


@pytest.mark.parametrize("is_set", [False, True])
def test_edits_that_meet_are_numbered_as_they_act_and_whose_they_are_is_told(
    front: FrontEnd, is_set: bool
) -> None:
    if is_set:
        serve(front, edits=[{"op": "zero", "layers": [2]}])
    args = {"inspect_lens": {"edits": [add(6)], "edits_named": ["v"], "edits_meet": "error"}}
    params = SimpleNamespace(
        extra_args=args, n=1, max_tokens=2, stop=[], skip_reading_prefix_cache=None,
        stream_interval=None,
    )  # fmt: skip
    compiled = compiled_of(processor(front), params)
    assert compiled is not None
    n = int(is_set)
    message = rf"edits\[{n + 1}\]: meets edits\[{n}\] .*edits\[{n + 1}\] is the first of the"
    with pytest.raises(LensError, match=f"{message} request's own, behind those of edits_named"):
        _placed(compiled, params, n_prompt=3, max_tokens=2)


def test_a_model_name_chooses_a_configuration() -> None:
    asked = LensRequest(capture={"layers": [1]}, configs=["b"])
    configs = {"org/model@a": "a", "org/model@b": "b"}
    chosen = with_config_of("org/model@a", asked, configs)
    assert chosen is not None
    assert chosen.configs == ("a", "b")
    assert with_config_of("org/model@a", asked, configs) is chosen, "known by its identity"
    assert with_config_of("org/model@c", asked, configs) is asked
    assert with_config_of("other@a", asked, configs) is asked
    assert with_config_of("org/model", None, configs) is None
    only = with_config_of("org/model@a", None, configs)
    assert only == LensRequest(configs=["a"])


WRONG = {
    "edts: []": "'edts' is no field of a configuration; did you mean 'edits'",
    "- a": "allowed is a mapping",
    "": "allowed is a mapping",
    "edits: [": "cannot be read",
    "edits: [{op: zer, layers: [1]}]": "edits",
    "probes: [{name: p, alarm: maybe}]": "alarm",
    "probes: [{name: p, tokens: true}]": "streams carry token scores",
    "may_opt_out: true": "no edits and no probes",
    "probes: [p]\nalerts: {url: 'https://h/x', dead_letter: d}": "no probe of the file has",
    "alerts: {url: here, dead_letter: d}": "no address of a webhook",
    "alerts: {url: 'https://h/x'}": "dead_letter",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_ends_the_start_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=f"INSPECT_LENS_SERVER={path}.*{WRONG[text]}"):
        read_server_file(str(path))
    monkeypatch.setenv("INSPECT_LENS_SERVER", str(path))
    with pytest.raises(SpecError, match="INSPECT_LENS_SERVER"):
        plugin.register()
    with pytest.raises(SpecError, match="INSPECT_LENS_SERVER"):
        FrontEnd()


@pytest.mark.parametrize("text", ["alerts:\n  url: {}: x", "url={}", "- {}", "alerts: [{}]"])
def test_a_mistake_in_the_file_does_not_show_the_webhooks_address(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text.format("https://h/SECRET"))
    with pytest.raises(SpecError, match="INSPECT_LENS_SERVER") as caught:
        read_server_file(str(path))
    assert "SECRET" not in str(caught.value)
    assert ("line 2, column" in str(caught.value)) is (": x" in text)


def test_an_engine_that_it_does_not_fit_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(yaml.safe_dump({"edits": [{"op": "zero", "layers": [99]}]}))
    monkeypatch.setenv("INSPECT_LENS_SERVER", str(path))
    monkeypatch.setattr(state, "install_when_serving", lambda front: None)
    front = FrontEnd()
    with pytest.raises(SpecError, match=r"INSPECT_LENS_SERVER=.*99"):
        front.learn(SimpleNamespace(), engine_config())


def test_the_file_says_what_acts(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(
        "edits_named: [{name: calm, scale: 2}]\n"
        "probes: [{name: p, alarm: flag}]\n"
        "may_opt_out: true\n"
        "alerts: {url: 'https://host/x', dead_letter: dead.jsonl}\n"
    )
    found = read_server_file(str(path))
    assert found.config == ServerConfig(
        edits_named=[{"name": "calm", "scale": 2.0}],
        probes=[{"name": "p", "alarm": "flag"}],
        may_opt_out=True,
    )
    assert found.alerts is not None
    assert found.alerts.dead_letter == str(tmp_path / "dead.jsonl")


def test_what_acts_on_all_requests_has_no_name() -> None:
    with pytest.raises(SpecError, match=r"^item: a ServerConfig .* INSPECT_LENS_SERVER"):
        engine.register(None, "x", ServerConfig(probes=["p"], may_opt_out=True))
