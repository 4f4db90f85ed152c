"""Several sites in one answer: each by its name, live, in the sidecar and through the client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inspect_lens.client import LensClient
from inspect_lens.errors import CaptureError
from inspect_lens.model import read_activations
from inspect_lens.solver import with_capture
from inspect_lens.spec import (
    SITES,
    CaptureSpec,
    LensRequest,
    SteeringVector,
    TensorData,
    encode_tensor,
    parse_extra_args,
    result_name,
)
from tests.kit.fake_server import FakeLensServer, at_site, residual
from tests.unit.model.conftest import RunEval

CAPTURE = {"layers": [1, 2], "site": list(SITES)}


def expected(tokens: list[int], site: Any) -> Any:
    stream = residual(tokens, (1, 2), list(range(len(tokens) - 1)))
    return at_site(stream, site).to_float32()


@pytest.mark.parametrize("transport", ["inline", "binary"])
def test_the_client_has_a_tensor_per_site(server: FakeLensServer, transport: str) -> None:
    with LensClient(server.url) as client:
        out = client.generate(
            "one two three", capture=CAPTURE, max_tokens=2, activations_transport=transport
        )
    assert out.activations is not None
    assert list(out.activations) == [result_name(site) for site in SITES]
    tokens = out.prompt_token_ids + out.token_ids
    for site in SITES:
        found = out.activations.numpy(result_name(site))
        np.testing.assert_array_equal(found, expected(tokens, site))
    assert out.receipt is not None
    assert out.receipt.capture is not None
    assert out.receipt.capture.site == SITES


def test_steering_at_a_site_travels_by_the_native_key(server: FakeLensServer) -> None:
    vector = SteeringVector(activations=np.ones((1, 8)), layer_indices=[1], site="attn_out")
    with LensClient(server.url) as client:
        client.generate("one", steering_vectors=[vector], max_tokens=2)
    assert '"site": "attn_out"' in server.requests[-1]["vllm_xargs"]["inspect_lens"]


def test_the_sidecar_has_a_tensor_per_site(server: FakeLensServer, run_eval: RunEval) -> None:
    log = run_eval(server, solver=with_capture([1, 2], site=SITES), n=1)
    assert log.status == "success"
    (call,) = read_activations(log)
    acts = call.activations
    assert list(acts.keys()) == [result_name(site) for site in SITES]
    tokens = [*acts.prompt_token_ids, *acts.token_ids]
    for site in SITES:
        np.testing.assert_array_equal(acts.numpy(result_name(site)), expected(tokens, site))
    assert acts.layers == (1, 2)


def test_a_site_that_did_not_come_is_an_error(server: FakeLensServer) -> None:
    from inspect_lens._intake import ChoiceFields, decode_payload

    with LensClient(server.url) as client:
        raw = client.generate("one", capture={"layers": [1]}, max_tokens=2).raw
    choice = ChoiceFields(activations=raw["activations"], token_ids=[1, 2])
    request = LensRequest(capture=CaptureSpec(layers=(1,), site="attn_out"))
    with pytest.raises(CaptureError, match=r"attn_out asked for.*residual_stream"):
        decode_payload(choice, [1], request, {})


@pytest.mark.parametrize(
    ("asked", "name"),
    [({"capture": {"site": "q", "heads": [1]}}, "q"), ({"qk": [(1, 0)]}, "attn_q")],
)
def test_a_server_that_passes_over_heads_is_an_error(
    server: FakeLensServer, asked: dict[str, Any], name: str
) -> None:
    from inspect_lens._intake import ChoiceFields, decode_payload

    with LensClient(server.url) as client:
        given = {"capture_qk": asked["qk"]} if "qk" in asked else asked
        raw = client.generate("one", max_tokens=2, **given).raw
    choice = ChoiceFields(activations=raw["activations"], token_ids=[1, 2])
    choice.receipt = raw.get("inspect_lens")
    with pytest.raises(CaptureError, match=rf"activations.{name}.*(whole rows|all heads)"):
        decode_payload(choice, [1], LensRequest(**asked), {})


META = {"num_heads": 4, "num_kv_heads": 2}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, None),
        ({"qk_heads": [[1, 0], [2, 2]]}, r"attn_q: the heads .*\[2, 2\].* asked were heads .*2, 3"),
        ({"qk_key_heads": [[1, 0], [2, 0]]}, r"attn_k: the heads .* asked were .*\[2, 1\]"),
        ({"qk_heads": ["x", "y"]}, "attn_q: the heads"),
        ({"qk_meta": [{}, {}]}, "attn_k: which key heads .* cannot be read"),
    ],
)
def test_heads_that_came_are_those_that_were_asked_for(
    changed: dict[str, Any], says: str | None
) -> None:
    """Two heads of the same shape are others."""
    from inspect_lens._intake import ChoiceFields, decode_payload

    rows = encode_tensor(TensorData(np.ones((2, 3, 4), np.float32), "float32"))
    plain = {
        "qk_heads": [[1, 0], [2, 3]], "qk_key_heads": [[1, 0], [2, 1]], "qk_layers": [1, 2],
        "qk_meta": [META, META],
    } | changed  # fmt: skip
    answer = {"attn_q": rows, "attn_k": rows, **{n: {"__json__": v} for n, v in plain.items()}}
    choice = ChoiceFields(activations=answer, token_ids=[1, 2])
    request = LensRequest(qk=[(2, 3), (1, 0)])
    if says is None:
        assert decode_payload(choice, [1], request, {}).layers["attn_k"] == (1, 2)
        return
    with pytest.raises(CaptureError, match=says):
        decode_payload(choice, [1], request, {})


def test_layers_of_queries_and_keys_are_those_that_were_asked_for() -> None:
    from inspect_lens._intake import ChoiceFields, decode_payload

    rows = encode_tensor(TensorData(np.ones((1, 3, 2, 4), np.float32), "float32"))
    answer = {"attn_q": rows, "attn_k": rows, "qk_layers": {"__json__": [1]}}
    choice = ChoiceFields(activations=answer, token_ids=[1, 2])
    for asked in ([1], True):
        decode_payload(choice, [1], parse_extra_args({"output_qk": asked}), {})  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=r"attn_q: layers \[1\] came, and asked were layers \[2"):
        decode_payload(choice, [1], LensRequest(qk=[2]), {})
