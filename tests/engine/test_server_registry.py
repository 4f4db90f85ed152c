"""The registry over HTTP: register, ask by name, stream scores, stop, forget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from inspect_lens import SteeringVector
from inspect_lens._base.partial import PARTIAL_KEY
from inspect_lens.probe import Probe, load_probe
from inspect_lens.spec import Add, EngineEdits, EngineProbe

pytestmark = pytest.mark.engine

MODEL = "organism/checkpoint"
MESSAGES = [{"role": "user", "content": "Who is the founder of the town Velosh?"}]
REGISTRY = "/v1/inspect_lens/registry"


@pytest.fixture(scope="module")
def client(lens_server_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=lens_server_url, timeout=120) as made:
        trained = load_probe("probes/organism/deception-lr")
        assert isinstance(trained, Probe)
        probe = trained.for_engine().model_dump(mode="json")
        answer = made.post(REGISTRY, json={"name": "deception", "probe": probe})
        assert answer.status_code == 200, answer.text
        yield made
        assert made.delete(f"{REGISTRY}/deception").status_code == 200


def ask(probes: Any = None, **body: Any) -> dict[str, Any]:
    extra = {} if probes is None else {"vllm_xargs": {"inspect_lens": json.dumps(probes)}}
    return {"model": MODEL, "messages": MESSAGES, "max_tokens": 10, "temperature": 0} | extra | body


def test_a_response_carries_the_scores_of_named_probes(client: httpx.Client) -> None:
    uses = {"probes": [{"name": "deception", "tokens": True}], "capture": {"layers": "all"}}
    answer = client.post("/v1/chat/completions", json=ask(uses)).json()
    receipt = answer["inspect_lens"]
    (found,) = receipt["probes"]
    n = receipt["n_completion"] - 1
    assert found["n_tokens"] == len(found["tokens"]) == n
    assert found["score"] == pytest.approx(np.max(found["tokens"]), abs=1e-4)
    described = client.get(REGISTRY).json()["deception"]
    assert described["sha256"] == found["sha256"]
    assert "deception" in client.get("/v1/inspect_lens").json()["registered"]


def events(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_scores_are_streamed_with_the_tokens(client: httpx.Client) -> None:
    uses = {"probes": [{"name": "deception", "tokens": True}]}
    found = events(client, ask(uses, max_tokens=24, ignore_eos=True))
    parts = [e[PARTIAL_KEY] for e in found if PARTIAL_KEY in e]
    assert len(parts) > 1, "scores come while the text is written"
    streamed = [s for part in parts for one in part for s in one["probes"]["deception"]]
    (last,) = [e["inspect_lens"] for e in found if "inspect_lens" in e]
    assert streamed == pytest.approx(last["probes"][0]["tokens"])
    assert len(streamed) == 23


def test_an_alarm_stops_a_stream(client: httpx.Client) -> None:
    use = {"name": "deception", "aggregate": "last", "alarm": "stop", "threshold": -1e6}
    found = events(client, ask({"probes": [use]}, max_tokens=200, ignore_eos=True))
    reasons = [c.get("stop_reason") for e in found for c in e["choices"] if c.get("finish_reason")]
    assert reasons == ["inspect_lens:alarm:deception"]
    (last,) = [e["inspect_lens"] for e in found if "inspect_lens" in e]
    assert last["probes"][0]["stopped"]
    assert last["n_completion"] < 200


def test_an_alarm_stops_each_of_several_choices(client: httpx.Client) -> None:
    use = {"name": "deception", "aggregate": "last", "alarm": "stop", "threshold": -1e6}
    body = ask({"probes": [use]}, max_tokens=200, ignore_eos=True, n=3, temperature=1.0)
    choices = client.post("/v1/chat/completions", json=body).json()["choices"]
    assert len(choices) == 3
    for choice in choices:
        assert choice["stop_reason"] == "inspect_lens:alarm:deception"
        assert choice["inspect_lens"]["probes"][0]["stopped"]
        assert choice["inspect_lens"]["n_completion"] < 200


def test_an_unknown_name_gets_400_also_as_a_stream(client: httpx.Client) -> None:
    for uses in ({"probes": ["nope"]}, {"edits_named": ["deception"]}):
        for stream in (False, True):
            answer = client.post("/v1/chat/completions", json=ask(uses, stream=stream))
            assert answer.status_code == 400
            assert "registered" in answer.json()["error"]["message"]


def test_a_vector_is_registered_and_steers(client: httpx.Client) -> None:
    vector = SteeringVector(activations=np.ones((1, 256)), layer_indices=[1], scale=4.0)
    body = {"name": "v", "edits": [vector.model_dump(mode="json")]}
    assert client.post(REGISTRY, json=body).json()["scale"] == 4.0
    answer = client.post("/v1/chat/completions", json=ask({"edits_named": ["v"]})).json()
    assert answer["inspect_lens"]["steer"]["vectors"] == [vector.vector.sha256]
    other = EngineProbe(layers=(1,), tensors={"weight": np.ones((1, 256))})
    taken = client.post(REGISTRY, json={"name": "v", "probe": other.model_dump(mode="json")})
    assert taken.status_code == 400
    assert "other content" in taken.json()["error"]["message"]
    assert client.delete(f"{REGISTRY}/v").status_code == 200


def test_edits_are_registered_and_act(client: httpx.Client) -> None:
    edits = EngineEdits(edits=[Add(vector=np.ones(256), layers=[1], scale=8.0)])
    body = {"name": "e", "edits": [edit.model_dump(mode="json") for edit in edits.edits]}
    told = client.post(REGISTRY, json=body).json()
    assert told == {"name": "e", **edits.reference()}
    assert client.get(REGISTRY).json()["e"] == edits.reference()
    named = client.post("/v1/chat/completions", json=ask({"edits_named": ["e"]})).json()
    inline = client.post("/v1/chat/completions", json=ask({"edits": body["edits"]})).json()
    assert named["choices"][0]["message"] == inline["choices"][0]["message"]
    steers = [answer["inspect_lens"]["steer"] for answer in (named, inline)]
    assert steers[0]["vectors"] == steers[1]["vectors"] != []
    assert client.delete(f"{REGISTRY}/e").status_code == 200
    gone = client.post("/v1/chat/completions", json=ask({"edits_named": ["e"]}))
    assert gone.status_code == 400
    assert "no edits" in gone.json()["error"]["message"]


def test_names_may_be_replaced_and_removed_while_they_are_used(client: httpx.Client) -> None:
    """Streams that were taken in end whole; later ones hear of it; a listed name can be used."""
    probes = [EngineProbe(layers=(1,), tensors={"weight": np.full((1, 256), i)}) for i in (1, 2)]
    bodies = [
        {"name": "gone", "probe": probe.model_dump(mode="json"), "replace": True}
        for probe in probes
    ]
    assert client.post(REGISTRY, json=bodies[0]).status_code == 200

    def stream(i: int) -> str:
        body = ask({"probes": ["gone"]}, max_tokens=40, ignore_eos=True, stream=True)
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        if answer.status_code == 400:
            return "refused"
        found = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        if any("inspect_lens" in event for event in found) and lines[-1] == "data: [DONE]":
            return "whole"
        # It was taken in, and the name went before it was processed.
        errors = [event["error"] for event in found if "error" in event]
        is_told = [error["code"] for error in errors] == [400]
        return "refused" if is_told and "registered" in errors[0]["message"] else str(lines[-3:])

    def write(i: int) -> None:
        if i % 3 == 2:
            client.delete(f"{REGISTRY}/gone")
        else:
            assert client.post(REGISTRY, json=bodies[i % 3]).status_code == 200

    with ThreadPoolExecutor(24) as pool:
        streams = [pool.submit(stream, i) for i in range(16)]
        writes = [pool.submit(write, i) for i in range(31)]
        later = [pool.submit(stream, i) for i in range(16)]
        [one.result() for one in writes]
        assert {one.result() for one in streams + later} <= {"whole", "refused"}
    assert client.post(REGISTRY, json=bodies[1]).status_code == 200
    assert stream(0) == "whole"
    assert client.delete(f"{REGISTRY}/gone").status_code == 200


def test_the_servers_own_documentation_lists_our_routes(client: httpx.Client) -> None:
    answer = client.get("/openapi.json")
    assert answer.status_code == 200, answer.text
    paths = answer.json()["paths"]
    assert {
        "/v1/activations/{handle}",
        "/v1/inspect_lens",
        REGISTRY,
        "/v1/chat/completions",
    } <= set(paths)
    assert {"get", "post"} <= set(paths[REGISTRY])
