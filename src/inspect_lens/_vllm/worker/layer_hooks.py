"""Python in the layers for one eager step: reads and edits the stream.

The hooks are put in before the step and taken out behind it, so a compiled step never meets them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from inspect_lens._engine.hooks.runner import HookRunner, Needs
from inspect_lens._engine.protocol.exceptions import ends_process
from inspect_lens._engine.tap.buffers import TapState
from inspect_lens._engine.tap.op import tap
from inspect_lens._engine.tap.upload import CAPTURE
from inspect_lens._vllm.model.find_layers import as_rows, split_output
from inspect_lens._vllm.model.residual_layout import layout_of
from inspect_lens._vllm.model.sites import ctl_name
from inspect_lens._vllm.model.submodules import BlockInput

__all__ = ["LayerHooks"]

Edits = Sequence[tuple[int, int, torch.Tensor]]


class LayerHooks:
    """Puts the hooks of a step into decoder layers."""

    def __init__(
        self,
        blocks: Sequence[nn.Module | None],
        hooks: HookRunner,
        state: TapState,
        together: Callable[[bool], AbstractContextManager[None]],
    ) -> None:
        """Store what steps need.

        Args:
            blocks: decoder layers of the model; None for those of other pipeline stages.
            hooks: run in them.
            state: of the taps, which capture what hooks have edited.
            together: where ranks may gather parameters; takes whether a hook may ask for some.
        """
        self._together = together
        self._blocks = blocks
        self._hooks = hooks
        self._state = state
        self._handles: list[Any] = []

    def arm(self, needs: Mapping[int, Needs]) -> None:
        """Put in what a step needs.

        Args:
            needs: by layer.
        """
        self.disarm()
        for layer, need in needs.items():
            block = self._blocks[layer]
            if block is None:
                continue
            if need.pre:
                before = functools.partial(self._before, layer, need.asks_pre)
                self._handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
            if need.post:
                after = functools.partial(self._after, layer, need.asks_post)
                self._handles.append(block.register_forward_hook(after))

    def disarm(self) -> None:
        """Take everything out."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # Nothing below may raise into the forward pass: it is that of other requests too.

    def _before(
        self,
        layer: int,
        asks: bool,
        block: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        try:
            with self._together(asks):
                reader = BlockInput(block)
                hidden, residual = reader.read(args, kwargs)
                edits = self._hooks.run(layer, True, functools.partial(_stream, hidden, residual))
            if not edits:
                return None
            names = ("hidden_states",) if residual is None else ("hidden_states", "residual")
            parts = [reader.argument(name, args, kwargs) for name in names]
            return reader.replace(
                args, kwargs, dict(zip(names, _edited(parts, edits), strict=True))
            )
        except BaseException as error:
            if ends_process(error, in_user_code=True):
                raise
            self._hooks.fail_step(error)
            return None

    def _after(self, layer: int, asks: bool, block: nn.Module, args: Any, output: Any) -> Any:
        try:
            with self._together(asks):
                hidden, residual = split_output(block, output, layout_of(type(block)))
                edits = self._hooks.run(layer, False, functools.partial(_stream, hidden, residual))
            if not edits:
                return None
            is_pair = isinstance(output, tuple)
            halves = [output] if not is_pair else output[:1] if residual is None else output
            copies = _edited(halves, edits)
            self._capture_again(block, *copies)
            # The second element, where it is not one of the halves, is not part of the stream.
            return (*copies, *output[len(copies) :]) if is_pair else copies[0]
        except BaseException as error:
            if ends_process(error, in_user_code=True):
                raise
            self._hooks.fail_step(error)
            return None

    def _capture_again(
        self, block: nn.Module, hidden: torch.Tensor, residual: torch.Tensor | None = None
    ) -> None:
        """Let the layer's tap, which ran before its hooks, capture what these made of the rows."""
        ctl = getattr(block, ctl_name("resid_post"), None)
        state = self._state
        if ctl is None or not state.is_active:
            return
        index = state.tap_of[ctl.data_ptr()]
        if not state.capturing[index]:
            return
        # It must not steer a second time.
        steers, flag = state.steering[index], state.flags[index].clone()
        state.steering[index] = False
        state.flags[index].fill_(CAPTURE)
        rows, added = as_rows(hidden), None if residual is None else as_rows(residual)
        assert rows is not None
        tap(rows, added, ctl)
        state.steering[index] = steers
        state.flags[index].copy_(flag)


def _stream(
    hidden: torch.Tensor, residual: torch.Tensor | None, start: int, stop: int
) -> torch.Tensor:
    """The residual stream of some tokens, as memory of its own."""
    if residual is None:
        return hidden[start:stop].clone()
    return (hidden[start:stop].float() + residual[start:stop].float()).to(hidden.dtype)


def _edited(parts: Sequence[torch.Tensor], edits: Edits) -> list[torch.Tensor]:
    """Copies of the stream's halves in which edited rows are new.

    The first half takes the rows whole and the second is zero there, so their sum is exact.
    """
    copies = [part.clone() for part in parts]
    views = [as_rows(copy) for copy in copies]
    for start, stop, rows in edits:
        for i, view in enumerate(views):
            assert view is not None
            view[start:stop] = rows if i == 0 else 0
    return copies
