"""The whole client path on the fake server: what is sent, to which model, and what is kept."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
from inspect_ai.model import (
    ChatMessageUser,
    Model,
    ModelOutput,
    get_model,
)

from inspect_lens.errors import ArtifactError, CaptureError, SpecError, UnsupportedError
from inspect_lens.model import activations, lens_config, lens_scope
from inspect_lens.oracle import _ask, _send, ask_oracle
from inspect_lens.oracle._send import random_rows, shuffled_rows
from inspect_lens.scorer import oracle_answer
from inspect_lens.solver import activation_oracle
from inspect_lens.spec import LensRequest, SteeringVector, parse_extra_args
from tests.kit.fake_server import FakeLensServer, tokens_of

QUESTION = "Is it a lie?"
STEERED, PLAIN = "steered word00 word01 word02", "word00 word01 word02"


async def answered(model: Model, **config: Any) -> ModelOutput:
    return await model.generate(
        [ChatMessageUser(content="tell me")], config=lens_config(capture="all", **config)
    )


def asked(server: FakeLensServer) -> list[dict[str, Any]]:
    """Chat requests that went to the adapter."""
    return [r for r in server.requests if r["model"] != server.model and "messages" in r]


def steering(body: dict[str, Any]) -> tuple[SteeringVector, ...]:
    request = parse_extra_args(body.get("vllm_xargs")) or LensRequest()
    assert request.capture is None
    return request.edits


def test_vectors_go_to_the_placeholders_of_the_adapters_prompt(
    server: FakeLensServer, model: Model, write_oracle: Any
) -> None:
    async def run() -> Any:
        output = await answered(model)
        return output, await ask_oracle(output, QUESTION, write_oracle(), model=model, layers=2)

    output, (answer,) = anyio.run(run)
    assert answer.answer == STEERED
    assert answer.controls["text_only"] == PLAIN
    handle = activations(output)
    assert handle is not None
    # The fed tokens of the completion, without the last sampled one.
    start, stop = handle.n_prompt, handle.n_prompt + 2
    assert answer.positions == (start, stop - 1)
    rows = handle.numpy()[handle.layers.index(2), start:stop]

    bodies = asked(server)
    assert len(bodies) == 4
    content = "Layer: 2\n ? ? \n" + QUESTION
    # Tokens of the fake server are words: <user>, Layer:, 2, ?, ?, …
    placeholders = (3, 4)
    assert tokens_of("<user> " + content)[3:5] == tokens_of("? ?")
    sent = [vector for body in bodies for vector in steering(body)]
    for body in bodies:
        assert body["model"].startswith("tiny-")
        assert body["messages"] == [{"role": "user", "content": content}]
        assert body["temperature"] == 0
        assert body["max_tokens"] == 40
        assert body["chat_template_kwargs"] == {"enable_thinking": False}
        assert "lora_request" not in body
    for vector in sent:
        assert vector.layers == (1,)
        assert vector.positions == placeholders
        assert vector.norm_match
        assert vector.scale == 1.0
    draw = (0, _crc(handle))
    expected = [rows, shuffled_rows(rows, seed=draw), random_rows(rows, seed=draw)]
    assert len(sent) == 3
    for wanted in expected:
        found = [np.array_equal(v.vector.to_float32()[0], wanted) for v in sent]
        assert sum(found) == 1
    # The base model got its own request and nothing of the oracle's.
    base = [r for r in server.requests if r["model"] == server.model]
    assert len(base) == 1
    assert server.adapters == {bodies[0]["model"]: str(Path("oracles/tiny").resolve())}


def test_an_oracle_of_several_layers_sees_them_in_one_prompt(
    server: FakeLensServer, model: Model, write_oracle: Any
) -> None:
    """The format of arXiv:2606.02609: a block of the prefix for each layer, and more strength."""
    folder = write_oracle(act_layer_combinations=[[1, 2, 3]], steering_coefficient=2.0)

    async def run() -> Any:
        output = await answered(model)
        return output, await ask_oracle(output, QUESTION, folder, model=model, controls=False)

    output, (answer,) = anyio.run(run)
    assert answer.layers == (1, 2, 3)
    handle = activations(output)
    assert handle is not None
    (body,) = asked(server)
    blocks = "".join(f"Layer: {layer}\n ? ? \n" for layer in (1, 2, 3))
    assert body["messages"][0]["content"] == blocks + QUESTION
    (vector,) = steering(body)
    assert (vector.scale, vector.norm_match) == (2.0, True)
    # <user> Layer: 1 ? ? Layer: 2 ? ? Layer: 3 ? ?
    assert vector.positions == (3, 4, 7, 8, 11, 12)
    shown = handle.numpy()[[handle.layers.index(n) for n in (1, 2, 3)], handle.n_prompt :][:, :2]
    assert np.array_equal(vector.vector.to_float32()[0], shown.reshape(6, -1))


def _crc(handle: Any) -> int:
    import zlib

    ids = np.asarray((*handle.prompt_token_ids, *handle.token_ids), dtype=np.int64)
    return zlib.crc32(ids.tobytes())


def test_facts_say_where_the_stream_is_an_attention_sink(
    model: Model, write_oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> Any:
        output = await answered(model)
        return await ask_oracle(output, QUESTION, write_oracle(), model=model, layers=2)

    (calm,) = anyio.run(run)
    # Rows of the fake server at layer 1: the position, then 7 times the token % 16 + 1 / 8.
    token = tokens_of("?")[0] % 16 + 1 / 8
    norms = [float(np.sqrt(p**2 + 7 * token**2)) for p in (3, 4)]
    assert calm.facts["max_stream_norm"] == pytest.approx(max(norms), abs=1e-3)
    assert "sinks" not in calm.facts
    monkeypatch.setattr(_ask, "SINK_NORM", (norms[0] + norms[1]) / 2)
    _send._norms.values.clear()

    async def again() -> Any:
        output = await answered(model)
        return await ask_oracle(output, QUESTION, "tiny", model=model, layers=2)

    (loud,) = anyio.run(again)
    assert loud.facts["sinks"] == [4]


@pytest.mark.parametrize("layer", [2, 0.5])
def test_a_share_of_the_depth_is_a_layer(model: Model, write_oracle: Any, layer: Any) -> None:
    async def run() -> Any:
        output = await answered(model)
        return await ask_oracle(output, QUESTION, write_oracle(), model=model, layers=layer)

    (answer,) = anyio.run(run)  # the fake model has 4 layers
    assert answer.layers == (2,)


def test_a_model_that_always_captures_does_not_capture_its_oracle(
    server: FakeLensServer, write_oracle: Any
) -> None:
    model = get_model(f"lens/{server.model}", base_url=server.url, memoize=False, capture="all")

    async def run() -> Any:
        output = await model.generate([ChatMessageUser(content="tell me")])
        return await ask_oracle(output, QUESTION, write_oracle(), model=model, layers=2)

    assert anyio.run(run)[0].source == "captured"
    assert len(asked(server)) == 4
    for body in asked(server):
        steering(body)  # asserts that there is no capture


def test_steering_of_the_model_does_not_reach_its_oracle(
    server: FakeLensServer, model: Model, write_oracle: Any
) -> None:
    """A monitor asks while the model under evaluation is steered."""
    around = SteeringVector(activations=np.ones((1, 8)), layer_indices=[0], scale=3.0)

    async def run() -> Any:
        with lens_scope(steer=around, model=model):
            output = await answered(model)
            return await ask_oracle(output, QUESTION, write_oracle(), model=model, layers=2)

    (answer,) = anyio.run(run)
    assert answer.controls["text_only"] == PLAIN
    vectors = [vector for body in asked(server) for vector in steering(body)]
    assert len(vectors) == 3, "the answer and two controls; the text alone has none"
    assert {vector.layers for vector in vectors} == {(1,)}


def test_layers_that_were_not_captured_are_named_with_those_that_were(
    model: Model, write_oracle: Any
) -> None:
    async def run() -> Any:
        output = await model.generate(
            [ChatMessageUser(content="tell me")], config=lens_config(capture=[3])
        )
        handle = activations(output)
        assert handle is not None
        return await ask_oracle(handle, QUESTION, write_oracle(), model=model)

    with pytest.raises(ArtifactError, match=r"read layers \[2\].*captured \[3\].*layers=\[3\]"):
        anyio.run(run)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, (-2, -1)),
        ({"last": 1}, (-1,)),
        ({"positions": "all", "last": 3}, (-3, -2, -1)),
        ({"positions": "prompt", "last": 1}, (-3,)),
        ({"positions": [0, 1], "last": None}, (0, 1)),
        ({"inputs": "full_seq", "last": 1}, None),
    ],
)
def test_tokens_are_those_that_were_asked_for(
    server: FakeLensServer, model: Model, write_oracle: Any, options: Any, wanted: Any
) -> None:
    """Two tokens of a completion are read; the last sampled one never is."""
    both = write_oracle(act_layer_combinations=[[1, 3]])

    async def run() -> Any:
        output = await answered(model)
        return output, await ask_oracle(
            output, QUESTION, both, model=model, layers=[1, 3], controls=False, **options
        )

    output, (answer,) = anyio.run(run)
    handle = activations(output)
    assert handle is not None
    fed = range(handle.n_prompt + handle.n_completion - 1)
    assert answer.positions == tuple(fed if wanted is None else (fed[i] for i in wanted))
    # Layers of a set come one after the other.
    (vector,) = steering(asked(server)[0])
    rows = handle.numpy()[[handle.layers.index(n) for n in (1, 3)]][:, list(answer.positions)]
    np.testing.assert_array_equal(vector.vector.to_float32()[0], rows.reshape(-1, rows.shape[-1]))


def test_each_token_alone_and_no_controls(
    server: FakeLensServer, model: Model, write_oracle: Any
) -> None:
    async def run() -> Any:
        output = await answered(model)
        return await ask_oracle(
            output, [QUESTION, "Who?"], write_oracle(), model=model, layers=1, inputs="tokens",
            controls=False,
        )  # fmt: skip

    answers = anyio.run(run)
    assert [(a.question, len(a.positions)) for a in answers] == [
        (QUESTION, 1), (QUESTION, 1), ("Who?", 1), ("Who?", 1),
    ]  # fmt: skip
    assert answers[0].positions != answers[1].positions
    assert all(a.controls == {} for a in answers)
    assert len(asked(server)) == 4


def test_without_a_capture_the_tokens_are_fed_again(model: Model, write_oracle: Any) -> None:
    async def run(**options: Any) -> Any:
        output = await model.generate([ChatMessageUser(content="tell me")])
        return await ask_oracle(output, QUESTION, "tiny", model=model, layers=2, **options)

    write_oracle()
    (answer,) = anyio.run(run)
    assert answer.source == "recomputed"
    with pytest.raises(ArtifactError, match="with_capture"):
        anyio.run(lambda: run(source="captured"))


@pytest.mark.parametrize("reduce", ["mean", "max", "norm"])
def test_what_was_made_of_the_tokens_is_not_shown_for_them(
    reduce: str, model: Model, write_oracle: Any
) -> None:
    async def run(**options: Any) -> Any:
        config = lens_config(capture={"layers": "all", "reduce": reduce})
        output = await model.generate([ChatMessageUser(content="tell me")], config=config)
        about = activations(output) if options.pop("handle", False) else output
        assert about is not None
        return await ask_oracle(about, QUESTION, "tiny", model=model, layers=2, **options)

    write_oracle()
    (answer,) = anyio.run(run)
    assert answer.source == "recomputed"
    assert answer.answer == STEERED
    with pytest.raises(ArtifactError, match=f"only the {reduce} was captured.*source='auto'"):
        anyio.run(lambda: run(source="captured"))
    with pytest.raises(ArtifactError, match=f"only the {reduce} was captured"):
        anyio.run(lambda: run(handle=True))


def test_the_message_of_an_answer_is_enough(model: Model, write_oracle: Any) -> None:
    async def run() -> Any:
        output = await answered(model)
        return await ask_oracle(output.message, QUESTION, write_oracle(), model=model, layers=2)

    assert anyio.run(run)[0].answer == STEERED
    with pytest.raises(ArtifactError, match="no activations are known"):
        anyio.run(lambda: ask_oracle(ChatMessageUser(content="x"), QUESTION, "tiny", model=model))


def test_a_prompt_that_was_changed_on_its_way_is_refused(
    server: FakeLensServer, model: Model, write_oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    post = server.post

    def other_tokens(path: str, body: dict[str, Any]) -> Any:
        if path == "/tokenize" and "messages" in body:
            return 200, {"tokens": [5, *tokens_of("? ?"), 6]}
        return post(path, body)

    async def run() -> Any:
        output = await answered(model)
        return await ask_oracle(output, QUESTION, write_oracle(), model=model, layers=2)

    monkeypatch.setattr(server, "post", other_tokens)
    with pytest.raises(CaptureError, match="other tokens than /tokenize"):
        anyio.run(run)


def test_a_connection_that_the_server_closed_is_tried_again(
    model: Model, write_oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    api: Any = model.api
    failures: list[int] = []

    async def run(often: int) -> Any:
        output = await answered(model)
        post = api.http_client.request
        left = [often]

        async def closed(*args: Any, **options: Any) -> Any:
            if left[0]:
                left[0] -= 1
                failures.append(1)
                raise httpx.ReadError("")
            return await post(*args, **options)

        monkeypatch.setattr(api.http_client, "request", closed)
        return await ask_oracle(output, QUESTION, "tiny", model=model, layers=2, controls=False)

    write_oracle()
    assert anyio.run(run, 2)[0].answer == STEERED
    assert len(failures) == 2
    _send._prompts.values.clear()
    with pytest.raises(CaptureError, match=r"/tokenize .*ReadError"):
        anyio.run(run, 9)


def test_wrong_arguments_are_refused_before_anything_runs(write_oracle: Any) -> None:
    write_oracle()
    wrong: list[dict[str, Any]] = [
        {"layers": 7}, {"inputs": "words"}, {"positions": "nowhere"}, {"last": 0},
        {"controls": ["placebo"]}, {"max_tokens": 0}, {"source": "air"},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(SpecError):
            activation_oracle(QUESTION, "tiny", **options)
    with pytest.raises(SpecError, match="at least one"):
        activation_oracle([], "tiny")
    with pytest.raises(ArtifactError, match="was not found"):
        activation_oracle(QUESTION, "nobody")
    for options in ({"match": "guess"}, {"match": "choice"}, {"choices": ["Yes", "yes"]}):
        with pytest.raises(SpecError):
            oracle_answer(QUESTION, "tiny", **options)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="for each token"):
        oracle_answer(QUESTION, "tiny", inputs="tokens")


def test_other_providers_are_refused(write_oracle: Any) -> None:
    async def run() -> Any:
        return await ask_oracle(
            ModelOutput(), QUESTION, write_oracle(), model=get_model("mockllm/model")
        )

    with pytest.raises(UnsupportedError, match="vllm-lens/"):
        anyio.run(run)


def test_log_odds_of_yes_are_read_for_the_oracle_and_each_control(
    server: FakeLensServer, model: Model, write_oracle: Any
) -> None:
    def reply(body: dict[str, Any]) -> tuple[str, dict[str, float]]:
        if steering(body):
            return "Yes", {"Yes": 0.5, " yes": 0.1, "No": 0.2, "Perhaps": 0.2}
        return "Perhaps", {"Perhaps": 0.9, "No": 0.1}

    oracle = write_oracle()

    async def run(log_odds: bool) -> Any:
        server.replies = None
        output = await answered(model)
        server.requests.clear()
        server.replies = reply
        (answer,) = await ask_oracle(
            output, QUESTION, oracle, model=model, layers=2, max_tokens=1, log_odds=log_odds
        )
        return answer

    answer = anyio.run(run, True)
    assert answer.answer == "Yes"
    found = {name: pytest.approx(math.log(3)) for name in ("oracle", "shuffled", "random")}
    # Yes was not among the likeliest tokens, so it was at most as likely as the last of them.
    assert answer.log_odds == {**found, "text_only": 0.0}
    assert answer.facts["bounds"] == ["text_only"]
    assert answer.model_dump()["log_odds"] == answer.log_odds
    assert {body["top_logprobs"] for body in asked(server)} == {20}

    plain = anyio.run(run, False)
    assert "log_odds" not in plain.model_dump()
    assert not any(body.get("logprobs") for body in asked(server))
