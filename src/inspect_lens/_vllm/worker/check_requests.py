"""The two requests of the start-up check, and a front-end in the worker that takes their rows."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import zmq
from numpy.typing import NDArray

from inspect_lens._engine.export.transport import COLUMN, Exporter, overflow
from inspect_lens._engine.protocol.envelope import Envelope, seal
from inspect_lens._engine.protocol.messages import (
    BOARD_SIZE,
    ArenaReader,
    Block,
    Failure,
    Opened,
    decode,
    unpacked,
)
from inspect_lens._engine.protocol.readouts import RowPart
from inspect_lens._engine.step.stepper import Stepper
from inspect_lens._engine.tap.buffers import CAPTURE, HEAD, TapState, install
from inspect_lens.errors import CompatError, UnsupportedError
from inspect_lens.spec import SITE_TABLE, Add, CaptureSpec, Edit, EngineFacts, LensRequest

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


def signs(n: int, hidden: int) -> NDArray[np.float32]:
    """(n, hidden) of ones with signs by chance, the same on all ranks."""
    drawn = np.random.default_rng(0).integers(0, 2, (n, hidden))
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
        self.address = f"inproc://inspect-lens-check-{id(self):x}"
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
    try:
        getattr(runner._dummy_run, "inspect_lens_original", runner._dummy_run)(1)
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
    # A dummy pass may compute NaN, which shows nothing.
    return [i for i, differs in enumerate((error > 0.05 * size).tolist()) if differs]


def marker_of(ring: torch.Tensor) -> torch.Tensor:
    """A row that no forward pass writes."""
    return torch.arange(1, ring.shape[1] + 1, device=ring.device).to(ring.dtype).mul_(-3)
