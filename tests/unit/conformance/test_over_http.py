"""The protocol over HTTP: what is sent, and how answers, errors and counters are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from conformance.offline import wire
from conformance.over_http import HttpEngine, OverHttp, read_response
from conformance.protocol import Ask, NotSupported, Vector
from inspect_lens.spec import SteeringVector, as_tensor_data, encode_tensor
from tests.kit.api_server import flags

ROWS = np.arange(24, dtype=np.float32).reshape(1, 4, 6)
CHOICE = {
    "token_ids": [7, 9],
    "logprobs": {"top_logprobs": [{"token_id:7": -0.5, "token_id:3": -2.0}, {"token_id:9": 0.0}]},
}


class Server:
    """Answers like a server and keeps what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.status = 200

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            text = '# HELP x\nvllm:num_preemptions_total{engine="0"} 3.0\n'
            return httpx.Response(200, text=text + 'vllm:num_preemptions_total{engine="1"} 4.0\n')
        if request.url.path == "/v1/inspect_lens":
            return httpx.Response(200, json={"open_requests": 2})
        if request.url.path == "/reset_prefix_cache":
            return httpx.Response(404)
        self.bodies.append(json.loads(request.content))
        if self.status != 200:
            return httpx.Response(self.status, text="no such layer")
        encoded = {"residual_stream": encode_tensor(as_tensor_data(ROWS))}
        return httpx.Response(200, json={"choices": [CHOICE], "activations": encoded})


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def engine(server: Server) -> HttpEngine:
    client = httpx.Client(base_url="http://x", transport=httpx.MockTransport(server))
    return HttpEngine(client, "m")


def test_a_request_is_sent_in_the_words_of_the_protocol(engine: HttpEngine, server: Server) -> None:
    vector = Vector(np.ones((1, 6), np.float32), layers=(1,), scale=2.0)
    ask = Ask((5, 6), 2, capture=(0, 3), vectors=(vector,), logprobs=5, salt="s")
    (answer,) = engine.generate([ask])
    (body,) = server.bodies
    assert (body["prompt"], body["max_tokens"], body["cache_salt"]) == ([5, 6], 2, "s")
    assert json.loads(body["vllm_xargs"]["output_residual_stream"]) == [0, 3]
    (sent,) = json.loads(body["vllm_xargs"]["apply_steering_vectors"])
    read = SteeringVector.model_validate(sent)
    assert (list(read.layers), read.scale) == ([1], 2.0)
    assert answer.token_ids == (7, 9)
    assert answer.logprobs is not None
    assert answer.logprobs[0] == {7: -0.5, 3: -2.0}
    np.testing.assert_array_equal(answer.rows, ROWS)


def test_an_error_keeps_its_status(engine: HttpEngine, server: Server) -> None:
    server.status = 400
    (answer,) = engine.generate([Ask((5,), capture=(999,))])
    assert (answer.status, answer.error) == (400, "no such layer")


def test_nan_is_sent_so_that_the_server_has_to_refuse_it(
    engine: HttpEngine, server: Server
) -> None:
    values = np.full((1, 6), np.nan, np.float32)
    engine.generate([Ask((5,), vectors=(Vector(values, layers=(0,)),))])
    (sent,) = json.loads(server.bodies[0]["vllm_xargs"]["apply_steering_vectors"])
    with pytest.raises(ValueError, match="NaN"):
        SteeringVector.model_validate(sent)


def test_rows_beside_the_choice_are_read_too() -> None:
    encoded = {"residual_stream": encode_tensor(as_tensor_data(ROWS))}
    answer = read_response({"choices": [{"token_ids": [1], "activations": encoded}]})
    np.testing.assert_array_equal(answer.rows, ROWS)
    assert read_response({"choices": [{"token_ids": [1]}]}).rows is None


def test_counters_and_what_a_server_does_not_offer(engine: HttpEngine) -> None:
    assert engine.preemptions() == 7
    assert engine.leftovers() == {"open_requests": 2}
    assert engine.reset_prefix_cache() is False
    assert engine.usage() is None
    with pytest.raises(NotSupported, match="hooks"):
        engine.generate([Ask((5,), hook_layer=1)])


def test_tests_of_another_profile_say_how_to_start_their_server(tmp_path: Path) -> None:
    backend = OverHttp("http://x", tmp_path, profile="wide")
    with pytest.raises(NotSupported, match="--print-server tight"), backend.engine("tight"):
        pass


def test_options_become_flags_and_requests_become_json() -> None:
    assert flags({"max_num_seqs": 8, "enforce_eager": True, "x": False, "y": {"z": True}}) == [
        "--max-num-seqs", "8", "--enforce-eager", "--y", '{"z": true}',
    ]  # fmt: skip
    message = json.loads(json.dumps(wire(Ask((1, 2), vectors=(Vector(ROWS, (0,)),)))))
    assert message["prompt"] == [1, 2]
    assert message["vectors"][0]["values"] == ROWS.tolist()
