"""What the start-up check asks of the model, and how it judges what comes back.

Two requests, and a front-end in the worker that takes their rows. Where layers were named by hand,
also whether these return the residual stream, shown by what replaces it: what is written over the
whole stream behind a layer has to be all that later layers see of those before. So the stream
behind every second layer is replaced with one vector. A run in which the layers between add a large
vector is compared with one in which they add none: behind a replaced layer, rows have to be alike
but for what was added to themselves. Where the modules are not the decoder layers, or a pair that
they return is not a sum, what was added goes around what was replaced. It is done with vectors of
two sizes. Large ones have to be most of the next row, because a layer adds to the stream: attention
of a dummy pass, which sees an empty cache, depends on nothing at all. Beside vectors of a row's
size, a small half that nobody adds shows as well.

What this does not show: nothing lies behind the last layer, and a half that is zero in a dummy
pass, such as attention's results alone, changes no sum.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

import numpy as np
import torch
import zmq
from numpy.typing import NDArray

from inspect_lens._engine.export.transport import COLUMN, Exporter, overflow
from inspect_lens._engine.protocol.messages import (
    BOARD_SIZE,
    ArenaReader,
    Block,
    Envelope,
    Failure,
    Opened,
    decode,
    seal,
    unpacked,
)
from inspect_lens._engine.protocol.readouts import RowPart
from inspect_lens._engine.step.stepper import Stepper
from inspect_lens._engine.tap.buffers import CAPTURE, HEAD, TapState, install
from inspect_lens._engine.tap.edit_table import largest_norm
from inspect_lens.errors import CompatError, UnsupportedError
from inspect_lens.spec import (
    RESID_POST,
    SITE_TABLE,
    Add,
    CaptureSpec,
    Edit,
    EngineFacts,
    LensRequest,
    Replace,
    TapPoint,
)

KEYS = ("inspect_lens_check_plain", "inspect_lens_check_steered")
"""How the names of the two requests begin; each run has its own."""
_WAIT_S = 10.0
"""For rows of a few tokens, which lie in memory of the same machine."""


@dataclass
class Exported:
    """What came out of a worker."""

    rows: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """(rows of a token, requests, positions, hidden)."""
    seen: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    """(rows of a token, requests, positions)."""
    failure: str = ""
    """Why the worker failed a request."""
    is_overflown: bool = False
    """Whether a tap left a steered row as it was, because it was not finite, or too large."""


def signs(n: int, hidden: int, seed: int = 0) -> NDArray[np.float32]:
    """(n, hidden) of ones with signs by chance, the same on all ranks."""
    drawn = np.random.default_rng(seed).integers(0, 2, (n, hidden))
    return (2 * drawn - 1).astype(np.float32)


def steered_tap(state: TapState) -> int:
    """Index of the tap at which the check steers; 0 where none may be written."""
    writable = (i for i, tap in enumerate(state.taps) if SITE_TABLE[tap.site].is_wide)
    return next(writable, 0)


def steered_row(state: TapState) -> int:
    """Which of a token's rows at all taps is that tap's."""
    return int(state.row_starts[steered_tap(state)])


def own_rows(facts: EngineFacts, state: TapState, rank: int) -> list[int]:
    """Which of a token's rows at all taps this worker sends: all, or its shares of some."""
    capture = envelope("", facts, state, 1).capture
    sent = set() if capture is None else set(capture.rows)
    starts = zip(state.taps, state.row_starts.tolist(), state.tap_rows.tolist(), strict=True)
    return [
        start + part
        for tap, start, n in starts
        for part in range(n)
        if RowPart(rank, tap, part) in sent
    ]


def steering(state: TapState, n: int, vectors: torch.Tensor) -> tuple[Edit, ...]:
    """Vectors, (1 or positions, hidden), for the first tokens at one tap."""
    values = vectors.numpy()
    site, layer = state.taps[steered_tap(state)]
    vector = values[0] if len(values) == 1 else values[None]
    return (Add(vector=vector, layers=(layer,), site=site, positions=tuple(range(n))),)


def envelope(
    reply: str, facts: EngineFacts, state: TapState, n: int, edits: tuple[Edit, ...] = ()
) -> Envelope:
    """A capture of the first tokens at all taps, and edits, as a front-end seals it."""
    made = seal(
        LensRequest(capture=CaptureSpec(layers=facts.layers, site=facts.sites), edits=edits),
        facts,
        reply=reply,
        n_prompt=n,
        max_tokens=1,
        epoch=lambda content: f"inspect_lens start-up check {n} {content}",
    )
    return replace(made, is_speculative=False)


class Inbox:
    """Takes rows as a front-end does: messages from a socket, rows from shared memory."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self.address = f"inproc://inspect-lens-check-{uuid4().hex}"
        self._socket: Any = zmq.Context.instance().socket(zmq.PULL)
        self._socket.bind(self.address)
        self._numbers: dict[int, int] = {}
        self._readers: dict[str, ArenaReader] = {}

    def take(self, keys: Sequence[str], shape: Sequence[int], dtype: torch.dtype) -> Exported:
        got = Exported(torch.zeros(*shape, dtype=dtype), torch.zeros(*shape[:3], dtype=torch.bool))
        deadline = time.monotonic() + _WAIT_S
        while not got.seen.all() and not got.failure and time.monotonic() < deadline:
            if not self._socket.poll(50):
                continue
            message = decode(self._socket.recv())
            if isinstance(message, Opened):
                if message.worker not in self._readers:
                    self._readers[message.worker] = ArenaReader(message.worker)
                for opening in message.openings:
                    # A run that failed was waited for no longer: its messages come in the next.
                    if opening.key in keys:
                        self._numbers[opening.number] = keys.index(opening.key)
            elif isinstance(message, Block):
                self._accept(message, got, deadline)
            elif isinstance(message, Failure):
                got.is_overflown |= message.message == str(overflow())
                got.failure = f"{message.kind}: {message.message}"
        # On a GPU the worker looks there some steps later.
        records = [number % BOARD_SIZE for number in self._numbers]
        for reader in self._readers.values():
            got.is_overflown |= bool(reader.view.board[records, COLUMN].any())
        self._numbers.clear()
        return got

    def close(self) -> None:
        self._exporter.forget(self.address)
        self._socket.close(linger=0)

    def _accept(self, block: Block, got: Exported, deadline: float) -> None:
        reader = self._readers[block.worker]
        while not reader.has_landed(block.seq):
            if time.monotonic() > deadline:
                return
            time.sleep(0.0002)
        dtype = getattr(torch, block.dtype)
        nbytes = int(np.prod(block.shape)) * dtype.itemsize
        # A copy: the block is given back.
        data = bytearray(reader.view.data[block.offset : block.offset + nbytes])
        rows = torch.frombuffer(data, dtype=dtype).view(block.shape)
        reader.done(block.reader, block.seq)
        taps = slice(block.tap, block.tap + block.shape[0])
        offset = 0
        where = zip(*map(unpacked, (block.numbers, block.counts, block.first)), strict=True)
        for number, count, first in where:
            if (request := self._numbers.get(int(number))) is not None:
                at = slice(int(first), int(first + count))
                got.rows[taps, request, at] = rows[:, offset : offset + int(count)]
                got.seen[taps, request, at] = True
            offset += int(count)


logger = logging.getLogger("vllm.inspect_lens")


def check_taps(runner: Any, stepper: Stepper, *, is_sharded: bool = False) -> torch.Tensor:
    """Run one pass in which every tap must write a row, on every rank."""
    state = stepper.state
    taps, n = state.row_taps, len(state.row_taps)
    marker = marker_of(state.ring)
    state.ring[:n].copy_(marker)
    # One token of one group, whose rows lie one behind the other.
    state.tokens[0] = 0
    state.base[0] = torch.from_numpy(np.append(state.row_starts, 1).astype(np.int32))
    state.flags.fill_(CAPTURE)
    state.header[0], state.header[1] = 1, 0
    state.capturing = [True] * len(state.taps)
    state.is_active = True
    install(state)
    run = getattr(runner._dummy_run, "inspect_lens_original", runner._dummy_run)
    # Without it, kernels of the V1 runner leave what memory held, beside which a share is nothing.
    attends = "force_attention" in inspect.signature(run).parameters
    try:
        run(1, **({"force_attention": True} if attends else {}))
    finally:
        state.is_active = False
        state.capturing = [False] * len(state.taps)
        state.header[: HEAD + len(state.taps)] = 0
    same = is_same_bits(state.ring[:n], marker).tolist()
    silent = [f"{t.site}.{t.layer}" for t, is_silent in zip(taps, same, strict=True) if is_silent]
    # Of what ranks have shares these differ, of course.
    alike = [i for i, tap in enumerate(taps) if not SITE_TABLE[tap.site].is_sharded]
    shares = [alike[i] for i in _different_over_ranks(state.ring[alike])] if is_sharded else []
    rows = state.ring[:n].clone()
    state.ring[:n].zero_()
    if silent:
        raise CompatError(
            f"inspect_lens: the taps {', '.join(dict.fromkeys(silent))} did not fire in the "
            "start-up check. A compiled graph without taps may have been loaded: clear vLLM's "
            "compile cache, or set INSPECT_LENS_DISABLE=1 to run without the lens"
        )
    if shares:
        names = ", ".join(f"{taps[i].site}.{taps[i].layer}" for i in shares)
        raise UnsupportedError(
            f"inspect_lens: at the taps {names} of {type(runner.get_model()).__name__} each "
            "tensor-parallel rank has its own share of a sum; leave the site out of "
            "INSPECT_LENS_SITES, or use one GPU per stage"
        )
    logger.info("inspect_lens: start-up check: all %d taps fired", len(state.taps))
    return rows


def scale_for(row: torch.Tensor, *, is_sharded: bool = False) -> float:
    """Twice the size of a row's elements, as a power of two; alike on all ranks."""
    size = row.float().square().mean().sqrt().reshape(1)
    if is_sharded:
        from vllm.distributed.parallel_state import get_tp_group

        size = get_tp_group().all_gather(size, dim=0).amax().reshape(1)
    rms = float(size)
    if not math.isfinite(rms) or rms <= 0:
        return 1.0
    return 2.0 ** min(12, max(-10, math.ceil(math.log2(2 * rms))))


def is_same_bits(rows: torch.Tensor, marker: torch.Tensor) -> torch.Tensor:
    """Which rows are the marker still; as bits, as a dummy pass may well compute NaN."""
    mark = marker.expand(rows.shape).contiguous().view(torch.uint8)
    return (rows.contiguous().view(torch.uint8) == mark).all(dim=-1)


def _different_over_ranks(rows: torch.Tensor) -> list[int]:
    """Which rows are not the same on all tensor-parallel ranks, rounding aside."""
    from vllm.distributed.parallel_state import get_tp_group

    mine = rows.float()
    all_ranks = get_tp_group().all_gather(mine.contiguous(), dim=0).view(-1, *mine.shape)
    error = (all_ranks - all_ranks[0]).norm(dim=-1).amax(dim=0)
    size = all_ranks.norm(dim=-1).amax(dim=0)
    # An all-reduce gives all ranks the same bits. A share may be small beside the stream, and a
    # dummy pass may compute NaN, which shows nothing.
    most = max(1e-4, 2.5 * torch.finfo(rows.dtype).eps)
    return [i for i, differs in enumerate((error > most * size).tolist()) if differs]


def marker_of(ring: torch.Tensor) -> torch.Tensor:
    """A row that no forward pass writes."""
    return torch.arange(1, ring.shape[1] + 1, device=ring.device).to(ring.dtype).mul_(-3)


SIZES = (16.0, 1.0)
"""How much larger vectors are than the largest rows."""
_LIKENESS = 0.5
"""Cosine between a row and what was put in the place of the one before it, at least."""

Rows = Mapping[TapPoint, torch.Tensor]
"""By tap: (requests, positions, hidden) in float32."""


class StreamProbe:
    """The edits of the two runs, and what their rows have to be."""

    def __init__(self, path: str, scale: float, state: TapState) -> None:
        self._path = path
        self._taps = [tap for tap in state.taps if tap.site in ("resid_pre", RESID_POST)]
        is_exact = state.ring.dtype == torch.float32
        self._most = {SIZES[0]: 0.025 if is_exact else 0.25, SIZES[1]: 1e-3 if is_exact else 0.03}
        if sum(tap.site == RESID_POST for tap in self._taps) < 2:
            raise self.refusal(
                "the start-up check compares rows of several layers, so name two or more in "
                "INSPECT_LENS_LAYERS, and resid_post in INSPECT_LENS_SITES"
            )
        width = state.ring.shape[1]
        # Of both together, and what layers add to them.
        self._largest = largest_norm(state.ring.dtype) / (4 * math.sqrt(width))
        self._scale, self._signs = scale, signs(2, width)

    def refusal(self, reason: str) -> UnsupportedError:
        return UnsupportedError(
            f"INSPECT_LENS_LAYER_PATH={self._path!r}: whether these are the decoder layers cannot "
            f"be told: {reason}"
        )

    def _vectors(self, size: float) -> NDArray[np.float32]:
        return self._signs * np.float32(min(size * self._scale, self._largest))

    def edits(
        self, n: int, size: float, replaced: int
    ) -> tuple[tuple[Edit, ...], tuple[Edit, ...]]:
        """Of a run that replaces rows behind every second layer, and of one that also adds."""
        other, vector = self._vectors(size)
        positions = tuple(range(n))
        put: list[Edit] = []
        added: list[Edit] = []
        for index, (site, layer) in enumerate(self._taps):
            if index % 2 == replaced:
                put.append(Replace(rows=other, layers=(layer,), site=site, positions=positions))
            else:
                added.append(Add(vector=vector, layers=(layer,), site=site, positions=positions))
        return tuple(put), (*put, *added)

    def judge(
        self, plain: Rows, added: Rows, size: float, replaced: int, *, is_overflown: bool
    ) -> UnsupportedError | None:
        """A refusal where rows behind a replaced layer depend on what was added before it."""
        if is_overflown or not all(rows.isfinite().all() for rows in plain.values()):
            return self.refusal(
                "rows of the start-up check are too large, or not finite; try another dtype"
            )
        put, vector = torch.from_numpy(self._vectors(size))
        around = []
        for index in range(1, len(self._taps)):
            tap = self._taps[index]
            if index % 2 != replaced and tap in plain:
                error = row_error(plain[tap], added[tap] - vector)
                likeness = torch.cosine_similarity(plain[tap], put, dim=-1)
                is_gone = size == SIZES[0] and bool((likeness < _LIKENESS).any())
                if is_gone or bool((error > self._most[size]).any()):
                    around.append(str(self._taps[index - 1].layer))
        if around:
            return UnsupportedError(
                f"INSPECT_LENS_LAYER_PATH={self._path!r}: these modules do not return the residual "
                "stream: later layers do not see what was put in its place, and that alone, at "
                f"layer {', '.join(around)}; name the decoder layers"
            )
        return None


def row_error(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Distance of rows in parts of their length; infinite where either is not finite."""
    size = torch.maximum(one.norm(dim=-1), other.norm(dim=-1)).clamp(min=1e-12)
    error: torch.Tensor = (one - other).norm(dim=-1) / size
    return error.nan_to_num(nan=math.inf)
