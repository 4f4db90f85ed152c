"""In the worker process: puts taps into the model once it is loaded, and proves they fire."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from inspect_lens._engine.export.transport import Exporter, copier_for
from inspect_lens._engine.hooks.runner import HookRunner
from inspect_lens._engine.protocol.messages import ArenaWriter
from inspect_lens._engine.protocol.processes import ends_process
from inspect_lens._engine.protocol.readouts import LAG, share_of
from inspect_lens._engine.readout.logit_lens import warm_up_lens
from inspect_lens._engine.readout.readers import READOUT_BYTES, warm_up_readout
from inspect_lens._engine.step.request_stepper import RequestStepper
from inspect_lens._engine.step.stages import Stages
from inspect_lens._engine.step.stepper import Stepper
from inspect_lens._engine.tap.buffers import TapState, install
from inspect_lens._engine.tap.op import tap, warm_up
from inspect_lens._settings import Settings
from inspect_lens._vllm.compat.engine_facts import facts_mark, facts_of, refusal, worker_links
from inspect_lens._vllm.compat.features import is_required, off, reason_of, turn_off_engine
from inspect_lens._vllm.compat.fused_norms import undo_fusion
from inspect_lens._vllm.model.find_layers import (
    LOCATORS,
    attention_facts,
    block_module,
    check_reduced,
    ctl_name,
    decoder_layers,
)
from inspect_lens._vllm.model.parameters import Parameters, Ranks, VocabHead
from inspect_lens._vllm.registered.contents import (
    WorkerContents,
    read_kept,
    start_items,
    start_reference,
)
from inspect_lens.errors import CompatError, LensError, UnsupportedError
from inspect_lens.spec import (
    SITE_TABLE,
    EngineAutoencoder,
    EngineFacts,
    EngineLens,
    TapPoint,
    check_engine_autoencoder,
    check_engine_lens,
    rows_for,
)

from .check_requests import check_taps, scale_for, steered_row
from .runners import Eager, LayerHooks, RunnerV1, RunnerV2, adapter_of, patch_eager_steps
from .self_check import check_steps

logger = logging.getLogger("vllm.inspect_lens")


def attach_hooks(
    runner: Any,
    adapter: RunnerV1 | RunnerV2,
    stepper: RequestStepper,
    exporter: Exporter | None,
    blocks: Sequence[nn.Module | None],
    facts: EngineFacts,
    settings: Settings,
) -> None:
    """Make a worker ready for requests with hooks."""
    patch_eager_steps(is_v2=isinstance(adapter, RunnerV2))
    model = runner.get_model()
    parameters = Parameters(model)
    stepper.hooks = HookRunner(
        layers=[layer for layer in facts.layers if blocks[layer] is not None],
        allowed=settings.allow_code,
        most_bytes=settings.hook_bytes,
        model=model,
        parameter=parameters.get,
        send=None if exporter is None else exporter.send_saved,
    )
    layers = LayerHooks(blocks, stepper.hooks, stepper.state, parameters.together)
    adapter.eager = Eager(stepper, layers, Ranks.here())
    runner.inspect_lens_parameters = parameters
    if settings.allow_code:
        logger.warning(
            "inspect_lens: INSPECT_LENS_ALLOW_CODE is set: whoever can send requests to this "
            "engine can run any code in it"
        )


def manage_hooks(worker: Any, action: str, payload: Any) -> str | None:
    """Manage persistent hooks; `collective_rpc("inspect_lens_hooks")` calls it on all workers."""
    runner = worker.model_runner
    stepper: RequestStepper | None = getattr(runner, "inspect_lens", None)
    parameters: Parameters | None = getattr(runner, "inspect_lens_parameters", None)
    try:
        if action == "prefetch":
            # A worker without the lens has no hooks, and may have what others want.
            (parameters or Parameters(runner.get_model())).prefetch(payload)
        elif stepper is None or stepper.hooks is None or parameters is None:
            return None
        elif action == "register":
            for name, item in payload.items():
                stepper.hooks.register(name, item)
        elif action == "unregister":
            stepper.hooks.unregister(payload)
        elif action == "flush":
            stepper.flush(payload)
        elif action == "clear_prefetched":
            parameters.clear()
        else:
            raise LensError(f"unknown action {action!r}")
    except BaseException as error:
        # Told to the caller, see above; a function that is read here may raise what it likes.
        if ends_process(error, in_user_code=True):
            raise
        return f"{type(error).__name__}: {error}"
    return None


_WAIT_S = 300.0
"""Seconds between the first and the last worker that have loaded the model."""
_OFF = "off: "
_PASSES = ("determine_available_memory", "compile_or_warm_up_model")
"""Of vLLM's worker: what runs the model for the first time; the last one ends the start."""


class Start:
    """The lens of one worker, from the loaded model to the first request."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.config = worker.vllm_config
        self.undo = ExitStack()
        """Takes the lens out of the model again."""
        self.check: Callable[[], None] = lambda: None
        """Raises what is wrong with the lens that was put in; run when the model is warm."""
        self.step_bytes = 0
        """On the device, that steps need beside what was allocated."""

    def run(self, prepare: Callable[[Start], str]) -> None:
        """Prepare the model, and have the lens checked once the model is warm."""
        if not self.stage("model", functools.partial(prepare, self)):
            return
        for name in _PASSES:
            setattr(
                self.worker,
                name,
                self._pass(getattr(self.worker, name), is_last=name == _PASSES[-1]),
            )

    def stage(self, name: str, work: Callable[[], str | None]) -> bool:
        """Do a part of the start; returns whether it went well on all ranks."""
        mark, reason, is_told = "", off(self.config), off(self.config) is not None
        try:
            if reason is None:
                mark = work() or ""
        except BaseException as error:  # noqa: BLE001 - a door
            reason = reason_of(error)
        if (reason := agree(name, mark, reason)) is None:
            return True
        self.take_out()
        turn_off_engine(self.config, reason, is_told=is_told or not is_first_rank())
        return False

    def take_out(self) -> None:
        """Have the worker run as without the lens."""
        runner = self.worker.model_runner
        # Compiled code and graphs may have the taps by now. They are idle, and find their state.
        runner.inspect_lens_idle, runner.inspect_lens = getattr(runner, "inspect_lens", None), None
        self.undo.close()

    def _pass(self, original: Callable[..., Any], *, is_last: bool) -> Callable[..., Any]:
        """Run the model for the first time, and where that fails once more without the lens."""

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                with nullcontext() if is_last else self._step_memory():
                    result = original(*args, **kwargs)
            except Exception as error:
                if off(self.config) is not None:
                    raise
                reason = reason_of(error)
                self.take_out()
                result = original(*args, **kwargs)  # or vLLM's own error
                turn_off_engine(self.config, reason, is_told=not is_first_rank())
            if is_last and off(self.config) is None:
                self.stage("check", self.check)
            return result

        return run

    @contextmanager
    def _step_memory(self) -> Iterator[None]:
        """Hold memory that steps will need, so that vLLM does not give it to its cache."""
        held = torch.empty(self.step_bytes, dtype=torch.uint8, device=self.worker.device)
        try:
            yield
        finally:
            del held


def refusal_here(worker: Any) -> str | None:
    """Why the lens is off in a worker; `collective_rpc("inspect_lens_refusal")` calls it."""
    return off(worker.vllm_config)


def is_first_rank() -> bool:
    """Whether this worker speaks for the engine in the log."""
    import torch.distributed as dist

    return not dist.is_initialized() or dist.get_rank() == 0


def agree(stage: str, mark: str, reason: str | None) -> str | None:
    """Compare notes with all other workers, on whichever hosts they are."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return reason
    # What `init_process_group` made: all ranks can reach it, and it answers without a collective,
    # which would hang where a rank takes no part.
    store: Any = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    store.set(f"inspect_lens/{stage}/{rank}", mark if reason is None else _OFF + reason)
    found = [reason]
    for other in range(dist.get_world_size()):
        try:
            store.wait([f"inspect_lens/{stage}/{other}"], timedelta(seconds=_WAIT_S))
            theirs = store.get(f"inspect_lens/{stage}/{other}").decode()
        except RuntimeError:
            found.append(
                f"the worker of rank {other} has not said within {_WAIT_S:g} s that it has "
                "inspect-lens; install it on all hosts, or set INSPECT_LENS_DISABLE=1 on all"
            )
            break
        if theirs.startswith(_OFF):
            found.append(f"the worker of rank {other}: {theirs.removeprefix(_OFF)}")
        elif reason is None and theirs != mark:
            found.append(
                f"the worker of rank {other} has other INSPECT_LENS_* settings, or another "
                "version; give all hosts the same ones"
            )
    return next((one for one in found if one is not None), None)


ABI = 3
"""Part of the compile-cache key: raise it when the op or its place in the graph changes."""


def wrap_load_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Install the lens when the model is there and nothing has been compiled yet."""

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if getattr(self.model_runner, "inspect_lens", None) is None:
            Start(self).run(_install)
        return result

    return load_model


def stats(worker: Any) -> dict[str, int]:
    """What the lens holds in this worker; `collective_rpc("inspect_lens_stats")` calls it."""
    stepper: Stepper | None = getattr(worker.model_runner, "inspect_lens", None)
    if stepper is None:
        return dict.fromkeys(
            ("requests", "steering_rows", "sum_rows", "shared_bytes", "waited_ms"), 0
        )
    return {
        "requests": stepper.n_requests,
        "steering_rows": stepper.rows_in_use,
        "sum_rows": stepper.sum_rows_in_use,
        "shared_bytes": stepper.arena.bytes_in_use,
        "waited_ms": round(1000 * stepper.arena.waited_s),
    }


def register(worker: Any, reference: str, item: dict[str, Any] | None) -> bool | str:
    """Keep an item under a reference (`registered/contents.py`); None gives it up.

    Called on all workers by name. Returns whether the lens is active here, or what went wrong as
    text: an exception would count as a failure of the engine.
    """
    stepper: RequestStepper | None = getattr(worker.model_runner, "inspect_lens", None)
    try:
        if stepper is not None:
            kept: WorkerContents = worker.model_runner.inspect_lens_kept
            if item is None:
                kept.remove(reference)
            else:
                kept.add(reference, read_kept(item))
    except BaseException as error:
        if ends_process(error):
            raise
        return f"{type(error).__name__}: {error}"
    return stepper is not None


def exported_taps(worker: Any) -> list[str]:
    """Taps whose rows this worker sends; `collective_rpc("inspect_lens_taps")` calls it.

    Over the workers of an engine each tap stands in one list.
    """
    stepper: Stepper | None = getattr(worker.model_runner, "inspect_lens", None)
    if stepper is None or not is_exporting_rank():
        return []
    return [f"{tap.site}.{tap.layer}" for tap in stepper.state.taps]


def _install(start: Start) -> str:
    """Put the lens into a loaded model; returns what is equal on all ranks."""
    worker, config, settings = start.worker, start.config, Settings.load()
    if (reason := refusal(config)) is not None:
        raise UnsupportedError(reason)
    if settings.layer_path and not settings.self_check:
        raise UnsupportedError(
            "INSPECT_LENS_LAYER_PATH needs the start-up check, which shows whether these are the "
            "decoder layers; unset INSPECT_LENS_SELF_CHECK"
        )
    runner = worker.model_runner
    facts = facts_of(config, settings)
    blocks = decoder_layers(runner.get_model(), facts.n_layers, settings.layer_path)
    # A stage of a pipeline has the taps of its layers, which may be none.
    here = tuple(tap for tap in facts.taps if blocks[tap.layer] is not None)
    # As many steps may be under way as the pipeline has stages, and one more.
    lag = max(LAG, config.parallel_config.pipeline_parallel_size + 1)
    is_first = is_exporting_rank()
    has_shares = any(facts.width_of(tap.site).shards > 1 for tap in here)
    undo_fusion(blocks, start.undo, ranks=tp_size(), is_first_stage=blocks[0] is not None)
    first = next(i for i, block in enumerate(blocks) if block is not None)
    before = (tap for tap in facts.taps if tap.layer < first and SITE_TABLE[tap.site].is_wide)
    state = _allocate(worker, facts, settings, here, lag, remote=tuple(before))
    for index, point in enumerate(here):
        block, width = blocks[point.layer], facts.width_of(point.site)
        assert block is not None
        own = width.width // width.shards
        handle = add_tap(block, point, state.new_ctl(index), width=own, is_sharded=tp_size() > 1)
        start.undo.callback(handle.remove)
    # Without this a compiled graph that was cached without taps would be loaded, and nothing
    # would fire. The value is hashed, so it must not change between runs.
    start.undo.callback(setattr, config, "additional_config", config.additional_config)
    config.additional_config = {
        **(config.additional_config or {}),
        "inspect_lens": {
            "abi": ABI,
            "taps": [f"{site}.{layer}" for site, layer in facts.taps],
            "layers": settings.layer_path,
        },
    }
    # The other ranks send failures only.
    arena = ArenaWriter(settings.shm_bytes if is_first or has_shares else 1 << 20)
    links = worker_links(settings, facts)
    exporter = Exporter(arena, copier_for(arena, worker.device, state.parts), links)
    if {"q", "k"} <= set(facts.sites):
        heads = int(config.model_config.get_total_num_kv_heads())
        exporter.attention = msgspec.msgpack.encode(attention_facts(blocks, heads))
    stages = stages_here(facts.ring_rows)
    is_last = stages is None or stages.is_last
    stepper = RequestStepper(state, exporter, lag=lag, rank=tp_rank(), is_last=is_last)
    stepper.stages = stages
    if stages is not None:
        start.step_bytes = stages.nbytes(facts.hidden * state.ring.element_size())
    widths = {facts.width_of(tap.site) for tap in here}
    # Not before the stepper has told taps where they note faults.
    warm_up(state, {w.width // w.shards for w in widths} - {facts.hidden})
    warm_up_readout(state.ring, state.scratch)
    stepper.probes.most_bytes = settings.probe_bytes
    stepper.lenses.most_bytes = settings.lens_bytes
    runner.inspect_lens_kept = WorkerContents(stepper.probes, stepper.lenses)
    _give_head(stepper, runner.get_model(), blocks)
    runner.inspect_lens = stepper
    adapter = adapter_of(runner, stepper)
    adapter.attach()
    sent = exporter if is_first else None
    _attach_hooks(runner, adapter, stepper, sent, blocks, facts, settings)
    _keep_start_items(runner, stepper, facts, settings)
    # Whether a block or its feed-forward module leaves a sum to others shows only in its values.
    if here and (settings.self_check or tp_size() > 1):
        start.check = functools.partial(
            _check,
            worker,
            stepper,
            exporter,
            facts,
            is_whole=settings.self_check,
            layer_path=settings.layer_path,
        )
    install(state)
    logger.info(
        "inspect_lens: %d taps (%s) in %d of %d layers, capture buffer of %d rows, %d steering "
        "rows, sums of %d requests at all taps, %.1f MiB on the device, %.1f MiB shared with the "
        "front-end",
        len(here),
        ", ".join(facts.sites),
        len({tap.layer for tap in here}),
        facts.n_layers,
        state.step_rows,
        facts.bank_rows,
        len(state.sums) // max(1, len(state.row_taps)),
        state.nbytes / 2**20,
        arena.nbytes / 2**20,
    )
    return facts_mark(facts)


def _allocate(
    worker: Any,
    facts: EngineFacts,
    settings: Settings,
    taps: tuple[TapPoint, ...],
    lag: int,
    *,
    remote: tuple[TapPoint, ...],
) -> TapState:
    config = worker.vllm_config
    dtype, is_first = config.model_config.dtype, is_exporting_rank()
    max_requests = int(config.scheduler_config.max_num_seqs)
    tap_rows = [rows_for(facts.width_of(tap.site), facts.hidden) for tap in taps]
    sums = min(max_requests * sum(tap_rows), sums_that_fit(settings, facts.hidden, dtype, lag))
    return TapState(
        taps=taps,
        hidden=facts.hidden,
        dtype=dtype,
        max_tokens=_max_tokens(config, facts),
        max_groups=max_requests,
        ring_rows=min(facts.ring_rows, (sum(tap_rows) + len(remote)) * facts.max_step_tokens),
        bank_rows=facts.bank_rows,
        device=worker.device,
        # The others' rows are the same, or shares, which they send one by one.
        sum_rows=sums if is_first else 0,
        lag=lag,
        scratch_bytes=READOUT_BYTES if is_first and worker.device.type == "cuda" else 0,
        tap_rows=tap_rows,
        shares=[share_of(facts.width_of(tap.site), facts.ranks, tp_rank()) for tap in taps],
        remote=remote,
    )


def _give_head(stepper: RequestStepper, model: Any, blocks: list[nn.Module | None]) -> None:
    """Get ready for the logit lens, or note why requests for it fail."""
    if stepper.stages is not None and not stepper.stages.is_last:
        return
    try:
        stepper.head = VocabHead(model, blocks)
        ring = stepper.state.ring
        warm_up_lens(stepper.head.vocab, ring.dtype, ring.device)
    except (UnsupportedError, ImportError) as error:
        stepper.no_head = stepper.lenses.refusals[EngineLens] = str(error)


def _attach_hooks(
    runner: Any, adapter: RunnerV1 | RunnerV2, stepper: RequestStepper, *args: Any
) -> None:
    """Get ready for hooks and autoencoders, or go on without where this vLLM lacks a name."""
    try:
        attach_hooks(runner, adapter, stepper, *args)
    except CompatError as error:
        stepper.lenses.refusals[EngineAutoencoder] = str(error)
        if is_required():
            raise
        logger.warning("inspect_lens: custom hooks and whole autoencoders: off: %s", error)


def _keep_start_items(
    runner: Any, stepper: RequestStepper, facts: EngineFacts, settings: Settings
) -> None:
    """Keep what is registered at start."""
    for name, item in start_items(settings.register).items():
        try:
            if isinstance(item, EngineLens):
                check_engine_lens(item, facts)
            elif isinstance(item, EngineAutoencoder):
                check_engine_autoencoder(item, facts)
            runner.inspect_lens_kept.add(start_reference(name), item)
        except LensError as error:
            raise type(error)(f"INSPECT_LENS_REGISTER: {name}: {error}") from None


def is_exporting_rank() -> bool:
    """Whether this rank sends rows: the stream is the same on all tensor-parallel ranks."""
    return tp_rank() == 0


def stages_here(most_rows: int) -> Stages | None:
    """This worker's part in what crosses the stages of a pipeline; None without one."""
    from vllm.distributed.parallel_state import get_pp_group

    group = get_pp_group()
    if group.world_size == 1:
        return None
    return Stages(
        is_first=bool(group.is_first_rank),
        is_last=bool(group.is_last_rank),
        ranks=tp_size(),
        most_rows=most_rows,
    )


def tp_rank() -> int:
    from vllm.distributed.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group)


def tp_size() -> int:
    from vllm.distributed.parallel_state import get_tp_group

    return int(get_tp_group().world_size)


def add_tap(
    block: nn.Module,
    point: TapPoint,
    ctl: torch.Tensor,
    *,
    width: int | None = None,
    is_sharded: bool = False,
) -> RemovableHandle:
    """Put a tap into a decoder layer. Hooks are traced into the compiled graph."""
    place = LOCATORS[point.site](block, width or 0)
    if is_sharded and point.site in ("attn_out", "resid_mid"):
        check_reduced(block, block_module(block, "attn_out"), point.site)
    # A buffer, so that tracing lifts it to an input of the graph; not saved with the model.
    name = ctl_name(point.site)
    place.module.register_buffer(name, ctl, persistent=False)

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        tap(*place.read(args, kwargs, None), getattr(module, name))

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tap(*place.read(args, kwargs, output), getattr(module, name))

    if place.is_input:
        return place.module.register_forward_pre_hook(before, with_kwargs=True)
    return place.module.register_forward_hook(after, with_kwargs=True)


def sums_that_fit(settings: Settings, hidden: int, dtype: torch.dtype, lag: int) -> int:
    """Sums, and the latest rows beside each, that the settings have room for."""
    return settings.sum_bytes // (hidden * (torch.float32.itemsize + lag * dtype.itemsize))


def _max_tokens(config: Any, facts: EngineFacts) -> int:
    """Tokens of the largest forward pass, padding included."""
    sizes: list[int] = config.compilation_config.cudagraph_capture_sizes or []
    return max([facts.max_step_tokens, *sizes])


def _check(
    worker: Any,
    stepper: RequestStepper,
    exporter: Exporter,
    facts: EngineFacts,
    *,
    is_whole: bool,
    layer_path: str,
) -> None:
    rows = check_taps(worker.model_runner, stepper, is_sharded=tp_size() > 1)
    if is_whole:
        named = None
        if layer_path:
            sizes = rows.float().norm(dim=-1).nan_to_num(nan=0.0)
            loudest = rows[int(sizes.argmax())]
            named = layer_path, scale_for(loudest, is_sharded=tp_size() > 1)
        check_steps(
            worker.model_runner,
            stepper,
            exporter,
            facts,
            scale=scale_for(rows[steered_row(stepper.state)], is_sharded=tp_size() > 1),
            rank=tp_rank(),
            may_force_eager=stepper.hooks is not None,
            named=named,
        )
