"""The op: against its definition, in eager mode and inside a compiled graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from inspect_lens._engine.tap import buffers
from inspect_lens._engine.tap.buffers import TapState
from inspect_lens._engine.tap.op import tap
from inspect_lens.errors import LensError
from inspect_lens.spec import TapPoint
from tests.kit.edit_table import add_entries

HIDDEN = 16
TOKENS = 12


def known(state: TapState, tap: int) -> torch.Tensor:
    """Control tensor of a tap that the process knows."""
    ctl = state.new_ctl(tap)
    buffers.install(state)
    return ctl


@pytest.fixture
def state() -> Iterator[TapState]:
    made = TapState(
        taps=(TapPoint("resid_post", 3), TapPoint("resid_post", 7)),
        hidden=HIDDEN,
        dtype=torch.float32,
        max_tokens=TOKENS + 4,
        max_groups=2,
        ring_rows=40,
        bank_rows=6,
        device=torch.device("cpu"),
    )
    buffers.install(made)
    yield made
    buffers.uninstall(made)


def fill(state: TapState, *, taps: tuple[int, ...]) -> None:
    """Entry 1 adds, entry 2 adds scaled by the norm, entry 3 adds and links to entry 2."""
    torch.manual_seed(0)
    state.bank.vectors[1:4] = torch.randn(3, HIDDEN)
    add_entries(state.bank, by_norm=[2], links={3: 2})
    state.tokens[:, :] = torch.tensor([0, -1, 0, 0, 0])
    state.tokens[:4, 0] = torch.arange(1, 5)
    state.tokens[2:6, 1] = 0
    state.tokens[2:6, 2] = torch.arange(4)
    state.header[0], state.header[1] = TOKENS - 1, 3
    for rank, index in enumerate(taps):
        # Configurations 1 to 3 apply the rows of their number; 4 applies none here.
        state.bank.table[1:4, index] = torch.arange(1, 4, dtype=torch.int32)
        state.base[0, index] = 7 + 4 * rank
        state.steering[index] = state.capturing[index] = True
    state.is_active = True


def expected(hidden: torch.Tensor, residual: torch.Tensor | None, bank: Any) -> torch.Tensor:
    stream = hidden if residual is None else hidden + residual
    norm = stream.norm(dim=-1, keepdim=True)
    out = hidden.clone()
    out[0] += bank.vectors[1]
    out[1] += bank.vectors[2] * norm[1]
    out[2] += bank.vectors[3] + bank.vectors[2] * norm[2]
    return out


@pytest.mark.parametrize("is_fused", [False, True])
def test_rows_are_edited_and_captured(state: TapState, is_fused: bool) -> None:
    fill(state, taps=(1,))
    ctl = known(state, 1)
    hidden = torch.randn(TOKENS, HIDDEN)
    residual = torch.randn(TOKENS, HIDDEN) if is_fused else None
    before = hidden.clone()
    tap(hidden, residual, ctl)
    torch.testing.assert_close(hidden, expected(before, residual, state.bank))
    assert torch.equal(hidden[3:], before[3:]), "tokens without a row keep their bits"
    stream = hidden if residual is None else hidden + residual
    torch.testing.assert_close(state.ring[10:14], stream[2:6])
    assert not state.ring[14:].any()
    assert not state.ring[:10].any()


def test_another_tap_and_an_idle_step_do_nothing(state: TapState) -> None:
    fill(state, taps=(1,))
    hidden = torch.randn(TOKENS, HIDDEN)
    before = hidden.clone()
    tap(hidden, None, known(state, 0))
    assert torch.equal(hidden, before)
    state.is_active = False
    tap(hidden, None, known(state, 1))
    assert torch.equal(hidden, before)
    assert not state.ring.any()


def test_bfloat16_is_rounded_once(state: TapState) -> None:
    fill(state, taps=(0,))
    hidden = torch.randn(TOKENS, HIDDEN).bfloat16()
    before = hidden.clone()
    tap(hidden, None, known(state, 0))
    assert torch.equal(hidden[0], (before[0].float() + state.bank.vectors[1]).bfloat16())


class Stack(torch.nn.Module):
    def __init__(self, ctls: list[torch.Tensor]) -> None:
        super().__init__()
        self.linears = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in ctls)
        for i, ctl in enumerate(ctls):
            self.register_buffer(f"ctl{i}", ctl, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = torch.zeros_like(x)
        for i, linear in enumerate(self.linears):
            residual = residual + x
            x = linear(x)
            tap(x, residual, getattr(self, f"ctl{i}"))
        return x + residual


@pytest.mark.slow
def test_a_compiled_graph_keeps_the_taps_and_equals_eager(state: TapState) -> None:
    model = Stack([known(state, 0), known(state, 1)])
    x = torch.randn(TOKENS, HIDDEN)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        idle = compiled(x)
        torch.testing.assert_close(idle, model(x))
        fill(state, taps=(0, 1))
        eager = model(x)
        rows = state.ring.clone()
        state.ring.zero_()
        # The maps changed after compilation and nothing was traced again.
        found = compiled(x)
    torch.testing.assert_close(found, eager)
    torch.testing.assert_close(state.ring, rows)
    assert not torch.allclose(found, idle)


def test_a_moved_control_tensor_is_an_error_and_not_a_silent_no(state: TapState) -> None:
    fill(state, taps=(0,))
    known(state, 0)
    with pytest.raises(LensError, match="control tensor"):
        tap(torch.zeros(2, HIDDEN), None, torch.zeros(1, dtype=torch.int32))


def test_without_an_engine_a_tap_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_owners", {})
    hidden = torch.ones(2, HIDDEN)
    tap(hidden, None, torch.zeros(1, dtype=torch.int32))
    assert torch.equal(hidden, torch.ones(2, HIDDEN))


def test_tokens_that_the_maps_do_not_describe_are_left_alone(state: TapState) -> None:
    fill(state, taps=(0,))
    state.header[0] = 1
    hidden = torch.randn(TOKENS, HIDDEN)
    before = hidden.clone()
    tap(hidden, None, known(state, 0))
    assert torch.equal(hidden[1:], before[1:])
    assert not torch.equal(hidden[0], before[0])
    assert not state.ring.any()
