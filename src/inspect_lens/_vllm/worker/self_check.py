"""The start-up check: rows that leave this worker are those of an eager pass, steered or not.

It goes the way of a request: envelope, edit table, plan, maps, taps, ring, export. Two requests are
fed in two chunks each, one of them steered, with a vector of its own at each token. They are run

- eagerly, with and without steering: the reference;
- as vLLM runs such a step: replaying a full graph, graphs of pieces, or compiled code,

in a batch of mixed lengths and in one of decodes. An engine that runs all steps eagerly has one way
only: there two plain runs and a steered one of mixed lengths are all. What it proves of each way:
every tap writes a row in each step; a vector arrives at its token, and at no other; rows equal
those of the eager pass, rounding aside; rows come out of the shared memory bit by bit as they lie
in the ring. A model with experts runs the steered passes several times, with other vectors and
tokens.

What it does not prove: forward passes are vLLM's dummy runs, whose tokens are all alike and see no
cache. (Where vLLM gives a sequence two tokens, the second one sees a place of it, so the check
empties it first.) So the layout of a real batch, as `RunnerV1` and `RunnerV2` read it, is not part
of it. Rows that two eager passes do not agree on (NaN, states that dummy runs change) are not
compared, nor those behind them, which are computed from them. Nor are those of a model with states
of which sequences of dummy runs have no places of their own, in a small cache. Of the sizes that
graphs were captured for, one or two are run. Ranks that send nothing have no rows to compare; they
take part in the passes.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from inspect_lens._engine.export.transport import Exporter
from inspect_lens._engine.step.stepper import Stepper
from inspect_lens._vllm.compat.engine_facts import draft_tokens, is_compiled, n_experts
from inspect_lens._vllm.model.find_layers import has_states
from inspect_lens.errors import CompatError, UnsupportedError
from inspect_lens.spec import SITE_TABLE, Edit, EngineFacts, EnginePath

from .check_requests import (
    KEYS,
    SIZES,
    Exported,
    Inbox,
    StreamProbe,
    envelope,
    is_same_bits,
    marker_of,
    own_rows,
    row_error,
    signs,
    steered_row,
    steering,
)
from .runners import checked_steps, is_v2, own_states

logger = logging.getLogger("vllm.inspect_lens")

_MIXED = 5
"""Tokens of the two requests in a step of mixed lengths."""
_MORE_TRIES = 3
"""Of a model with experts. Which of them it chooses near a tie depends on rounding. So both ways
are run again with other vectors, and other tokens for what lies before these, and only what
differs each time is a fault."""
_PATHS: dict[str, EnginePath] = {"FULL": "graph", "PIECEWISE": "piecewise"}


@dataclass(frozen=True)
class _Shape:
    """Two steps, in each of which both requests have a chunk."""

    name: str
    tokens: int
    """Of the forward pass."""
    steps: tuple[tuple[int, int], ...]
    """Tokens of the plain and of the steered request, by step."""
    is_decode: bool = False

    @property
    def length(self) -> int:
        return sum(plain for plain, _ in self.steps)


@dataclass(frozen=True)
class _Run:
    """What one way of running a shape left."""

    path: EnginePath
    ring: torch.Tensor
    """(rows of a token, requests, positions, hidden), as the ring had them, on the CPU."""
    is_silent: list[bool]
    """By row of a token: whether its tap left it of some step as it was."""
    exported: Exported


def check_steps(
    runner: Any,
    stepper: Stepper,
    exporter: Exporter,
    facts: EngineFacts,
    *,
    scale: float,
    rank: int = 0,
    may_force_eager: bool = True,
    named: tuple[str, float] | None = None,
) -> None:
    """Feed two requests in chunks, in every way there is, and compare rows with eager ones.

    Of layers that were named by hand, by a path and with the size of their largest rows, it is
    shown, too, that they return the residual stream.
    """
    began = time.monotonic()
    inbox = Inbox(exporter)
    check = _Check(runner, stepper, inbox, facts, scale, rank)
    found, ways = [], []
    is_plain = _is_all_eager(runner.vllm_config)
    reference = "eager" if may_force_eager and not is_plain else "repeated"
    shapes = _shapes(runner, stepper, facts)
    _empty_cache(runner)
    try:
        for shape in shapes[:1] if is_plain else shapes:
            try:
                # The same passes on all ranks, whatever their rows say.
                plain = check.run(shape, is_eager=may_force_eager)
                steered = check.steering(shape)
                eager = own = check.run(shape, is_eager=may_force_eager, edits=steered)
                if not is_plain:
                    own = check.run(shape, is_eager=False, edits=steered)
                again = check.run(shape, is_eager=may_force_eager)
                pairs = [(eager, own)]
                for seed in range(1, 1 + (0 if is_plain else check.more_tries)):
                    edits = check.steering(shape, seed)[1:] * 2
                    other = check.run(shape, is_eager=may_force_eager, edits=edits, seed=seed)
                    ours = check.run(shape, is_eager=False, edits=edits, seed=seed)
                    pairs.append((other, ours))
            except _NoPassError as error:
                logger.warning(
                    "inspect_lens: the start-up check could not run %s: %s", shape.name, error
                )
                continue
            if check.rows:
                faults, n_plain, n_steered = _judge(check, shape, plain, again, pairs)
                found += faults
                ways.append(
                    f"{own.path} ({shape.name}): {n_plain} of {len(check.taps)} rows of a token "
                    f"compared with {reference} rows, {n_steered} of them steered, too"
                )
        refused = None
        if named is not None:
            refused = _stream_refusal(check, shapes, named, is_eager=may_force_eager)
    finally:
        check.clear()
        inbox.close()
    if found:
        raise CompatError(
            f"inspect_lens: the start-up check failed: {'; '.join(dict.fromkeys(found))}. Requests "
            "would get wrong rows. Set INSPECT_LENS_DISABLE=1 to run without the lens, or try "
            "enforce_eager; please report it"
        )
    if refused is not None:
        raise refused
    if check.rows and not ways:
        logger.warning("inspect_lens: the start-up check has shown only that every tap fires")
        return
    logger.info(
        "inspect_lens: start-up check passed in %.0f ms: two chunked requests%s; %s",
        1000 * (time.monotonic() - began),
        ", one of them steered" if check.can_steer else "",
        "; ".join(ways) or "this worker sends no rows",
    )


def _stream_refusal(
    check: _Check, shapes: list[_Shape], named: tuple[str, float], *, is_eager: bool
) -> UnsupportedError | None:
    """Why layers that were named by hand are not served; None where they return the stream."""
    refused: UnsupportedError | None = None
    try:
        probe = StreamProbe(*named, check.stepper.state)
        if not shapes:
            return probe.refusal("the start-up check needs steps of two tokens or more")
        shape = shapes[0]
        # All ranks run the same passes to the end, because only those that send rows can judge.
        for size, replaced in itertools.product(SIZES, (0, 1)):
            runs = []
            for edits in probe.edits(shape.length, size, replaced):
                _empty_cache(check.runner)
                runs.append(check.run(shape, is_eager=is_eager, edits=(edits, edits)))
            if check.rows and refused is None:
                rows = [{t: run.ring[i].float() for i, t in enumerate(check.taps)} for run in runs]
                is_overflown = any(run.exported.is_overflown for run in runs)
                refused = probe.judge(rows[0], rows[1], size, replaced, is_overflown=is_overflown)
    except _NoPassError as error:
        return probe.refusal(f"the start-up check could not run them ({error})")
    except UnsupportedError as error:
        return error
    return refused


class _NoPassError(Exception):
    """This vLLM has no such dummy run."""


class _Check:
    """Runs the two requests."""

    def __init__(
        self,
        runner: Any,
        stepper: Stepper,
        inbox: Inbox,
        facts: EngineFacts,
        scale: float,
        rank: int,
    ) -> None:
        self.runner = runner
        # The wrapper would make the taps idle.
        self._dummy_run = getattr(runner._dummy_run, "inspect_lens_original", runner._dummy_run)
        self._known = inspect.signature(self._dummy_run).parameters
        self.stepper = stepper
        self._inbox = inbox
        self._facts = facts
        self._scale = scale
        state = stepper.state
        self.rows = own_rows(facts, state, rank)
        """Of a token at all taps, those that this worker sends."""
        self.taps = [state.row_taps[row] for row in self.rows]
        steered = steered_row(state)
        self.steered_at = self.rows.index(steered) if steered in self.rows else None
        """Where the row of the steered tap is among them."""
        is_routed = n_experts(runner.vllm_config.model_config.hf_text_config) > 1
        self.more_tries = _MORE_TRIES if is_routed and self.can_steer else 0
        self._n_runs = 0
        self._used: list[tuple[int, int]] = []
        cache: Any = getattr(runner, "kv_cache_config", None)
        reqs = int(runner.vllm_config.scheduler_config.max_num_seqs)
        self._has_states = cache is not None and has_states(runner.get_model())
        self._has_own_states = self._has_states and cache.num_blocks > reqs
        """Whether sequences get places of their own for states."""
        self.shares_states = self._has_states and not self._has_own_states
        """Whether all of them share one, where it is chance what kernels return."""

    @property
    def can_steer(self) -> bool:
        """Whether there is a tap that may be written."""
        return any(SITE_TABLE[tap.site].is_wide for tap in self.stepper.state.taps)

    def vectors(self, shape: _Shape, seed: int = 0) -> torch.Tensor:
        """(positions or 1, hidden) of the steered request."""
        rows = self.stepper.state.bank.vectors.shape[0] - 1
        n = shape.length if rows >= shape.length else 1
        drawn = signs(n, self._facts.hidden, seed)
        return torch.from_numpy(drawn * np.float32(self._scale))

    def steering(self, shape: _Shape, seed: int = 0) -> tuple[tuple[Edit, ...], ...]:
        """Edits of the two requests where one of them is steered."""
        if not self.can_steer:
            return (), ()
        return (), steering(self.stepper.state, shape.length, self.vectors(shape, seed))

    def run(
        self,
        shape: _Shape,
        *,
        is_eager: bool,
        edits: tuple[tuple[Edit, ...], ...] = ((), ()),
        seed: int = 0,
    ) -> _Run:
        stepper, state = self.stepper, self.stepper.state
        if self._has_states:
            _empty_cache(self.runner)
        n_rows, hidden = len(self.rows), state.ring.shape[1]
        ring = torch.zeros(n_rows, 2, shape.length, hidden, dtype=state.ring.dtype)
        silent = torch.zeros(n_rows, dtype=torch.bool)
        self._n_runs += 1
        keys = [f"{key}_{self._n_runs}" for key in KEYS]
        for key, own in zip(keys, edits, strict=True):
            asked = envelope(self._inbox.address, self._facts, state, shape.length, own)
            stepper.add(key, asked.pack())
        position = np.zeros(2, dtype=np.int64)
        marker = marker_of(state.ring)
        path: EnginePath = "eager"
        try:
            checked = checked_steps(self.runner, self._facts.vocab, is_eager=is_eager, seed=seed)
            # The V2 runner has an option for it.
            by_table = self._has_own_states and not is_v2(self.runner)
            places = own_states(self.runner) if by_table else nullcontext()
            with checked as modes, places, self._uncompiled(is_eager=is_eager):
                for step in shape.steps:
                    counts = np.asarray(step, dtype=np.int64)
                    stepper.begin(keys, np.cumsum(counts) - counts, counts, position.copy())
                    first, n = int(state.header[1]), int(counts.sum())
                    lies = slice(first, first + n_rows * n)
                    if n_rows:
                        self._used.append((lies.start, lies.stop))
                        state.ring[lies] = marker
                    self._pass(shape, seed)
                    path = self._path(modes, is_eager=is_eager)
                    if n_rows:
                        rows = state.ring[lies].view(n_rows, n, hidden).cpu()
                        silent |= is_same_bits(rows, marker.cpu()).any(dim=1)
                        _place(ring, rows, step, position)
                    stepper.end_step(path)
                    position += counts
        finally:
            stepper.disarm()
            stepper.finish(keys)
            for key in keys:
                stepper.remove(key)
        exported = self._inbox.take(keys, ring.shape, ring.dtype) if n_rows else Exported()
        return _Run(path, ring, silent.tolist(), exported)

    def clear(self) -> None:
        if self._has_states:
            _empty_cache(self.runner)
        for start, stop in self._used:
            self.stepper.state.ring[start:stop].zero_()

    def _pass(self, shape: _Shape, seed: int) -> None:
        # Of a later stage of a pipeline: what passes work on in place, and read again.
        held = getattr(self.runner, "intermediate_tensors", None)
        for tensor in getattr(held, "tensors", {}).values():
            with torch.inference_mode():  # as it was made
                row = torch.linspace(-1, 1, tensor.shape[-1], device=tensor.device)
                tensor.copy_(row.roll(seed * len(row) // (1 + _MORE_TRIES)))
        try:
            self._dummy_run(shape.tokens, **self._options(is_decode=shape.is_decode))
        except Exception as error:
            raise _NoPassError(f"{type(error).__name__}: {error}") from error

    def _options(self, *, is_decode: bool) -> dict[str, bool]:
        """Of a dummy run, by what this runner's takes."""
        wanted = {
            "force_attention": True,
            "skip_attn": False,
            "skip_eplb": True,
            "uniform_decode": is_decode,
            "valid_dummy_state_slots": self._has_own_states,
        }
        return {name: value for name, value in wanted.items() if name in self._known}

    def _uncompiled(self, *, is_eager: bool) -> AbstractContextManager[Any]:
        """Have single operators not compiled either, which takes seconds on a CPU."""
        # On a GPU attention may be one of them, which then takes memory for the whole cache.
        is_wanted = is_eager and not self.stepper.state.ring.is_cuda
        return torch.compiler.set_stance("force_eager") if is_wanted else nullcontext()

    def _path(self, modes: Sequence[str], *, is_eager: bool) -> EnginePath:
        if is_eager:
            return "eager"
        otherwise: EnginePath = "compiled" if is_compiled(self.runner.vllm_config) else "eager"
        return _PATHS.get(modes[-1], otherwise) if modes else otherwise


def _empty_cache(runner: Any) -> None:
    """Have all places of the key-value cache hold the same, as when it was made."""
    # A pass that is padded to a graph's size gives sequences more tokens than one that is not, and
    # these look at one place of the cache more. What warming up has left there is another in each.
    with torch.inference_mode():  # as it was made
        for held in getattr(runner, "kv_caches", ()):
            for tensor in [held] if isinstance(held, torch.Tensor) else held or ():
                tensor.zero_()


def _is_all_eager(config: Any) -> bool:
    """Whether an engine has neither compiled code nor graphs, so that all steps run alike."""
    return config.compilation_config.cudagraph_mode.name == "NONE" and not is_compiled(config)


def _shapes(runner: Any, stepper: Stepper, facts: EngineFacts) -> list[_Shape]:
    """Steps of mixed lengths and steps of decodes, as far as the engine has room for them."""
    config, state = runner.vllm_config, stepper.state
    most = min(facts.max_step_tokens, state.step_rows // len(state.row_taps))
    sequences = int(config.scheduler_config.max_num_seqs)
    each = 1 + draft_tokens(config)
    shapes = []
    if (n := min(_MIXED, most)) >= 2:
        # The V2 runner takes what has one token of each sequence for decodes. So that another
        # graph runs, there are more tokens than sequences, and the rest is nobody's.
        is_wide = is_v2(runner) and state.ring.is_cuda and n <= sequences < facts.max_step_tokens
        more = n - n // 2
        steps = ((more, n - more), (n - more, more))
        tokens = _wide(config, sequences, each, facts.max_step_tokens) if is_wide else n
        shapes.append(_Shape("mixed lengths", tokens, steps))
    if sequences >= 2 and 2 * each <= most:
        shapes.append(_Shape("decodes", 2 * each, ((each, each),) * 2, is_decode=True))
    return shapes


def _wide(config: Any, sequences: int, each: int, most: int) -> int:
    """More tokens than sequences, as many as graphs were captured for, and no decodes."""
    # Were they padded, sequences would have more of them than in an eager pass, and with states the
    # later tokens of one depend on those before.
    sizes = sorted(config.compilation_config.cudagraph_capture_sizes or ())
    fit = (n for n in sizes if sequences < n <= most and n != sequences * each)
    beyond = max([sequences, *sizes]) + 1  # as many as no graph takes
    return next(fit, beyond if beyond <= most else sequences + 1)


def _judge(
    check: _Check, shape: _Shape, plain: _Run, again: _Run, pairs: Sequence[tuple[_Run, _Run]]
) -> tuple[list[str], int, int]:
    """What is wrong with a shape, and how many rows of a token were compared, plain and steered."""
    # The runs `plain` and `again` are eager and not steered. Pairs are steered alike, eager and as
    # vLLM runs such steps.
    eager, own = pairs[0]
    taps, steered_at = check.taps, check.steered_at
    found = []

    def say(run: _Run, which: Sequence[bool], what: str) -> None:
        bad = [f"{t.site}.{t.layer}" for t, is_bad in zip(taps, which, strict=True) if is_bad]
        if names := dict.fromkeys(bad):
            found.append(f"in {run.path} steps ({shape.name}) the taps {', '.join(names)} {what}")

    # Rows that cannot be steered, as a model computes NaN of a dummy token: nothing to compare.
    is_overflown = eager.exported.is_overflown or own.exported.is_overflown
    for run in (plain, again) if is_overflown else (plain, eager, own, again):
        if run.exported.failure:
            found.append(f"in {run.path} steps ({shape.name}) a request: {run.exported.failure}")
        say(run, run.is_silent, "did not write every row")
        lost = ~run.exported.seen.flatten(1).all(dim=1)
        say(run, lost.tolist(), "wrote rows that did not leave the worker")
        same = run.exported.rows.view(torch.uint8) == run.ring.view(torch.uint8)
        say(run, (~same.flatten(1).all(dim=1) & ~lost).tolist(), "wrote rows that left it changed")
    if found or is_overflown or check.shares_states:
        return found, 0, 0
    # Half precision through a deep model moves a row by as much as a few tenths of its length; a
    # row of another token, or of another step, by about its length.
    most = 0.05 if own.ring.dtype == torch.float32 else 0.5
    base = plain.ring.float()
    steady = (row_error(base, again.ring.float()) <= most / 5).flatten(1).all(dim=1)
    steady = steady.cummin(dim=0).values  # what follows something unsteady agrees by chance
    n_vectors = 0
    if steered_at is not None and check.can_steer and steady[steered_at]:
        n_vectors = 1
        steered = base[steered_at].clone()
        steered[1] += check.vectors(shape)
        # What experts add in front of it may differ near a tie: see `_MORE_TRIES`.
        for run in pairs[0] if len(pairs) == 1 else [eager]:
            wrong = bool((row_error(steered, run.ring[steered_at].float()) > most / 2).any())
            at = [wrong and i == steered_at for i in range(len(taps))]
            say(run, at, "do not have the steering vectors")
    # A further pair of which a run failed shows nothing.
    pairs = [pair for pair in pairs if not any(run.exported.failure for run in pair)]
    errors = [row_error(one.ring.float(), other.ring.float()) for one, other in pairs]
    error = torch.stack(errors).amax(dim=3).amin(dim=0)  # (taps, requests)
    # A steered row is like none that a model was trained on, and some amplify rounding there: on a
    # GPU, SmolLM2's plain rows differ by 0.13 of their length at last, and steered ones by 0.7. So
    # these are judged as far as plain ones are close.
    is_close = (error[:, 0] <= most / 10).cummin(dim=0).values
    error = torch.where(is_close | (not check.can_steer), error.amax(dim=1), error[:, 0])
    differs = (error > most) & steady
    if not found and bool(differs.any()):
        by = f"by up to {float(error[differs].max()):.2g} of their length; {most} is allowed"
        say(own, differs.tolist(), f"have other rows than an eager pass ({by})")
    # Where all steps run alike, the one run that is steered has none beside it.
    n_steered = int((is_close & steady).sum()) if own is not eager else n_vectors
    return found, int(steady.sum()), n_steered if check.can_steer else 0


def _place(
    ring: torch.Tensor, rows: torch.Tensor, step: tuple[int, int], position: np.ndarray[Any, Any]
) -> None:
    """Put a step's rows, (taps, tokens, hidden), where request and position say."""
    offset = 0
    for request, count in enumerate(step):
        start = int(position[request])
        ring[:, request, start : start + count] = rows[:, offset : offset + count]
        offset += count
