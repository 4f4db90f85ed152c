"""Hooks through an API server: results in responses and streams, and hooks on every request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

from inspect_lens import Hook, SteeringVector
from inspect_lens.client import LensClient
from inspect_lens.errors import LensError, SpecError
from inspect_lens.model import lens_config
from inspect_lens.spec import decode_saved

pytestmark = pytest.mark.engine

PROMPT = "The founder of the town Velosh"
MODEL = "organism/checkpoint"


@pytest.fixture(scope="module")
def client(lens_server_url: str) -> Iterator[LensClient]:
    with LensClient(lens_server_url) as made:
        about = httpx.get(f"{lens_server_url}/v1/inspect_lens").json()
        if not about["engines"][0]["allows_code"]:
            pytest.skip("the given server runs no code")
        yield made


def keep(ctx: Any, h: Any) -> None:
    ctx.saved.setdefault(f"layer {ctx.layer_idx}", []).append(h)
    ctx.saved["dtype"] = str(h.dtype)


def test_a_response_has_what_hooks_saved(client: LensClient) -> None:
    hook = Hook(fn=keep, layer_indices=[2, 4])
    out = client.generate(PROMPT, max_tokens=5, hooks=[hook], capture_layers=[2, 4])
    assert out.hook_results is not None
    assert out.activations is not None
    saved = out.hook_results["0"]
    for i, layer in enumerate((2, 4)):
        rows = out.activations["residual_stream"][i]
        seen = torch.cat(saved[f"layer {layer}"])[: len(rows)]
        torch.testing.assert_close(seen, rows, rtol=0, atol=0)
    assert saved["dtype"] == "torch.float32"
    assert out.receipt is not None
    assert out.receipt.paths == ("eager",)


def test_a_stream_ends_with_what_hooks_saved(client: LensClient, lens_server_url: str) -> None:
    hook = Hook(fn=keep, layer_indices=[1]).model_dump(mode="json")
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "vllm_xargs": {"apply_hooks": json.dumps([hook])},
    }
    with httpx.stream(
        "POST", f"{lens_server_url}/v1/chat/completions", json=body, timeout=120
    ) as answer:
        events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    saved = decode_saved(json.loads(events[-2])["hook_results"])["0"]
    assert saved["layer 1"][0].shape[1] == 256


def test_a_raising_hook_is_an_error_with_its_traceback(client: LensClient) -> None:
    def bad(ctx: Any, h: Any) -> Any:
        raise RuntimeError("this one is bad")

    def ask(hooks: list[Hook] | None) -> Any:
        try:
            return client.generate(PROMPT, max_tokens=8, hooks=hooks, capture_layers=[3])
        except LensError as error:
            return error

    mixed = [None, [Hook(fn=bad, layer_indices=[3])], None]
    with ThreadPoolExecutor(3) as pool:
        first, failed, last = pool.map(ask, mixed)
    assert isinstance(failed, LensError)
    assert "RuntimeError: this one is bad" in str(failed)
    assert first.text == last.text == client.generate(PROMPT, max_tokens=8).text
    with pytest.raises(SpecError, match="layers 0 to 5"):
        client.generate(PROMPT, hooks=[Hook(fn=keep, layer_indices=[77])])


@pytest.fixture
def registered(client: LensClient) -> Iterator[LensClient]:
    yield client
    client.clear_hooks()


def test_hooks_on_every_request(registered: LensClient) -> None:
    client = registered
    v = torch.randn(256, generator=torch.Generator().manual_seed(0))

    def push(ctx: Any, h: Any) -> Any:
        ctx.saved["tokens"] = ctx.saved.get("tokens", 0) + ctx.seq_len
        ctx.saved["norm"] = ctx.get_parameter("model.norm.weight").shape[0]
        return h + 6.0 * v.to(h)

    vector = SteeringVector(activations=v[None], layer_indices=[2], scale=6.0)
    plain = client.generate(PROMPT, max_tokens=8).text
    steered = client.generate(PROMPT, max_tokens=8, steering_vectors=[vector]).text
    client.register_hooks([Hook(fn=push, layer_indices=[2])], ["model.norm.weight"])
    client.prefetch_params(["lm_head.weight"])
    client.clear_prefetched()
    assert client.generate(PROMPT, max_tokens=8).text == steered != plain
    hooked = client.generate(PROMPT, max_tokens=8)
    assert hooked.hook_results is None
    assert hooked.receipt is not None, "an answer says that somebody's hooks ran on it"
    assert hooked.receipt.hooks is not None
    assert len(hooked.receipt.hooks.persistent) == 1
    found = client.collect_hook_results()
    assert len(found) == 2
    for saved in found.values():
        assert saved["0"]["tokens"] >= 7
        assert saved["0"]["norm"] == 256
    client.clear_hook_results()
    assert len(client.collect_hook_results()) == 0
    client.clear_hooks()
    assert client.generate(PROMPT, max_tokens=8).text == plain


@pytest.mark.anyio
async def test_results_are_in_the_metadata_of_inspect(
    client: LensClient, lens_server_url: str
) -> None:
    from inspect_ai.model import ChatMessageUser, get_model

    def norm(ctx: Any, h: Any) -> None:
        ctx.saved["norm"] = h.norm(dim=-1).mean()

    model = get_model(f"vllm-lens/{MODEL}", base_url=f"{lens_server_url}/v1")
    config = lens_config(hooks=[Hook(fn=norm, layer_indices=[5])], qk=[0], max_tokens=3)
    output = await model.generate([ChatMessageUser(content=PROMPT)], config=config)
    assert output.metadata is not None
    assert float(output.metadata["hook_results"]["0"]["norm"]) > 0
    assert output.metadata["activations"]["attn_q"].dim() == 4
    assert output.metadata["qk_layers"] == [0]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
