"""Hooks, queries and keys beside CUDA graphs: eager steps between replayed ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inspect_lens import Hook, SteeringVector
from inspect_lens.engine import PersistentHooks
from inspect_lens.errors import HookError
from tests.engine.conftest import Engine, start, tokens
from tests.kit.reference import HuggingFace
from tests.kit.tiny_models import tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

HIDDEN, LAYERS = 512, 6
ALL = {"output_residual_stream": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Bits are compared between runs: without a second process arrival times play no part.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["INSPECT_LENS_ALLOW_CODE"] = "1"
    os.environ["INSPECT_LENS_SITES"] = "resid_pre,q,k,resid_post"
    return tiny_llama(
        tmp_path_factory.mktemp("tiny"), layers=LAYERS, hidden=HIDDEN, dtype=torch.bfloat16
    )


@pytest.fixture(scope="module", params=["1", "0"], ids=["V2", "V1"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = request.param
    made = start(
        folder,
        dtype="bfloat16",
        max_num_batched_tokens=256,
        max_num_seqs=16,
        kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.3,
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def hugging_face(folder: Path) -> HuggingFace:
    return HuggingFace(folder)


def rows(output: Any) -> torch.Tensor:
    found: torch.Tensor = output.activations["residual_stream"]
    return found


def hooks(function: Any, *layers: int, pre: bool = False) -> dict[str, Any]:
    return {"apply_hooks": [Hook(fn=function, layer_indices=layers, pre=pre)]}


def keep(ctx: Any, h: Any) -> None:
    ctx.saved.setdefault(f"layer {ctx.layer_idx}", []).append(h)


def test_a_hook_sees_what_a_capture_returns(engine: Engine, hugging_face: HuggingFace) -> None:
    output = engine.run([tokens(300)], {**hooks(keep, 1, 5), **ALL}, max_tokens=12)[0]
    saved = output.hook_results["0"]
    for layer in (1, 5):
        seen = torch.cat(saved[f"layer {layer}"])[:311]
        assert torch.equal(seen, rows(output)[layer])
    fed = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
    expected = hugging_face.residual_stream(fed)
    assert torch.cosine_similarity(rows(output).float(), expected, dim=-1).min() > 0.998
    assert output.inspect_lens.paths == ("eager",)


def test_eager_steps_lie_between_replayed_ones(engine: Engine) -> None:
    prompts = [tokens(30 + i, seed=i) for i in range(4)]
    short = engine.run(prompts, [ALL, *[{**hooks(keep, 2), **ALL}] * 1, ALL, ALL], max_tokens=40)
    assert short[1].inspect_lens.paths == ("eager",)
    again = engine.run(prompts, ALL, max_tokens=40)
    assert "eager" not in again[0].inspect_lens.paths
    assert "graph" in again[0].inspect_lens.paths
    # One with a hook comes into a batch that is decoding, and leaves it again.
    from vllm import SamplingParams

    llm = engine.llm.llm_engine
    plain = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, detokenize=False)
    plain.extra_args = dict(ALL)
    llm.add_request("plain", {"prompt_token_ids": prompts[0]}, plain)
    for _ in range(20):
        llm.step()
    hooked = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, detokenize=False)
    hooked.extra_args = hooks(keep, 2)
    llm.add_request("hooked", {"prompt_token_ids": prompts[1]}, hooked)
    done = {}
    while llm.has_unfinished_requests():
        for output in llm.step():
            if output.finished:
                done[output.request_id] = output
    assert set(done["plain"].inspect_lens.paths) >= {"eager", "graph"}
    assert rows(done["plain"]).shape[1] == 30 + 59
    assert sum(len(h) for h in done["hooked"].hook_results["0"]["layer 2"]) >= 35


def test_neighbours_keep_their_bits(engine: Engine) -> None:
    prompts = [tokens(40 + i, seed=20 + i) for i in range(5)]

    def look(ctx: Any, h: Any) -> None:
        ctx.saved["n"] = ctx.saved.get("n", 0) + len(h)

    def spoil(ctx: Any, h: Any) -> Any:
        return -100 * h

    def together(function: Any) -> list[Any]:
        engine.llm.reset_prefix_cache()
        mine = {**hooks(function, 0, 3), **ALL}
        return engine.run(prompts, [ALL, mine, ALL, mine, ALL], max_tokens=12)

    looked, spoiled = together(look), together(spoil)
    for i in (0, 2, 4):
        assert looked[i].outputs[0].token_ids == spoiled[i].outputs[0].token_ids
        assert torch.equal(rows(looked[i]), rows(spoiled[i]))
    assert not torch.equal(rows(looked[1]), rows(spoiled[1]))


def test_edits_beside_steering_and_capture(engine: Engine) -> None:
    v = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(0))

    def add(ctx: Any, h: Any) -> Any:
        return h + 4.0 * v.to(h)

    vector = SteeringVector(activations=v[None], layer_indices=[2], scale=4.0)
    steer = {"apply_steering_vectors": [vector]}
    prompt = tokens(100)
    hooked = engine.run([prompt], {**hooks(add, 2), **ALL}, max_tokens=1)[0]
    steered = engine.run([prompt], {**steer, **ALL}, max_tokens=1)[0]
    both = engine.run([prompt], {**hooks(add, 2), **steer, **ALL}, max_tokens=1)[0]
    plain = engine.run([prompt], ALL, max_tokens=1)[0]
    for found, times in ((hooked, 1), (steered, 1), (both, 2)):
        expected = rows(plain)[2].float() + 4.0 * times * v
        torch.testing.assert_close(rows(found)[2].float(), expected, rtol=0.02, atol=0.2)
    later = torch.cosine_similarity(rows(hooked)[5].float(), rows(steered)[5].float(), dim=-1)
    assert later.min() > 0.998


def test_raising_persistent_and_queries(engine: Engine, hugging_face: HuggingFace) -> None:
    def bad(ctx: Any, h: Any) -> Any:
        raise ValueError("no")

    with pytest.raises(HookError, match="ValueError: no"):
        engine.run([tokens(20), tokens(30)], [hooks(bad, 1), ALL])

    def size(ctx: Any, h: Any) -> None:
        weight = ctx.get_parameter("model.layers.0.mlp.gate_up_proj.weight")
        ctx.saved["shape"] = list(weight.shape)
        ctx.saved["head"] = list(ctx.get_parameter("lm_head.weight").shape)

    PersistentHooks(engine.llm).register_hooks(
        [Hook(fn=size, layer_indices=[0])], ["model.norm.weight"]
    )
    engine.run([tokens(20), tokens(30)])
    found = PersistentHooks(engine.llm).collect_hook_results()
    PersistentHooks(engine.llm).clear_hooks()
    assert len(found) == 2
    assert all(r["0"]["shape"][1] == HIDDEN for r in found.values())
    assert all(r["0"]["head"][1] == HIDDEN for r in found.values())
    output = engine.run([tokens(300)], {"output_qk": True}, max_tokens=5)[0]
    acts = output.activations
    patterns = hugging_face.attentions(
        [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
    )
    for layer in range(LAYERS):
        meta = acts["qk_meta"][layer]
        k = acts["attn_k"][layer].float()
        k = k.repeat_interleave(meta["num_heads"] // meta["num_kv_heads"], dim=1)
        logits = torch.einsum("qhd,khd->hqk", acts["attn_q"][layer].float(), k) * meta["scale"]
        mask = torch.ones(304, 304, dtype=torch.bool).triu(1)
        pattern = logits.masked_fill(mask, float("-inf")).softmax(dim=-1)
        torch.testing.assert_close(pattern, patterns[layer], rtol=0, atol=0.05)
    # An engine forgets what has finished with its next step.
    engine.run([tokens(5)], max_tokens=2)
    assert engine.stats() == {"requests": 0, "steering_rows": 0, "sum_rows": 0, "shared_bytes": 0}
