"""The two model runners of vLLM: where requests begin and end, how a step is laid out, and runs.

A step in which a request with hooks runs is an eager one. vLLM has the means for encoder-decoder
models: a step can be told to replay no graph, and to call the model as it was before compilation.
Here a step is told so when one of its requests needs Python in the layers; the steps before and
behind it are compiled or replayed as ever. A step that splices an autoencoder in is told the first
only: the compiled model calls taps from Python, where no graph has recorded them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from inspect_lens._engine.hooks.runner import HookRunner, Needs, Part
from inspect_lens._engine.protocol.processes import ends_process
from inspect_lens._engine.step.request_stepper import RequestStepper
from inspect_lens._engine.step.stages import LIST_KEY
from inspect_lens._engine.tap.buffers import CAPTURE, TapState
from inspect_lens._engine.tap.op import tap
from inspect_lens._vllm.compat.cpu_seeds import rewind_seeds
from inspect_lens._vllm.compat.engine_facts import is_compiled
from inspect_lens._vllm.compat.features import guarded, idle
from inspect_lens._vllm.compat.monkeypatches import EAGER_PATCHES, monkeypatch, verify, wrap
from inspect_lens._vllm.model.find_layers import (
    BlockInput,
    as_rows,
    ctl_name,
    layout_here,
    split_output,
)
from inspect_lens._vllm.model.parameters import Ranks
from inspect_lens.errors import CaptureError
from inspect_lens.spec import ENVELOPE_KEY, EnginePath

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
                hidden, residual = split_output(block, output, layout_here(block))
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
    """Copies of the stream's halves in which edited rows are new."""
    # The first half takes the rows whole and the second is zero there, so their sum is exact.
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
    """Whether the model is called as it was before compilation."""
    replays_none = False
    """Whether no graph is replayed, so that taps reach Python between compiled kernels."""
    wants_eager: Callable[[], bool] | None = None
    """Asked where the V2 runner chooses its graph; set while a real step runs."""
    wants_none: Callable[[], bool] | None = None
    """The same, of `replays_none`."""
    modes: list[str] | None = None
    """Names of the modes that vLLM has chosen; kept during the start-up check only."""


@contextmanager
def checked_steps(runner: Any, vocab: int, *, is_eager: bool, seed: int = 0) -> Iterator[list[str]]:
    """Have vLLM run passes of the start-up check, of mixed tokens, eagerly or as it chooses."""
    modes: list[str] = []
    _Step.modes = modes
    if is_eager:
        _Step.is_eager, _Step.wants_eager = True, lambda: True
    # Of the V2 runner; the one call behind its dummy batch that comes before every kind of pass.
    model_state = getattr(runner, "model_state", None)
    prepare = getattr(model_state, "prepare_inputs", None)

    def prepare_inputs(batch: Any, *args: Any, **kwargs: Any) -> Any:
        assert prepare is not None
        _draw_tokens(batch.input_ids, vocab, seed)
        return prepare(_not_padding(batch), *args, **kwargs)

    if prepare is not None:
        vars(model_state)["prepare_inputs"] = prepare_inputs
    else:
        _draw_tokens(runner.input_ids.gpu, vocab, seed)
    try:
        yield modes
    finally:
        if prepare is not None:
            del vars(model_state)["prepare_inputs"]
        else:
            runner.input_ids.gpu.zero_()
        _Step.modes = _Step.wants_eager = None
        _Step.is_eager = False


def _draw_tokens(ids: torch.Tensor, vocab: int, seed: int) -> None:
    """Put tokens of all the vocabulary into a step, the same for the same seed."""
    # Of one token alone rows would be alike, whatever request they belong to. And token 0 often is
    # a special one, of which a long row is made in early layers and taken back in the last: what
    # that leaves in half precision is mostly rounding.
    steps = torch.arange(1, len(ids) + 1, device=ids.device)
    ids.copy_((steps * 7919 + seed * 104729) % max(vocab, 1))


@contextmanager
def own_states(runner: Any) -> Iterator[None]:
    """Give each sequence of the V1 runner's dummy runs a place of its own for states."""
    # Theirs is the null block, for which kernels return whatever their memory held.
    from vllm.v1.kv_cache_interface import MambaSpec

    groups = enumerate(runner.kv_cache_config.kv_cache_groups)
    tables = runner.input_batch.block_table
    own = [tables[i] for i, group in groups if isinstance(group.kv_cache_spec, MambaSpec)]
    for table in own:
        places = table.block_table.np
        places[:] = np.arange(1, len(places) + 1)[:, None]
        table.commit_block_table(len(places))
    try:
        yield
    finally:
        for table in own:
            table.clear()


def _not_padding(holder: Any) -> Any:
    """Have tokens of the start-up check go to experts, which skip those of dummy runs."""
    # What they return for skipped tokens is whatever their memory held. Graphs read this mask, too.
    padding = getattr(holder, "is_padding", None)
    if padding is not None:
        padding.fill_(False)
    return holder


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
        return context if _Step.modes is None else _not_padding(context)

    return create_forward_context


def _dispatch_v1(original: Callable[..., Any]) -> Callable[..., Any]:
    def determine(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _Step.is_eager or _Step.replays_none:
            kwargs["force_eager"] = True
        return note(original(self, *args, **kwargs))

    return determine


def _dispatch_v2(original: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        if _Step.wants_eager is not None and _Step.wants_eager():
            _Step.is_eager = True
            kwargs["need_eager"] = True
        elif _Step.wants_none is not None and _Step.wants_none():
            kwargs["need_eager"] = True
        return note(original(*args, **kwargs))

    return dispatch


class Eager:
    """What runners do around an eager step."""

    def __init__(self, stepper: RequestStepper, layers: LayerHooks, ranks: Ranks) -> None:
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


class _Runner:
    """What both have in common. Dummy runs are nobody's steps: the taps are idle in them."""

    def __init__(self, runner: Any, stepper: RequestStepper) -> None:
        self._runner = runner
        self._stepper = stepper
        self.eager: Eager | None = None
        """What runs hooks of requests; None where this vLLM has not what they need."""

    def _add(self, new: Any) -> None:
        params = new.sampling_params
        extra = params.extra_args if params is not None else None
        if extra and ENVELOPE_KEY in extra:
            self._stepper.add(new.req_id, extra[ENVELOPE_KEY])

    def _note_drafts(self, scheduler_output: Any) -> None:
        self._stepper.drafted = scheduler_output.scheduled_spec_decode_tokens

    def _prepared(self, batch: Any) -> None:
        """Get ready for a step of requests that vLLM has laid out, and is about to run."""
        stepper = self._stepper
        if stepper.is_watching:
            guarded(stepper, self._begin, batch)
        elif stepper.is_armed:
            guarded(stepper, stepper.disarm)
        if self.eager is not None and self.eager.live:
            guarded(stepper, self._begin_eager, batch)

    def _begin(self, batch: Any) -> None:
        self._stepper.begin(*self._layout(batch))

    def _begin_eager(self, batch: Any) -> None:
        assert self.eager is not None
        _Step.is_eager = self.eager.begin(_parts(*self._layout(batch)))

    def _layout(self, batch: Any) -> tuple[Any, Any, Any, Any]:
        """Requests of a step with first token, number of tokens, and position."""
        raise NotImplementedError

    def _ask(self, question: Callable[[Container[str]], bool], keys: Container[str]) -> bool:
        return bool(guarded(self._stepper, question, keys))

    def _run(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step, and leave it, also one that has failed."""
        try:
            result = run(*args, **kwargs)
            if self._stepper.is_watching:
                guarded(self._stepper, self._end)
            return result
        finally:
            _Step.replays_none, _Step.wants_eager, _Step.wants_none = False, None, None
            if self.eager is not None and _Step.is_eager:
                guarded(self._stepper, self.eager.end)

    def _end(self) -> None:
        self._stepper.end_step("eager" if _Step.is_eager else self._path())

    def _pass_on(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        """On a pipeline, have rows cross stages beside what `execute_model` gets and returns."""
        # What it returns may be memory of a graph that is replayed again, so it is left as it is.
        stepper, stages = self._stepper, self._stepper.stages
        if stages is None:
            return execute

        @functools.wraps(execute)
        def execute_model(
            scheduler_output: Any, intermediate_tensors: Any = None, **kwargs: Any
        ) -> Any:
            # Named as by vLLM, whose dummy runs give it by its name.
            if kwargs.get("dummy_run"):
                return execute(scheduler_output, intermediate_tensors, **kwargs)
            guarded(stepper, self._take, intermediate_tensors)
            result = execute(scheduler_output, intermediate_tensors, **kwargs)
            going = guarded(stepper, stages.give)
            if going and (tensors := getattr(result, "tensors", None)) is not None:
                return type(result)({**tensors, **going})
            return result

        return execute_model

    def _take(self, received: Any) -> None:
        stages = self._stepper.stages
        assert stages is not None
        # To read the attribute would wait for the tensors, which a step without ours does later.
        has_rows = received is not None and LIST_KEY in vars(received)["tensors"]
        stages.take(received.tensors if has_rows else None, self._stepper.state.ring.shape[1])

    def _path(self) -> EnginePath:
        return "compiled" if is_compiled(self._runner.vllm_config) else "eager"


def _parts(keys: Iterable[str], *columns: Any) -> list[Part]:
    """Requests of a step with first token, number of tokens, and position."""
    rows = zip(keys, *(column.tolist() for column in columns), strict=False)
    return [Part(*row) for row in rows]


class RunnerV1(_Runner):
    def attach(self) -> None:
        runner, stepper = self._runner, self._stepper
        rewind_seeds(runner)
        update, prepare, forward = (
            runner._update_states,
            runner._prepare_inputs,
            runner._model_forward,
        )

        @functools.wraps(update)
        def update_states(scheduler_output: Any) -> Any:
            result = update(scheduler_output)
            guarded(stepper, self._follow, scheduler_output)
            return result

        @functools.wraps(prepare)
        def prepare_inputs(scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
            result = prepare(scheduler_output, num_scheduled_tokens)
            self._note_drafts(scheduler_output)
            self._prepared(num_scheduled_tokens)
            _Step.replays_none = self._ask(stepper.replays_none, runner.input_batch.req_ids)
            return result

        @functools.wraps(forward)
        def model_forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(forward, *args, **kwargs)

        stepper.state.bank.fed.source = self._fed
        runner._dummy_run = idle(stepper, runner._dummy_run)
        runner._update_states = update_states
        runner._prepare_inputs = prepare_inputs
        runner._model_forward = model_forward
        runner.execute_model = self._pass_on(runner.execute_model)

    def _follow(self, scheduler_output: Any) -> None:
        stepper = self._stepper
        if stepper.is_watching:
            stepper.finish(scheduler_output.finished_req_ids)
            for key in scheduler_output.finished_req_ids:
                stepper.remove(key)
        for new in scheduler_output.scheduled_new_reqs:
            self._add(new)

    def _layout(self, num_scheduled_tokens: Any) -> tuple[Any, Any, Any, Any]:
        batch = self._runner.input_batch
        counts = np.asarray(num_scheduled_tokens, dtype=np.int64)
        keys = batch.req_ids
        return keys, np.cumsum(counts) - counts, counts, batch.num_computed_tokens_cpu[: len(keys)]

    def _fed(self) -> torch.Tensor:
        """Ids of the tokens of this step: written before `_prepare_inputs` returns."""
        ids: torch.Tensor = self._runner.input_ids.gpu
        return ids

    def _path(self) -> EnginePath:
        from vllm.forward_context import get_forward_context

        mode = get_forward_context().cudagraph_runtime_mode.name
        paths: dict[str, EnginePath] = {"FULL": "graph", "PIECEWISE": "piecewise"}
        return paths.get(mode) or super()._path()


class RunnerV2(_Runner):
    """Wraps three methods of the runner's model state, and `execute_model`.

    `preprocess_state` runs for real batches only, before the forward pass and before a graph is
    replayed.
    """

    def __init__(self, runner: Any, stepper: RequestStepper) -> None:
        super().__init__(runner, stepper)
        self._graph: EnginePath | None = None
        self._watched: Any = None

    def attach(self) -> None:
        self._attach_state()
        stepper, execute = self._stepper, self._runner.execute_model

        @functools.wraps(execute)
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if stepper.is_watching:
                guarded(stepper, self._leave, scheduler_output)
            if kwargs.get("dummy_run"):
                return execute(scheduler_output, *args, **kwargs)
            self._note_drafts(scheduler_output)
            if self.eager is not None:
                ask = functools.partial(self._ask, keys=scheduler_output.num_scheduled_tokens)
                _Step.wants_eager = functools.partial(ask, self._wants_eager)
                _Step.wants_none = functools.partial(ask, stepper.replays_none)
            return self._run(execute, scheduler_output, *args, **kwargs)

        stepper.state.bank.fed.source = self._fed
        self._runner._dummy_run = idle(stepper, self._runner._dummy_run)
        self._runner.execute_model = self._pass_on(execute_model)

    def _attach_state(self) -> None:
        stepper, state = self._stepper, self._runner.model_state
        add, remove, preprocess = (state.add_request, state.remove_request, state.preprocess_state)

        @functools.wraps(add)
        def add_request(req_index: int, new_req_data: Any, *args: Any, **kwargs: Any) -> Any:
            guarded(stepper, self._add, new_req_data)
            return add(req_index, new_req_data, *args, **kwargs)

        @functools.wraps(remove)
        def remove_request(req_id: str, *args: Any, **kwargs: Any) -> Any:
            # Also called before every add and on pre-emption; a pre-empted request is added
            # again with its parameters.
            if stepper.is_watching:
                guarded(stepper, stepper.remove, req_id)
            return remove(req_id, *args, **kwargs)

        @functools.wraps(preprocess)
        def preprocess_state(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            result = preprocess(input_batch, *args, **kwargs)
            self._prepared(input_batch)
            return result

        state.add_request = add_request
        state.remove_request = remove_request
        state.preprocess_state = preprocess_state

    def _leave(self, scheduler_output: Any) -> None:
        if scheduler_output.finished_req_ids:
            self._stepper.finish(scheduler_output.finished_req_ids)

    def _begin(self, batch: Any) -> None:
        self._watch_graphs()
        super()._begin(batch)

    def _layout(self, batch: Any) -> tuple[Any, Any, Any, Any]:
        counts, position = batch.num_scheduled_tokens, batch.num_computed_tokens_np
        return batch.req_ids, batch.query_start_loc_np[:-1], counts, position

    def _wants_eager(self, scheduled: Container[str]) -> bool:
        return self.eager is not None and any(key in scheduled for key in self.eager.live)

    def _fed(self) -> torch.Tensor:
        """Ids of the tokens of this step: written before `preprocess_state` is called."""
        ids: torch.Tensor = self._runner.input_buffers.input_ids
        return ids

    def _watch_graphs(self) -> None:
        """Learn which kind of graph a step replays; the manager is made after loading."""
        self._graph = None
        manager = self._runner.cudagraph_manager
        if manager is None or manager is self._watched:
            return
        self._watched = manager
        kinds: dict[str, EnginePath] = {"run_fullgraph": "graph", "run_pw_graph": "piecewise"}
        for name, kind in kinds.items():
            setattr(manager, name, self._noting(getattr(manager, name), kind))

    def _noting(self, original: Any, kind: EnginePath) -> Any:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._graph = kind
            return original(*args, **kwargs)

        return run

    def _path(self) -> EnginePath:
        return self._graph or super()._path()


def is_v2(runner: Any) -> bool:
    """Whether a runner is the newer one, which keeps per-model state in an object."""
    return hasattr(runner, "model_state")


def adapter_of(runner: Any, stepper: RequestStepper) -> RunnerV1 | RunnerV2:
    """What attaches a stepper to a runner."""
    return (RunnerV2 if is_v2(runner) else RunnerV1)(runner, stepper)
