"""Python in the layers for one step: layouts, captures of edits, eager dispatch, parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from inspect_lens import Hook
from inspect_lens._engine.hooks.runner import EAGER_KEY, HookRunner, Part
from inspect_lens._engine.tap import buffers
from inspect_lens._engine.tap.buffers import CAPTURE, TapState
from inspect_lens._vllm.model import parameters
from inspect_lens._vllm.model.parameters import Parameters, Ranks
from inspect_lens._vllm.registered.persistent_hooks import packed_hook
from inspect_lens._vllm.worker import runners
from inspect_lens._vllm.worker.runners import LayerHooks
from inspect_lens._vllm.worker.worker import add_tap
from inspect_lens.errors import CompatError, UnsupportedError
from inspect_lens.spec import TapPoint

HIDDEN, TOKENS = 4, 6


class Block(nn.Module):
    """A layer that returns what a test wants of its arguments."""

    layout: Any = "fused"

    def forward(self, positions: Any, hidden_states: Any, residual: Any = None) -> Any:
        if self.layout == "plain":
            return hidden_states + 1
        if self.layout == "batched":
            return (hidden_states + 1)[None]
        if self.layout == "alone":
            return hidden_states + 1, None
        return hidden_states + 1, residual


@pytest.fixture(params=["plain", "batched", "alone", "fused", "stale"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Block:
    made = Block()
    made.layout = request.param
    known = {"fused": "fused", "stale": "stale"}.get(request.param, "fused")
    monkeypatch.setattr(runners, "layout_here", lambda layer: known)
    monkeypatch.setattr("inspect_lens._vllm.model.find_layers.layout_here", lambda layer: known)
    return made


@pytest.fixture
def state() -> Iterator[TapState]:
    made = TapState(
        taps=(TapPoint("resid_post", 0),),
        hidden=HIDDEN,
        dtype=torch.float32,
        max_tokens=TOKENS,
        max_groups=1,
        ring_rows=TOKENS,
        bank_rows=1,
        device=torch.device("cpu"),
    )
    yield made
    buffers.uninstall(made)


def runner(function: Callable[..., Any], pre: bool = False) -> HookRunner:
    made = HookRunner(layers=[0], allowed=True, most_bytes=1 << 20)
    hook = packed_hook(Hook(fn=function, layer_indices=[0], pre=pre))
    asked = {"own": [hook], "persistent": []}
    made.add("a", {"reply": "", "pid": 0, EAGER_KEY: asked})
    return made


def streams() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(TOKENS, HIDDEN, generator=generator), torch.randn(
        TOKENS, HIDDEN, generator=generator
    )


def whole(block: Block, output: Any) -> torch.Tensor:
    """The stream that a layer's output stands for."""
    if not isinstance(output, tuple):
        return output.reshape(TOKENS, HIDDEN)
    if output[1] is None or block.layout == "stale":
        return output[0]
    return output[0] + output[1]


@pytest.mark.parametrize("pre", [False, True])
def test_edits_replace_the_rows_of_the_request_in_every_layout(
    block: Block, state: TapState, pre: bool
) -> None:
    hidden, residual = streams()
    second = residual if block.layout in ("fused", "stale") else None
    add_tap(block, TapPoint("resid_post", 0), state.new_ctl(0))
    buffers.install(state)
    hooks = runner(lambda ctx, h: 10 * h, pre)
    layers = LayerHooks([block], hooks, state, lambda asks: nullcontext())
    before = whole(block, block(None, hidden, second))
    layers.arm(hooks.begin([Part("x", 0, 2, 0), Part("a", 2, 3, 0), Part("y", 5, 1, 0)]))
    # The step captures all tokens, and the tap comes before the hooks.
    state.tokens[:] = torch.tensor([[0, 0, i, 0, i] for i in range(TOKENS)], dtype=torch.int32)
    state.base[0] = 0
    state.header[0], state.header[1] = TOKENS, 0
    state.flags[0] = CAPTURE
    state.capturing, state.steering, state.is_active = [True], [False], True
    given = hidden.clone(), residual.clone()
    output = (
        block(None, hidden_states=hidden, residual=second) if pre else block(None, hidden, second)
    )
    layers.disarm()
    assert not hooks.end()
    after = whole(block, output)
    torch.testing.assert_close(after[:2], before[:2], rtol=0, atol=0)
    torch.testing.assert_close(after[5:], before[5:], rtol=0, atol=0)
    if not pre:
        torch.testing.assert_close(after[2:5], 10 * before[2:5])
    elif block.layout != "stale":
        stream = hidden + residual if second is not None else hidden
        torch.testing.assert_close(after[2:5], 10 * stream[2:5] + 1)
    # What was captured is what the next layer gets, and nothing was written in place.
    torch.testing.assert_close(state.ring, after, rtol=0, atol=0)
    torch.testing.assert_close(hidden, given[0], rtol=0, atol=0)
    torch.testing.assert_close(residual, given[1], rtol=0, atol=0)
    assert state.capturing == [True]
    assert int(state.flags[0]) == CAPTURE
    torch.testing.assert_close(whole(block, block(None, hidden, second)), before, rtol=0, atol=0)


def test_a_layer_that_cannot_be_read_fails_the_requests_and_not_the_step(state: TapState) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {"hidden": x}

    block = Odd()
    for pre in (False, True):
        hooks = runner(lambda ctx, h: h, pre)
        layers = LayerHooks([block], hooks, state, lambda asks: nullcontext())
        layers.arm(hooks.begin([Part("a", 0, TOKENS, 0)]))
        assert block(torch.zeros(TOKENS, HIDDEN)).keys() == {"hidden"}
        layers.disarm()
        ((key, error),) = hooks.end()
        assert key == "a"
        assert "hooks could not run" in str(error)


# -- how a step is made eager ------------------------------------------------------


@pytest.mark.parametrize("is_v2", [False, True])
def test_the_runner_that_does_not_run_is_not_even_imported(
    monkeypatch: pytest.MonkeyPatch, is_v2: bool
) -> None:
    verified: list[str] = []
    wrapped: list[str] = []
    monkeypatch.setattr(
        runners,
        "verify",
        lambda patches: verified.extend(p.target for p in patches),
    )
    monkeypatch.setattr(runners, "wrap", lambda patch, make: wrapped.append(patch.target))
    runners.patch_eager_steps(is_v2=is_v2)
    modules = {target.partition(":")[0] for target in wrapped}
    runner = "vllm.v1.worker.gpu.model_runner" if is_v2 else "vllm.v1.worker.gpu_model_runner"
    assert modules == {"vllm.forward_context", runner}
    assert sorted(verified) == sorted(wrapped)


def test_a_vllm_that_cannot_be_told_is_refused_by_name() -> None:
    from dataclasses import replace

    from inspect_lens._vllm.compat.monkeypatches import EAGER_PATCHES, verify

    verify(EAGER_PATCHES)
    with pytest.raises(CompatError, match=r"create_forward_context.*skip_everything"):
        verify((replace(EAGER_PATCHES[0], keywords=("skip_everything",)),))


# -- parameters --------------------------------------------------------------------


class Group:
    """A tensor-parallel group whose other ranks hold what a test says."""

    def __init__(self, shares: list[torch.Tensor]) -> None:
        self.world_size = len(shares)
        self._shares = shares

    def all_gather(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        assert dim == 0
        return torch.stack(self._shares)


def given(monkeypatch: pytest.MonkeyPatch, shares: list[torch.Tensor]) -> None:
    """Let this process be one of ranks that do alike."""
    monkeypatch.setattr(Ranks, "here", classmethod(lambda cls: cls(Group(shares))))
    monkeypatch.setattr(Ranks, "say", lambda self, text: [text] * self.n)


def get(module: nn.Module, share: torch.Tensor) -> torch.Tensor:
    found = Parameters(model_of(module, share))
    with found.together():
        return found.get("layer.weight")


def model_of(module: nn.Module, share: torch.Tensor, name: str = "weight") -> nn.Module:
    model = nn.Module()
    module.__dict__.setdefault("_parameters", {})
    model.layer = module
    module.register_parameter(name, nn.Parameter(share, requires_grad=False))
    return model


def layer(kind: type[nn.Module], **facts: Any) -> nn.Module:
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    for name, value in facts.items():
        setattr(made, name, value)
    return made


FULL = torch.arange(48.0).reshape(8, 6)


def cases() -> list[Any]:
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    row = [FULL[:, :3], FULL[:, 3:]]
    column = [FULL[:4], FULL[4:]]
    # gate (4 rows) over up (4 rows): each rank has a half of both.
    merged = [torch.cat([FULL[:2], FULL[4:6]]), torch.cat([FULL[2:4], FULL[6:]])]
    # Two query heads of 2 rows, one key and one value head of 2 rows that both ranks hold.
    qkv = [torch.cat([FULL[:2], FULL[4:]]), torch.cat([FULL[2:4], FULL[4:]])]
    zeros = torch.zeros(1, 6)
    # 5 words and 2 added ones, padded to 3 and 2 rows a rank.
    words = [
        torch.cat([FULL[:3], FULL[5:6], zeros]),
        torch.cat([FULL[3:5], zeros, FULL[6:7], zeros]),
    ]
    indices = SimpleNamespace(num_org_elements_padded=3)
    return [
        (layer(linear.RowParallelLinear, tp_size=2), row, FULL),
        (layer(linear.ColumnParallelLinear, tp_size=2), column, FULL),
        (
            layer(linear.MergedColumnParallelLinear, tp_size=2, output_sizes=[4, 4]),
            merged,
            FULL,
        ),
        (
            layer(
                linear.QKVParallelLinear,
                tp_size=2,
                num_heads=1,
                num_kv_heads=1,
                head_size=2,
                num_kv_head_replicas=2,
            ),
            qkv,
            FULL,
        ),
        (layer(linear.ReplicatedLinear, tp_size=2), [FULL, FULL], FULL),
        (layer(nn.LayerNorm), [FULL[0], FULL[0]], FULL[0]),
    ] + [
        (
            layer(
                VocabParallelEmbedding,
                tp_size=2,
                shard_indices=indices,
                org_vocab_size=5,
                num_added_embeddings=added,
            ),
            words,
            FULL[: 5 + added],
        )
        for added in (0, 1)
    ]


@pytest.mark.parametrize("number", range(8))
def test_shares_of_ranks_make_the_whole(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module, shares, expected = cases()[number]
    if number == 7:
        shares = [shares[0], torch.cat([shares[1][:3], torch.zeros(2, 6)])]
        expected = torch.cat([FULL[:5], FULL[5:6]])
    given(monkeypatch, shares)
    found = get(module, shares[0])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_shares_that_nobody_knows_how_to_join_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, [FULL[0], FULL[1]])
    with pytest.raises(UnsupportedError, match="LayerNorm make up the whole is not known"):
        get(layer(nn.LayerNorm), FULL[0])


def test_a_stage_that_cannot_read_a_parameter_tells_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They wait for it, whatever the reason is."""
    told: list[Any] = []
    given(monkeypatch, [FULL])
    found = Parameters(nn.Linear(2, 2))

    def broken(name: str) -> torch.Tensor:
        raise RuntimeError("out of memory here")

    monkeypatch.setattr(found, "get", broken)
    monkeypatch.setattr(parameters, "_over_stages", told.append)
    with pytest.raises(RuntimeError, match="out of memory here"):
        found.prefetch(["weight"])
    assert told == [None]
