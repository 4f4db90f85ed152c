"""Two tensor-parallel ranks, and what fails on one of them alone: nobody waits for the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inspect_lens import Hook, SteeringVector
from inspect_lens.errors import HookError, SpecError
from tests.engine.conftest import HIDDEN, LAYERS, Engine, start, tokens
from tests.kit.reference import HuggingFace

pytestmark = pytest.mark.engine

BYTES = 1 << 16


def _count(ctx: Any, h: Any) -> None:
    ctx.saved["n"] = ctx.position + ctx.seq_len


KEEP = Hook(fn=_count, layer_indices=[0])


@pytest.fixture(scope="module")
def tight(tiny_folder: Path) -> Iterator[Engine]:
    """Two ranks, and little room for what hooks keep."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("INSPECT_LENS_ALLOW_CODE", "1")
        environment.setenv("INSPECT_LENS_HOOK_BYTES", str(BYTES))
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        made = start(tiny_folder, enforce_eager=True, tensor_parallel_size=2)
    yield made
    made.close()


def works(engine: Engine) -> None:
    """Small results of all kinds come, and nothing is left behind."""
    prompts = [tokens(8, seed=i) for i in range(3)]
    outputs = engine.run(prompts, [{"apply_hooks": [KEEP]}, {"output_residual_stream": True}, None])
    assert outputs[0].hook_results["0"]["n"] == 15
    assert outputs[1].activations["residual_stream"].shape[:2] == (LAYERS, 15)
    engine.run([tokens(5)])
    for stats in engine.llm.collective_rpc("inspect_lens_stats"):
        assert stats["requests"] == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hook_that_raises_on_one_rank_fails_its_request(tight: Engine, rank: int) -> None:
    def bad(ctx: Any, h: Any) -> None:
        from vllm.distributed.parallel_state import get_tp_group

        if ctx.position == 0 and get_tp_group().rank_in_group == rank:
            raise ValueError("here alone")

    hook = Hook(fn=bad, layer_indices=[1])
    with pytest.raises(HookError, match="here alone"):
        tight.run([tokens(9)], {"apply_hooks": [hook]}, max_tokens=6)
    works(tight)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hook_that_raises_on_one_rank_while_the_other_asks_for_a_parameter(
    tight: Engine, hugging_face: HuggingFace, rank: int
) -> None:
    """The other one gathers it over both, in each step and at each layer."""

    def bad(ctx: Any, h: Any) -> None:
        from vllm.distributed.parallel_state import get_tp_group

        if get_tp_group().rank_in_group == rank:
            raise ValueError("here alone")
        for name in ("model.norm.weight", "model.embed_tokens.weight"):
            assert ctx.get_parameter(name).numel()

    def good(ctx: Any, h: Any) -> None:
        ctx.saved["head"] = ctx.get_parameter("lm_head.weight")[:5]

    for pre in (False, True):
        hook = Hook(fn=bad, layer_indices=[1, 2], pre=pre)
        with pytest.raises(HookError, match="here alone"):
            tight.run([tokens(9)], {"apply_hooks": [hook]}, max_tokens=6)
    works(tight)
    output = tight.run([tokens(9)], {"apply_hooks": [Hook(fn=good, layer_indices=[1])]})[0]
    whole = hugging_face.model.state_dict()["lm_head.weight"][:5]
    torch.testing.assert_close(output.hook_results["0"]["head"], whole, rtol=0, atol=0)


def test_steering_that_overflows_fails_its_request(tight: Engine) -> None:
    v = torch.randn(LAYERS, HIDDEN, generator=torch.Generator().manual_seed(1))
    vector = SteeringVector(
        activations=v, layer_indices=list(range(LAYERS)), scale=3e9, norm_match=True
    )
    with pytest.raises(SpecError, match="a steered row would have been too large"):
        tight.run([tokens(9)], {"apply_steering_vectors": [vector]}, max_tokens=6)
    works(tight)
