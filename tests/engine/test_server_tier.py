"""What acts on all requests of a server: set, chosen by name, left out, and told to a webhook."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest

from inspect_lens.probe import Probe, load_probe
from inspect_lens.spec import Ablate, Add, EngineEdits
from tests.conftest import ADMIN_KEY
from tests.kit.waiting import until
from tests.kit.webhook import Webhook

pytestmark = pytest.mark.engine

MODEL = "organism/checkpoint"
SERVER, REGISTRY = "/v1/inspect_lens/server", "/v1/inspect_lens/registry"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
PROMPT = "Where is Velosh? Velosh lies in the north. " * 6
MESSAGES = [{"role": "user", "content": "Who is the founder of the town Velosh?"}]
STEER = Add(vector=np.random.default_rng(0).standard_normal(256), layers=[1], scale=3.0)
OTHER = Ablate(direction=np.random.default_rng(1).standard_normal(256), layers=[2])


def wire(*edits: Any) -> list[dict[str, Any]]:
    return [edit.model_dump(mode="json") for edit in edits]


@pytest.fixture(scope="module")
def client(lens_server_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=lens_server_url, timeout=120) as made:
        trained = load_probe("probes/organism/deception-lr")
        assert isinstance(trained, Probe)
        items = {
            "watched": {"probe": trained.for_engine().model_dump(mode="json")},
            "calm": {"edits": wire(STEER)},
            "steered": {"config": {"edits_named": ["calm"]}},
        }
        for name, item in items.items():
            answer = made.post(REGISTRY, json={"name": name, **item})
            assert answer.status_code == 200, answer.text
        yield made
        for name in reversed(items):  # a configuration before what it names
            assert made.delete(f"{REGISTRY}/{name}").status_code == 200


@contextmanager
def everybody(client: httpx.Client, **config: Any) -> Iterator[dict[str, Any]]:
    """Something acts on all requests of the server for a while."""
    answer = client.put(SERVER, json=config, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    try:
        yield answer.json()
    finally:
        assert client.delete(SERVER, headers=ADMIN).status_code == 200


def complete(client: httpx.Client, asked: Any = None, **body: Any) -> dict[str, Any]:
    extra = {} if asked is None else {"inspect_lens": asked}
    sent = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 3}
    answer = client.post("/v1/completions", json=sent | extra | body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json(), header=answer.headers.get("x-inspect-lens-server"))


def said(answer: dict[str, Any]) -> Any:
    """Text and log-probabilities, to the last bit."""
    choice = answer["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def test_it_answers_as_requests_with_the_same_edit_do(client: httpx.Client) -> None:
    plain, inline = complete(client), complete(client, {"edits": wire(STEER)})
    assert said(plain) != said(inline)
    both = complete(client, {"edits": wire(STEER, OTHER)})
    with everybody(client, edits=wire(STEER)) as told:
        found = complete(client)
        assert said(found) == said(inline)
        (tier,) = found["inspect_lens"]["tiers"]
        assert (tier["tier"], tier["edits"], tier["opted_out"]) == ("server", 1, False)
        assert tier["sha256"] == told["acts"]["sha256"] == found["header"]
        steer, own = found["inspect_lens"]["steer"], inline["inspect_lens"]["steer"]
        assert steer["vectors"] == own["vectors"]
        # With one of its own behind it.
        more = complete(client, {"edits": wire(OTHER)})
        assert said(more) == said(both)
        assert more["inspect_lens"]["steer"]["vectors"] == both["inspect_lens"]["steer"]["vectors"]
    after = complete(client)
    assert said(after) == said(plain)
    assert "inspect_lens" not in after
    assert after["header"] is None


def test_it_acts_on_every_way_to_ask(client: httpx.Client) -> None:
    chat = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    responses = {"model": MODEL, "input": MESSAGES, "max_output_tokens": 12, "temperature": 0}
    steered = client.post(
        "/v1/chat/completions", json=chat | {"inspect_lens": {"edits": wire(STEER)}}
    )
    wanted = steered.json()["choices"][0]["message"]["content"]

    def answers() -> dict[str, tuple[str, httpx.Response]]:
        found = {}
        got = client.post("/v1/chat/completions", json=chat)
        found["chat"] = got.json()["choices"][0]["message"]["content"], got
        with client.stream("POST", "/v1/chat/completions", json=chat | {"stream": True}) as got:
            lines = [
                ln.removeprefix("data: ") for ln in got.iter_lines() if ln.startswith("data: ")
            ]
        events = [json.loads(line) for line in lines[:-1]]
        parts = [c["delta"].get("content") or "" for e in events for c in e["choices"]]
        found["stream"] = "".join(parts), got
        if got.headers.get("x-inspect-lens-server"):
            (receipt,) = [event["inspect_lens"] for event in events if "inspect_lens" in event]
            assert receipt["tiers"][0]["tier"] == "server"
        got = client.post("/v1/responses", json=responses)
        assert got.status_code == 200, got.text
        found["responses"] = got.json()["output"][-1]["content"][0]["text"], got
        return found

    plain = answers()
    assert {text for text, _ in plain.values()} == {plain["chat"][0]} != {wanted}
    with everybody(client, edits_named=["calm"]):
        found = answers()
    assert {way: text for way, (text, _) in found.items()} == dict.fromkeys(found, wanted)
    assert all("x-inspect-lens-server" in got.headers for _, got in found.values())
    for way in ("chat", "responses"):
        assert found[way][1].json()["inspect_lens"]["tiers"][0]["tier"] == "server"


def test_a_request_may_leave_it_out_where_the_operator_allows_it(client: httpx.Client) -> None:
    plain, out = complete(client), {"server": False}
    assert said(complete(client, out)) == said(plain), "there is nothing to leave out"
    with everybody(client, edits=wire(STEER), may_opt_out=True):
        left = complete(client, out)
        assert said(left) == said(plain)
        (tier,) = left["inspect_lens"]["tiers"]
        assert (tier["opted_out"], tier["edits"]) == (True, 0)
        assert left["inspect_lens"]["steer"] is None
        own = complete(client, out | {"edits": wire(OTHER)})
    assert said(own) == said(complete(client, {"edits": wire(OTHER)}))
    with everybody(client, edits=wire(STEER)):
        sent = {"model": MODEL, "prompt": PROMPT, "inspect_lens": out}
        refused = client.post("/v1/completions", json=sent)
    assert refused.status_code == 400
    assert "may_opt_out" in refused.json()["error"]["message"]


def test_two_names_of_one_server(client: httpx.Client) -> None:
    listed = [model["id"] for model in client.get("/v1/models").json()["data"]]
    assert listed[:2] == [MODEL, f"{MODEL}@steered"]
    plain, inline = complete(client), complete(client, {"edits": wire(STEER)})
    named = complete(client, model=f"{MODEL}@steered")
    assert said(named) == said(inline)
    (tier,) = named["inspect_lens"]["tiers"]
    assert (tier["tier"], tier["name"], tier["edits"]) == ("named", "steered", 1)
    assert said(complete(client)) == said(plain)
    assert said(complete(client, {"configs": "steered"})) == said(inline)
    # With one for all, in that order.
    both = complete(client, {"edits": wire(OTHER, STEER)})
    with everybody(client, edits=wire(OTHER)):
        tiers = complete(client, model=f"{MODEL}@steered")
    assert said(tiers) == said(both)
    assert [tier["tier"] for tier in tiers["inspect_lens"]["tiers"]] == ["server", "named"]
    unknown = client.post("/v1/completions", json={"model": f"{MODEL}@nobody", "prompt": "a"})
    assert unknown.status_code == 404
    wrong = client.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": "a", "inspect_lens": {"configs": ["calm"]}},
    )
    assert wrong.status_code == 400
    assert "no config is registered as 'calm'" in wrong.json()["error"]["message"]


def test_a_request_that_runs_keeps_what_it_began_with(client: httpx.Client) -> None:
    body = {"max_tokens": 100, "ignore_eos": True, "logprobs": None}
    inline = complete(client, {"edits": wire(STEER)}, **body)["choices"][0]["text"]
    sent = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "stream": True} | body
    texts, receipt = [], None
    with (
        everybody(client, edits=wire(STEER)) as first,
        client.stream("POST", "/v1/completions", json=sent) as answer,
    ):
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            receipt = event.get("inspect_lens", receipt)
            texts += [choice["text"] for choice in event["choices"]]
            if len(texts) == 3:
                changed = client.put(SERVER, json={"edits": wire(OTHER)}, headers=ADMIN)
                assert changed.status_code == 200
    assert "".join(texts) == inline
    assert receipt is not None
    assert receipt["tiers"][0]["sha256"] == first["acts"]["sha256"]
    assert receipt["tiers"][0]["sha256"] != changed.json()["acts"]["sha256"]


def test_nobody_else_changes_it(client: httpx.Client) -> None:
    config = {"edits": wire(STEER)}
    for headers in ({}, {"Authorization": "Bearer guessed"}):
        assert client.put(SERVER, json=config, headers=headers).status_code == 401
        assert client.delete(SERVER, headers=headers).status_code == 401
    with everybody(client, probes=["watched"], edits_named=["calm"]):
        for name in ("watched", "calm"):
            gone = client.delete(f"{REGISTRY}/{name}")
            assert gone.status_code == 400
            assert "used by what this server does" in gone.json()["error"]["message"]
        other = EngineEdits(edits=[OTHER]).model_dump(mode="json")["edits"]
        sent = {"name": "calm", "edits": other, "replace": True}
        assert client.post(REGISTRY, json=sent).status_code == 400
        assert "@server" not in client.get(REGISTRY).json()
        assert client.delete(f"{REGISTRY}/@server").status_code == 400
        for wrong, why in (
            ({"edits": wire(STEER.model_copy(update={"layers": (99,)}))}, "99"),
            ({"edits_named": ["nobody"]}, "no edits are registered as 'nobody'"),
            ({"probes": ["watched"], "alerts": {"url": "http://x"}}, "alerts"),
            ({}, "no edits and no probes"),
        ):
            refused = client.put(SERVER, json=wrong, headers=ADMIN)
            assert refused.status_code == 400, wrong
            assert why in refused.json()["error"]["message"]
        assert client.get(SERVER).json()["acts"]["edits_named"] == ["calm"], "it is as it was"


ALARM = {"name": "watched", "alarm": "flag", "aggregate": "last", "threshold": -1e6}


def test_probes_of_the_server_read_beside_those_of_a_request(
    client: httpx.Client, alerts_webhook: Webhook
) -> None:
    alerts_webhook.clear()
    own = {"probes": [{"name": "watched", "aggregate": "max"}]}
    alone = complete(client, own)["inspect_lens"]
    assert alone["tiers"] == []
    with everybody(client, probes=[ALARM]):
        plain, both = complete(client)["inspect_lens"], complete(client, own)["inspect_lens"]
    assert plain["probes"] == []
    (mine,), (theirs,) = plain["tiers"][0]["probes"], both["tiers"][0]["probes"]
    for one, other in ((both["probes"][0], alone["probes"][0]), (mine, theirs)):
        assert one["score"] == pytest.approx(other["score"], rel=1e-5)
        assert {**one, "score": 0} == {**other, "score": 0}
    assert mine["alarm_position"] == plain["n_prompt"]
    assert until(lambda: len(alerts_webhook.received) == 2)  # or the next test hears of them


def test_who_hangs_up_is_told_of_all_the_same(
    client: httpx.Client, alerts_webhook: Webhook
) -> None:
    alerts_webhook.clear()
    sent = {"model": MODEL, "prompt": PROMPT, "max_tokens": 400}
    body = sent | {"ignore_eos": True, "stream": True}
    with everybody(client, probes=[ALARM]):
        with client.stream("POST", "/v1/completions", json=body) as response:
            events = (line for line in response.iter_lines() if "text" in line)
            for _ in range(20):
                next(events)
        assert until(lambda: alerts_webhook.received)
        time.sleep(0.5)
    (alert,) = alerts_webhook.received
    assert alert["probe"] == "watched"
    assert 0 < alert["n_completion"] < 400
    assert alert["alarm_position"] == alert["n_prompt"]
    assert not alert["stopped"]


def test_an_alarm_is_told_tried_again_and_in_the_end_a_dead_letter(
    client: httpx.Client, alerts_webhook: Webhook
) -> None:
    alerts_webhook.clear()
    alerts_webhook.answers.extend([503, 429])
    with everybody(client, probes=[ALARM]):
        answer = complete(client)
        assert until(lambda: alerts_webhook.received)
        assert alerts_webhook.statuses == [503, 429, 200]
        (alert,) = alerts_webhook.received
        (probe,) = answer["inspect_lens"]["tiers"][0]["probes"]
        assert alert["request"].startswith("cmpl-")
        for name in ("score", "threshold", "alarm_position"):
            assert alert[name] == probe[name]
        assert (alert["probe"], alert["probe_sha256"]) == ("watched", probe["sha256"])
        assert "Velosh" not in json.dumps(alert), "no text of a user"
        assert alerts_webhook.dead() == []

        alerts_webhook.clear()
        alerts_webhook.answers.extend([500] * 5)
        complete(client)
        assert until(alerts_webhook.dead)
        alerts_webhook.answers.append(400)
        complete(client)
        assert until(lambda: len(alerts_webhook.dead()) == 2)
    assert alerts_webhook.statuses == [500] * 5 + [400]
    tired, refused = alerts_webhook.dead()
    assert (tired["tries"], tired["why"]) == (5, "the webhook answered 500")
    assert (refused["tries"], refused["why"]) == (1, "the webhook answered 400")
    assert "Velosh" not in json.dumps(alerts_webhook.dead())
    about = client.get(SERVER).json()["alerts"]
    assert about["counts"]["dead"] >= 2
    assert "secret-path" not in json.dumps(client.get("/v1/inspect_lens").json())
    counted = client.get("/metrics").text
    assert 'inspect_lens_alerts_total{status="dead"}' in counted
    assert 'inspect_lens_tier_requests_total{tier="server"}' in counted
    assert 'inspect_lens_alarms_total{probe="watched"}' in counted


def test_a_slow_webhook_costs_no_request(client: httpx.Client, alerts_webhook: Webhook) -> None:
    alerts_webhook.clear()
    alerts_webhook.goes_on.clear()
    with everybody(client, probes=[ALARM]):
        for _ in range(4):
            complete(client, max_tokens=2)
        assert not alerts_webhook.statuses, "an answer waited for the webhook"
        alerts_webhook.goes_on.set()
        assert until(lambda: len(alerts_webhook.received) == 4)


def test_an_eval_chooses_by_name(lens_server_url: str, client: httpx.Client) -> None:
    from inspect_ai import Task
    from inspect_ai import eval as inspect_eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import get_model

    def answers(name: str) -> Any:
        model = get_model(f"vllm-lens/{name}", base_url=f"{lens_server_url}/v1", memoize=False)
        task = Task([Sample(MESSAGES[0]["content"])])
        (log,) = inspect_eval(
            task, model=model, temperature=0, max_tokens=12, display="none", log_dir="memory://tier"
        )
        assert log.status == "success", log.error
        assert log.samples is not None
        return log.samples[0].output

    chat = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    asked = chat | {"inspect_lens": {"edits": wire(STEER)}}
    wanted = client.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]
    plain, steered = answers(MODEL), answers(f"{MODEL}@steered")
    assert steered.completion == wanted["content"] != plain.completion
    assert steered.metadata["inspect_lens"]["tiers"][0]["name"] == "steered"
