"""A worker's edit table filled by a request's edits, without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch

from inspect_lens._engine.protocol.messages import Envelope, seal
from inspect_lens._engine.tap import buffers
from inspect_lens._engine.tap.buffers import TapState
from inspect_lens._engine.tap.edit_table import Bank, BankTensors, Steering
from inspect_lens._engine.tap.op import tap
from inspect_lens.spec import (
    EngineFacts,
    Kind,
    LensRequest,
    TapPoint,
    check_request,
)
from tests.kit.facts import engine_facts

from .edit_cases import WIDTH

__all__ = [
    "LAYERS",
    "N_FED",
    "N_PROMPT",
    "add_entries",
    "admitted",
    "configs_of",
    "facts",
    "make_state",
    "run",
    "sealed",
    "streams",
]

LAYERS = (0, 1, 2)
N_PROMPT, N_FED = 6, 10


def facts(bank_rows: int = 512, width: int = WIDTH) -> EngineFacts:
    """Three layers with a tap behind each."""
    return engine_facts(n_layers=3, hidden=width, layers=LAYERS, bank_rows=bank_rows)


def make_state(
    dtype: torch.dtype = torch.float32,
    bank_rows: int = 512,
    width: int = WIDTH,
    device: str = "cpu",
) -> TapState:
    """Buffers of a worker of such an engine."""
    return TapState(
        taps=tuple(TapPoint("resid_post", layer) for layer in LAYERS),
        hidden=width,
        dtype=dtype,
        max_tokens=16,
        max_groups=2,
        ring_rows=64,
        bank_rows=bank_rows,
        device=torch.device(device),
    )


def sealed(request: LensRequest, n_prompt: int = N_PROMPT, width: int = WIDTH) -> Envelope:
    """The request as a worker gets it."""
    check_request(request, facts(width=width))
    envelope = seal(
        request,
        facts(width=width),
        reply="here",
        n_prompt=n_prompt,
        max_tokens=N_FED - n_prompt + 1,
    )
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(dict(envelope.pack())))
    return Envelope.unpack(travelled)


def configs_of(steering: Steering, n: int = N_FED) -> list[int]:
    """The configuration of each position, as a plan works it out."""
    found = [steering.config] * n
    if steering.named is not None:
        for p in range(n):
            if 0 < steering.named.edge <= p:
                found[p] = steering.named.behind
        for p, config in zip(steering.named.positions, steering.named.configs, strict=True):
            if p < n:
                found[p] = int(config)
    return found


def admitted(request: LensRequest, state: TapState) -> tuple[Bank, Steering]:
    """The table with a request's edits in it, and how its tokens are edited."""
    bank = Bank(state.bank)
    index = {point: i for i, point in enumerate(state.taps)}
    steering = bank.admit(sealed(request, width=state.bank.vectors.shape[1]), index)
    bank.flush()
    return bank, steering


def add_entries(
    bank: BankTensors, *, by_norm: Sequence[int] = (), links: Mapping[int, int] | None = None
) -> None:
    """Make each entry add the vector of its number, some of them by the norm of the stream."""
    n = len(bank.entries)
    words = torch.zeros(n, 4, dtype=torch.int32)
    words[1:, 2] = torch.arange(1, n)
    params = torch.tensor([[0.0, 1.0, 0.0, 0.0]]).repeat(n, 1)
    for entry in by_norm:
        words[entry, 0], params[entry, 0] = int(Kind.NORM), 1.0
    for entry, link in (links or {}).items():
        words[entry, 3] = link
    words[0], params[0] = 0, 0.0
    bank.entries.copy_(words)
    bank.params.copy_(params)


def run(
    state: TapState,
    configs: list[int],
    streams: list[torch.Tensor],
    residual: torch.Tensor | None = None,
    first: int = 0,
    record: int = 7,
) -> list[torch.Tensor]:
    """One forward pass over positions from `first` on; each tap edits what it is given.

    Args:
        state: of the worker.
        configs: of the tokens, which belong to one request.
        streams: by layer: (tokens, width).
        residual: (tokens, width) or None; the other half of the streams.
        first: position of the first token.
        record: of the request on the board.

    Returns:
        By layer: (tokens, width).
    """
    n = len(configs)
    state.tokens[:, :] = torch.tensor([0, -1, 0, 0, 0])
    state.tokens[:n, 0] = torch.tensor(configs, dtype=torch.int32)
    state.tokens[:n, 3] = record
    state.tokens[:n, 4] = torch.arange(first, first + n)
    state.header[0] = n
    state.steering = [True] * len(LAYERS)
    state.is_active = True
    out = []
    for index, stream in enumerate(streams):
        hidden = stream.clone()
        ctl = state.new_ctl(index)
        buffers.install(state)
        tap(hidden, residual, ctl)
        out.append(hidden)
    buffers.uninstall(state)
    return out


def streams(seed: int) -> list[torch.Tensor]:
    """Rows of `N_FED` tokens at each layer."""
    made = np.random.default_rng(seed).standard_normal((len(LAYERS), N_FED, WIDTH)) * 2
    return [torch.from_numpy(x.astype(np.float32)) for x in made]
