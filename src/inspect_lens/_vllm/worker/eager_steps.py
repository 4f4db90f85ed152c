"""Steps that run eagerly: those in which a request with hooks runs.

vLLM has the means for encoder-decoder models: a step can be told to replay no graph, and to call
the model as it was before compilation. Here a step is told so when one of its requests needs
Python in the layers; the steps before and behind it are compiled or replayed as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from inspect_lens._engine.hooks.runner import HookedStepper, HookRunner, Needs, Part
from inspect_lens._engine.protocol.processes import ends_process
from inspect_lens._engine.tap.buffers import CAPTURE, TapState
from inspect_lens._engine.tap.op import tap
from inspect_lens._vllm.compat.monkeypatches import EAGER_PATCHES, monkeypatch, verify, wrap
from inspect_lens._vllm.model.find_layers import BlockInput, as_rows, split_output
from inspect_lens._vllm.model.ranks import Ranks
from inspect_lens._vllm.model.residual_layout import layout_of
from inspect_lens._vllm.model.sites import ctl_name
from inspect_lens.errors import CaptureError

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
        self._together = together
        self._blocks = blocks
        self._hooks = hooks
        self._state = state
        self._handles: list[Any] = []

    def arm(self, needs: Mapping[int, Needs]) -> None:
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


_READY = "ready"


class _Step:
    """The step that this process runs; class attributes, so that no `global` is needed."""

    is_eager = False
    wants_eager: Callable[[], bool] | None = None
    """Asked where the V2 runner chooses its graph; set while a real step runs."""
    modes: list[str] | None = None
    """Names of the modes that vLLM has chosen; kept during the start-up check only."""


def is_eager_step() -> bool:
    return _Step.is_eager


def set_eager(is_eager: bool) -> None:
    _Step.is_eager = is_eager


def ask_for_eager(wants_eager: Callable[[], bool] | None) -> None:
    """Have somebody asked where the V2 runner chooses its graph; None ends it."""
    _Step.wants_eager = wants_eager


@contextmanager
def checked_steps(*, is_eager: bool) -> Iterator[list[str]]:
    """Have vLLM run the passes of the start-up check eagerly, or as it chooses."""
    modes: list[str] = []
    _Step.modes = modes
    if is_eager:
        _Step.is_eager, _Step.wants_eager = True, lambda: True
    try:
        yield modes
    finally:
        _Step.modes = _Step.wants_eager = None
        _Step.is_eager = False


def note(chosen: Any) -> Any:
    """Note the mode of graphs that vLLM has chosen for a pass of the start-up check."""
    if _Step.modes is not None:
        first = chosen[0] if isinstance(chosen, tuple) else chosen
        mode = getattr(first, "cg_mode", first)
        _Step.modes.append(str(getattr(mode, "name", "NONE")))
    return chosen


def patch_eager_steps(*, is_v2: bool) -> None:
    """Wrap where vLLM decides how a step runs."""
    dispatch = ("dispatch_v2", _dispatch_v2) if is_v2 else ("dispatch_v1", _dispatch_v1)
    wrappers = dict([("forward_context", _forward_context), dispatch])
    verify(tuple(item for item in EAGER_PATCHES if item.name in wrappers))
    for name, make in wrappers.items():
        wrap(monkeypatch(name), make)


def _forward_context(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_forward_context(*args: Any, **kwargs: Any) -> Any:
        context = original(*args, **kwargs)
        if _Step.is_eager:
            context.skip_compiled = True
        return context

    return create_forward_context


def _dispatch_v1(original: Callable[..., Any]) -> Callable[..., Any]:
    def determine(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _Step.is_eager:
            kwargs["force_eager"] = True
        return note(original(self, *args, **kwargs))

    return determine


def _dispatch_v2(original: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        if _Step.wants_eager is not None and _Step.wants_eager():
            _Step.is_eager = True
            kwargs["need_eager"] = True
        return note(original(*args, **kwargs))

    return dispatch


class Eager:
    """What runners do around an eager step."""

    def __init__(self, stepper: HookedStepper, layers: LayerHooks, ranks: Ranks) -> None:
        assert stepper.hooks is not None
        self._stepper = stepper
        self._hooks: HookRunner = stepper.hooks
        self._layers = layers
        self._ranks = ranks

    @property
    def live(self) -> Mapping[str, Any]:
        """Requests that run hooks, by key."""
        return self._hooks.live

    def begin(self, parts: list[Part]) -> bool:
        """Put the hooks of a step into the layers, on all ranks or on none."""
        if not any(part.key in self._hooks.live for part in parts):
            self._hooks.begin(())
            return False
        problem: BaseException | None = None
        try:
            self._layers.arm(self._hooks.begin(parts))
        except BaseException as error:  # noqa: BLE001 - raised when the other ranks know
            problem = error
        if problem is None and all(said == _READY for said in self._ranks.say(_READY)):
            return True
        # What is half put in would run in steps of others; and ranks would wait for this one.
        self._layers.disarm()
        self._hooks.begin(())
        if problem is not None:
            if not ends_process(problem):
                self._ranks.say("")
            raise problem
        raise CaptureError("hooks could not run: they were not put in on another rank")

    def end(self) -> None:
        """Take the hooks out of the layers again, and fail the requests that have to fail."""
        _Step.is_eager = False
        self._layers.disarm()
        for key, error in self._hooks.end():
            self._stepper.fail(key, error)
