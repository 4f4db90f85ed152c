from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from inspect_ai.model import GenerateConfig, get_model
from pydantic import BaseModel

from inspect_lens._base.http import HTTPError
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.model import Activations, activations_for, lens_config, recapture
from inspect_lens.spec import CaptureSpec
from tests.kit.fake_server import FakeLensServer, residual, tokens_of

from .conftest import GetModel

pytestmark = pytest.mark.anyio

PROMPT = "one two three"


def _expected(acts: Activations, layers: tuple[int, ...]) -> np.ndarray:
    tokens = [*acts.prompt_token_ids, *acts.token_ids]
    return residual(tokens, layers, list(acts.positions)).to_float32()


async def test_rows_are_the_tokens(server: FakeLensServer, model_of: GetModel) -> None:
    output = await model_of(server).generate(PROMPT, config=lens_config(capture=[3, 0]))
    acts = output.metadata["activations"]
    assert isinstance(acts, Activations)
    assert acts.layers == (0, 3)
    assert acts.positions == tuple(range(6))
    assert acts.prompt_token_ids == tuple(tokens_of("<user> one two three"))
    np.testing.assert_array_equal(acts.numpy("residual_stream"), _expected(acts, (0, 3)))
    assert list(acts.keys()) == list(acts) == ["residual_stream"]
    assert "residual_stream" in acts
    assert "attn_q" not in acts
    with pytest.raises(KeyError, match="residual_stream"):
        acts["attn_q"]


async def test_the_receipt_comes_with_the_capture(
    server: FakeLensServer, model_of: GetModel
) -> None:
    output = await model_of(server).generate(PROMPT, config=lens_config(capture=1))
    receipt = output.metadata["activations"].receipt
    assert receipt.capture.layers == (1,)
    assert (receipt.n_prompt, receipt.n_completion) == (4, 3)


@pytest.mark.parametrize(
    ("positions", "expected"),
    [("completion", (4, 5)), ("prompt", (0, 1, 2, 3)), ("last_prompt", (3,)), ([5, -1], (5, 3))],
)
async def test_positions_are_chosen_by_the_server(
    server: FakeLensServer, model_of: GetModel, positions: object, expected: tuple[int, ...]
) -> None:
    capture = {"layers": [1], "positions": positions}
    output = await model_of(server).generate(PROMPT, config=lens_config(capture=capture))
    acts = output.metadata["activations"]
    assert acts.positions == expected
    np.testing.assert_array_equal(acts.numpy(), _expected(acts, (1,)))


@pytest.mark.parametrize(
    ("capture", "layers"),
    [
        ([1, 3], (1, 3)),
        (["1", "3"], (1, 3)),  # what -M capture=1,3 becomes
        ("1,3", (1, 3)),
        ("[1, 3]", (1, 3)),
        (2, (2,)),
        ("2", (2,)),
        ("all", (0, 1, 2, 3)),
        ({"layers": [3], "positions": "completion"}, (3,)),
        ('{"layers": [3], "positions": "completion"}', (3,)),
        (CaptureSpec(layers=(0,)), (0,)),
    ],
)
async def test_the_model_argument_captures_every_call(
    server: FakeLensServer, model_of: GetModel, capture: object, layers: tuple[int, ...]
) -> None:
    output = await model_of(server, capture=capture).generate(PROMPT)
    assert output.metadata["activations"].layers == layers


async def test_a_call_overrides_the_model_argument(
    server: FakeLensServer, model_of: GetModel
) -> None:
    model = model_of(server, capture=[1])
    chosen = await model.generate(PROMPT, config=lens_config(capture=[2]))
    assert chosen.metadata["activations"].layers == (2,)
    off = GenerateConfig(extra_body={"extra_args": {"output_residual_stream": False}})
    assert "activations" not in (await model.generate(PROMPT, config=off)).metadata
    other = GenerateConfig(extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    kept = await model.generate(PROMPT, config=other)
    assert kept.metadata["activations"].layers == (1,)
    assert server.requests[-1]["chat_template_kwargs"] == {"enable_thinking": True}


@pytest.mark.parametrize("capture", ["x,y", {"layer": [1]}, {"layers": []}, "{", 1.5])
def test_a_wrong_model_argument_is_refused_at_start(
    server: FakeLensServer, model_of: GetModel, capture: object
) -> None:
    with pytest.raises(Exception, match="capture") as caught:
        model_of(server, capture=capture)
    assert type(caught.value).__name__ == "PrerequisiteError"


async def test_only_the_keys_of_vllm_lens_where_they_suffice(
    server: FakeLensServer, model_of: GetModel
) -> None:
    model = model_of(server)
    await model.generate(PROMPT, config=lens_config(capture=[1, 2]))
    sent = server.requests[-1]["vllm_xargs"]
    assert sent == {"output_residual_stream": "[1, 2]", "activations_transport": "binary"}
    assert server.requests[-1]["return_token_ids"] is True
    assert "extra_args" not in server.requests[-1]
    inline = {"layers": "all", "transport": "inline"}
    await model.generate(PROMPT, config=lens_config(capture=inline))
    sent = server.requests[-1]["vllm_xargs"]
    assert sent == {"output_residual_stream": "true", "activations_transport": "base64"}
    await model.generate(PROMPT, config=lens_config(capture={"layers": [1], "positions": "prompt"}))
    ((key, value),) = server.requests[-1]["vllm_xargs"].items()
    assert key == "inspect_lens"
    assert json.loads(value)["capture"]["positions"] == "prompt"


async def test_other_sampling_arguments_pass(server: FakeLensServer, model_of: GetModel) -> None:
    config = GenerateConfig(extra_body={"vllm_xargs": {"mine": 3}, "extra_args": {"yours": [1]}})
    await model_of(server).generate(PROMPT, config=config)
    assert server.requests[-1]["vllm_xargs"] == {"mine": 3, "yours": "[1]"}


async def test_the_binary_transport_is_fetched(server: FakeLensServer, model_of: GetModel) -> None:
    body = {"extra_args": {"output_residual_stream": [1], "activations_transport": "binary"}}
    output = await model_of(server).generate(PROMPT, config=GenerateConfig(extra_body=body))
    acts = output.metadata["activations"]
    np.testing.assert_array_equal(acts.numpy(), _expected(acts, (1,)))


@pytest.mark.parametrize(
    ("capture", "choices", "fetched"),
    [
        ([1], None, True),
        ({"layers": [1], "positions": "prompt"}, None, True),
        ({"layers": [1], "transport": "inline"}, None, False),
        ({"layers": [1], "positions": "prompt", "transport": "inline"}, None, False),
        ([1], 2, True),
    ],
)
async def test_tensors_are_fetched_beside_the_response_unless_the_caller_says_otherwise(
    server: FakeLensServer, model_of: GetModel, capture: object, choices: int | None, fetched: bool
) -> None:
    config = lens_config(capture=capture, base=GenerateConfig(num_choices=choices))
    model = model_of(server)
    for _ in range(2):
        output = await model.generate(PROMPT, config=config)
        acts = output.metadata["activations"]
        tokens = [*acts.prompt_token_ids, *acts.token_ids]
        assert acts.numpy().shape[:2] == (1, acts.receipt.capture.n_positions)
        assert acts.numpy()[0, 0, 1] == tokens[0] % 16 + 1 / 8
    n_fetched = sum(path.startswith("/v1/activations/") for path in server.read)
    assert n_fetched == (2 * (choices or 1) if fetched else 0)
    assert server.read.count("/v1/inspect_lens") == 1, "what it computes with is asked once"


async def test_servers_without_the_route_answer_inline(
    peer: FakeLensServer, model_of: GetModel
) -> None:
    output = await model_of(peer).generate(PROMPT, config=lens_config(capture=[1]))
    assert output.metadata["activations"].layers == (1,)
    assert peer.requests[-1]["vllm_xargs"] == {"output_residual_stream": "[1]"}


async def test_a_way_that_only_the_own_http_client_knows_is_taken(
    server: FakeLensServer, model_of: GetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise HTTPError("no route")

    monkeypatch.setattr("inspect_lens._base.http.fetch_bytes", unreachable)
    output = await model_of(server).generate(PROMPT, config=lens_config(capture=[1]))
    acts = output.metadata["activations"]
    np.testing.assert_array_equal(acts.numpy(), _expected(acts, (1,)))


async def test_an_expired_handle_is_an_error(model_of: GetModel) -> None:
    with FakeLensServer(expire_handles=True) as server:
        config = lens_config(capture={"layers": [1], "transport": "binary"})
        with pytest.raises(CaptureError, match="expired"):
            await model_of(server).generate(PROMPT, config=config)


async def test_a_server_of_vllm_lens_is_understood(
    peer: FakeLensServer, model_of: GetModel
) -> None:
    output = await model_of(peer).generate(PROMPT, config=lens_config(capture="all"))
    acts = output.metadata["activations"]
    assert acts.receipt is None
    assert acts.layers == (0, 1, 2, 3)
    np.testing.assert_array_equal(acts.numpy(), _expected(acts, (0, 1, 2, 3)))


async def test_a_server_without_the_plugin_is_an_error(
    plain: FakeLensServer, model_of: GetModel
) -> None:
    with pytest.raises(CaptureError, match="plug-in"):
        await model_of(plain).generate(PROMPT, config=lens_config(capture=[1]))


async def test_vllm_lens_and_positions_is_an_error(
    peer: FakeLensServer, model_of: GetModel
) -> None:
    config = lens_config(capture={"layers": [1], "positions": "prompt"})
    with pytest.raises(CaptureError, match="activations"):
        await model_of(peer).generate(PROMPT, config=config)


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        ({"output_residual_stream": [1.5]}, SpecError, "integer"),
        ({"output_residual_stream": "x"}, SpecError, "JSON"),
        ({"output_residual_streams": [1]}, SpecError, "did you mean"),
        ({"apply_steering_vectors": 3}, SpecError, "has to be a SteeringVector"),
        ({"output_qk": [1.5]}, SpecError, "integer"),
        ("text", SpecError, "extra_args"),
    ],
)
async def test_a_wrong_request_is_refused_before_it_is_sent(
    server: FakeLensServer, model_of: GetModel, args: object, error: type[Exception], match: str
) -> None:
    config = GenerateConfig(extra_body={"extra_args": args})
    with pytest.raises(error, match=match):
        await model_of(server).generate(PROMPT, config=config)
    assert not server.requests


async def test_the_words_of_the_server_are_heard(
    server: FakeLensServer, model_of: GetModel
) -> None:
    with pytest.raises(Exception, match=r"layer 9; org/tiny has layers 0 to 3"):
        await model_of(server).generate(PROMPT, config=lens_config(capture=[9]))


async def test_an_incomplete_capture_is_not_retried(
    server: FakeLensServer, model_of: GetModel
) -> None:
    body = {"error": {"message": "rows are missing", "type": "CaptureError", "code": 500}}
    server.fail_next += [(500, body)] * 9
    with pytest.raises(Exception, match="rows are missing"):
        await model_of(server).generate(PROMPT, config=lens_config(capture=[1]))
    # The OpenAI client may repeat a request; Inspect, which never gives up, does not.
    assert len(server.requests) <= 3


async def test_each_choice_keeps_its_own(server: FakeLensServer, model_of: GetModel) -> None:
    config = lens_config(capture=[1], num_choices=3)
    output = await model_of(server).generate(PROMPT, config=config)
    handles = [activations_for(choice.message) for choice in output.choices]
    assert handles[0] is output.metadata["activations"]
    for handle, choice in zip(handles, output.choices, strict=True):
        assert handle is not None
        assert handle.token_ids == tuple(tokens_of(choice.message.text))
        np.testing.assert_array_equal(handle.numpy(), _expected(handle, (1,)))


async def test_choices_that_vllm_lens_forgets_are_an_error(
    peer: FakeLensServer, model_of: GetModel
) -> None:
    with pytest.raises(CaptureError, match="num_choices=2"):
        await model_of(peer).generate(PROMPT, config=lens_config(capture=[1], num_choices=2))


async def test_an_adapter_of_one_call_is_loaded(server: FakeLensServer, model_of: GetModel) -> None:
    request = {"lora_name": "oracle", "lora_int_id": 1, "lora_path": "org/adapter"}
    config = GenerateConfig(extra_body={"lora_request": request})
    model = model_of(server)
    await model.generate(PROMPT, config=config)
    await model.generate(PROMPT, config=config)
    assert server.adapters == {"oracle": "org/adapter"}
    assert server.paths.count("/v1/load_lora_adapter") == 1
    assert [request["model"] for request in server.requests] == ["oracle", "oracle"]
    assert "lora_request" not in server.requests[-1]
    # Reading its text again takes the adapter that wrote it.
    output = await model.generate(PROMPT, config=lens_config(capture=[1], lora=request))
    assert output.metadata["lora_request"] == request
    assert output.metadata["activations"].origin["lora_request"] == request
    await recapture(model, prompt_token_ids=[1], token_ids=[2], layers=[1], adapter=request)
    assert server.requests[-1]["model"] == "oracle"
    await model.generate(PROMPT)
    assert server.requests[-1]["model"] == server.model
    with pytest.raises(SpecError, match="lora_name"):
        await model.generate(PROMPT, config=GenerateConfig(extra_body={"lora_request": {"a": 1}}))


async def test_every_call_is_logged_with_the_adapter_of_its_model(server: FakeLensServer) -> None:
    """The first one as well as those after it, which find the server connected."""
    model = get_model(f"lens/{server.model}:org/adapter", base_url=server.url, memoize=False)
    named = str(model)
    for _ in range(2):
        await model.generate(PROMPT)
        assert str(model) == named
    assert {request["model"] for request in server.requests} == {"org/adapter"}


async def test_a_model_keeps_its_name_when_its_adapter_is_refused(
    server: FakeLensServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')  # else Inspect asks the hub for it
    post, loads = server.post, "/v1/load_lora_adapter"
    refused = 400, {"detail": "no such adapter"}
    monkeypatch.setattr(server, "post", lambda path, b: refused if path == loads else post(path, b))
    model = get_model(f"lens/{server.model}:{tmp_path}", base_url=server.url, memoize=False)
    named = str(model)
    with pytest.raises(RuntimeError, match="adapter"):
        await model.generate(PROMPT, config=GenerateConfig(max_retries=0))
    assert str(model) == named


def test_the_handle_is_a_model_that_inspect_may_copy_and_dump() -> None:
    assert issubclass(Activations, BaseModel)
