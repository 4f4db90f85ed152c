"""Finding a block's modules and reading what they return, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from inspect_lens._engine.tap import buffers
from inspect_lens._engine.tap.buffers import CAPTURE, TapState
from inspect_lens._vllm.model.find_layers import (
    BlockInput,
    block_module,
    check_reduced,
    module_output,
)
from inspect_lens._vllm.worker.worker import add_tap
from inspect_lens.errors import UnsupportedError
from inspect_lens.spec import BLOCK_SITES, TapPoint

HIDDEN = 8


class Kernel(nn.Module):
    """Passes for an attention kernel."""


class Mamba(Kernel):
    """Passes for a state-space layer, which is a whole module."""


class Linear(nn.Linear):
    """Passes for a linear layer of vLLM."""

    quant_method = "plain"

    def __init__(self, *, reduce_results: bool = True) -> None:
        super().__init__(HIDDEN, HIDDEN)
        self.reduce_results = reduce_results


class RowParallel(Linear):
    """Passes for one whose ranks are summed."""


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    # Imported first: its own classes derive from the bases that are replaced here.
    # Classes that are made of the real one have to be there before another stands for it.
    import vllm.model_executor.layers.attention
    import vllm.model_executor.models.utils  # noqa: F401
    from vllm.model_executor.layers import attention_layer_base, linear
    from vllm.model_executor.layers.mamba import abstract

    monkeypatch.setattr(attention_layer_base, "AttentionLayerBase", Kernel)
    monkeypatch.setattr(abstract, "MambaBase", Mamba)
    monkeypatch.setattr(linear, "LinearBase", Linear)
    monkeypatch.setattr(linear, "RowParallelLinear", RowParallel)


class Attention(nn.Module):
    def __init__(self, *, reduce_results: bool = True) -> None:
        super().__init__()
        self.kernel = Kernel()
        self.o_proj = RowParallel(reduce_results=reduce_results)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.o_proj(hidden_states)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Linear(), RowParallel()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.down(self.up(x)), None


def block(**children: nn.Module) -> nn.Module:
    made = nn.Module()
    made.norm = nn.LayerNorm(HIDDEN)
    for name, child in children.items():
        setattr(made, name, child)
    return made


@pytest.mark.parametrize(
    ("site", "children"),
    [
        ("attn_out", lambda: {"mlp": FeedForward()}),
        ("attn_out", lambda: {"a": Attention(), "m": Mamba()}),
        ("attn_out", lambda: {"k": Kernel(), "o": RowParallel(), "fc2": RowParallel()}),
        ("attn_out", lambda: {"k": Kernel()}),
        ("mlp_out", lambda: {"a": Attention()}),
        ("mlp_out", lambda: {"a": Attention(), "moe": FeedForward(), "shared": FeedForward()}),
        ("mlp_out", lambda: {"a": Attention(), "up": Linear()}),
    ],
)
def test_a_block_that_is_not_clear_is_refused_by_name(
    site: Any, children: Callable[[], dict[str, nn.Module]]
) -> None:
    class OddDecoderLayer(nn.Module):
        pass

    odd = OddDecoderLayer()
    for name, child in children().items():
        odd.add_module(name, child)
    with pytest.raises(UnsupportedError, match=rf"INSPECT_LENS_SITES: {site}: OddDecoderLayer"):
        block_module(odd, site)


def test_a_sum_that_is_left_to_the_block_is_refused_with_several_ranks() -> None:
    made = block(attention=Attention(reduce_results=False))
    with pytest.raises(UnsupportedError, match=r"Attention\.o_proj returns one rank's share"):
        check_reduced(made, made.attention, "attn_out")
    check_reduced(made, Attention(), "attn_out")


X = torch.ones(3, HIDDEN)


@pytest.mark.parametrize("output", [None, (X, X), [X], X[:, 0], torch.ones(2, 3, HIDDEN)])
def test_an_unknown_output_is_refused_by_name(output: Any) -> None:
    with pytest.raises(UnsupportedError, match="the output of Attention"):
        module_output(Attention(), None, output, "attn_out")


class Writer(Mamba):
    def forward(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        output.copy_(hidden_states + 1)


@pytest.mark.parametrize("is_named", [False, True])
def test_a_module_that_writes_into_an_argument_has_its_tap(is_named: bool) -> None:
    state = TapState(
        taps=(TapPoint("attn_out", 0),),
        hidden=HIDDEN,
        dtype=torch.float32,
        max_tokens=3,
        max_groups=1,
        ring_rows=3,
        bank_rows=1,
        device=torch.device("cpu"),
    )
    made = block(mamba=Writer(), mlp=FeedForward())
    add_tap(made, TapPoint("attn_out", 0), state.new_ctl(0))
    state.tokens[:3] = torch.tensor([[0, 0, i, 0, i] for i in range(3)], dtype=torch.int32)
    state.base[0] = 0
    state.header[0] = 3
    state.capturing = [True]
    state.is_active = True
    buffers.install(state)
    out = torch.empty_like(X)
    try:
        made.mamba(X, output=out) if is_named else made.mamba(X, out)
    finally:
        buffers.uninstall(state)
    assert bool((state.ring == 2).all())


class Fused(nn.Module):
    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        return hidden_states, residual


class Nameless(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


def test_another_input_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"Nameless\.forward takes x"):
        BlockInput(Nameless())
    with pytest.raises(UnsupportedError, match="Fused is called with"):
        BlockInput(Fused()).read((None, X, X[:1]), {})


class Layer(nn.Module):
    """A block with every site; the stream is the sum of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.attention, self.mlp = Attention(), FeedForward()

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        residual = hidden_states if residual is None else hidden_states + residual
        residual = residual + self.attention(hidden_states=residual)
        return self.mlp(residual)[0], residual


def test_every_site_of_a_block_writes_its_rows() -> None:
    taps = tuple(TapPoint(site, 0) for site in BLOCK_SITES)
    state = TapState(
        taps=taps,
        hidden=HIDDEN,
        dtype=torch.float32,
        max_tokens=3,
        max_groups=1,
        ring_rows=12,
        bank_rows=1,
        device=torch.device("cpu"),
    )
    layer = Layer()
    for i, point in enumerate(taps):
        add_tap(layer, point, state.new_ctl(i))
    # One group: the three tokens at each of the four taps.
    state.tokens[:3] = torch.tensor([[0, 0, i, 0, i] for i in range(3)], dtype=torch.int32)
    state.base[0] = 3 * torch.arange(5, dtype=torch.int32)
    state.flags.fill_(CAPTURE)
    state.header[0] = 3
    state.capturing = [True] * 4
    state.is_active = True
    buffers.install(state)
    try:
        with torch.no_grad():
            hidden, residual = layer(None, X.clone(), residual=X.clone())
    finally:
        buffers.uninstall(state)
    rows = state.ring.view(4, 3, HIDDEN)
    attention = layer.attention.o_proj(2 * X)
    # Without hooks: where another test has left a worker, the taps of this one are nobody's.
    mlp_out, _ = layer.mlp.forward(2 * X + attention)
    expected = [2 * X, attention, mlp_out, hidden + residual]
    for found, wanted in zip(rows, expected, strict=True):
        torch.testing.assert_close(found, wanted)
