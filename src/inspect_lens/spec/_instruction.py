"""Instructions: the few numbers by which a tap edits one token, and their definition in numpy.

Every operation of the field is a choice of a direction that is read, a map of one number, and a
direction that is written: `s += gate * map(<read, s>, |s|) * write`, or a blend with a stored row.
The kernels of the engine are tested against `run_program`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import SpecError

from ._engine import SiteWidth
from ._positions import Positions, TokenMatch

__all__ = [
    "MOST_INSTRUCTIONS",
    "NEXT_TOKEN",
    "N_LATCHES",
    "N_REGISTERS",
    "SAME_TOKEN",
    "Chosen",
    "Instruction",
    "Kind",
    "chosen_numbers",
    "run_program",
    "sampled_match",
    "token_gate",
    "token_gate_key",
]

Row = NDArray[np.float32]

MOST_INSTRUCTIONS = 64
"""Instructions that one token may get at one tap."""

N_REGISTERS = 8
"""Registers of one request for what a step computes: gates of scope `token`, rules that join
several, and schedules."""

N_LATCHES = 4
"""How many gates of one request may keep their decision for later tokens.

These have scope `next` or `rest`, an average or hysteresis. Their registers lie behind the others,
in three blocks of this many: latches, then running gates that decide on the token they read, then
those that decide on the next one."""

SAME_TOKEN = N_REGISTERS + N_LATCHES
"""First register of running gates that decide on the token they read."""
NEXT_TOKEN = SAME_TOKEN + N_LATCHES
"""First register of running gates that decide on the next token."""


class Kind(IntEnum):
    """The map from what is read, `x = <read, s>`, to the factor `y` of what is written.

    Parameters are named `a`, `b`, `c`, `d`, in this order.
    """

    LINEAR = 0
    """`y = a*x + b`."""
    NORM = 1
    """`y = a*|s|`, the L2 norm of the stream."""
    CLIP = 2
    """`y = a*(min(max(x, b), c) - x)`."""
    LATENT_SET = 3
    """`y = c - act(x + a)`, where `act(z)` is `z` above the threshold `b` and else 0. It is 0 where
    `d` is 1 or 3 and the latent is not active, and where `d` is 2 or 3 and `act(x + a)` is `c` or
    more."""
    LATENT_ADD = 4
    """`y = c`; 0 where `d` is 1 and the latent is not active."""
    BLEND = 5
    """`s += a*(write - s)`: nothing is read."""
    PART = 6
    """`s += a*(write - read*s)`, number by number: where `read` is 1 the row is blended with what
    is written, and where both are 0 it stays."""
    RENORM = 7
    """`s *= |s0|/|s|`, where `s0` is the stream before the first instruction."""
    SPLICE = 8
    """`s += r - s`, where `r` is what the autoencoder with the hash `content` makes of `s`. No
    kernel runs it: a tap ends its chain here, has dense products computed, and runs the rest.
    `read` has numbers of latents and `write` a number for each, which is set (`a` 0), added (1),
    multiplied with (2), a minimum (3) or a maximum (4). Where `b` is 1 the error term is added,
    and where `c` is 1 only active latents are changed."""
    JOIN = 9
    """Nothing is edited: of the value `g` of the register of this instruction, or of `1 - g` where
    `c` is 1, and of what is in register `b`, that one gets `g` where `a` is 0, the product where it
    is 1, and the larger one where it is 2."""
    GATE = 10
    """Nothing is edited: `sigmoid(a*(x - b))`, or for infinite `a` whether `x > b`, goes to a
    register. A gate that writes has two numbers there: with them `x` is `z = x + first` where that
    is above the second one, and else 0."""
    COSINE_GATE = 11
    """As `GATE`, of `x/|s|`."""
    TOKEN_GATE = 12
    """Nothing is edited: whether the id of the token, plus one, is a number of `read` goes to a
    register; where `a` is 1, whether it is none. Zeros of `read` are no ids."""
    SCHEDULE = 13
    """Nothing is edited: of the `a` numbers of `read` the one of the token's place behind position
    `b` goes to a register; behind the last one that stays."""
    LATCH = 14
    """Nothing is edited: where `x > b`, the register opens for the tokens behind this one."""
    COSINE_LATCH = 15
    """As `LATCH`, of `x/|s|`."""
    PROMPT_LAST = 16
    """No tap runs it: when the last token of a prompt has been computed, the worker reads its row.
    Where the score is above `b`, the register opens for the tokens behind. For `a` 0 the score is
    that of `GATE` with `c` and `d` in the place of the two numbers, for 1 the cosine, and for 2
    that of the row and of `tanh` of its projection."""
    PROMPT_MEAN = 17
    """As `PROMPT_LAST`, of the mean over the prompt: of the rows, or of scores with a `d`."""
    RUNNING = 18
    """Nothing is edited: of `m = d*x + (1 - d)*m'`, where `m'` is that of the token before, or `x`
    of the first one, `sigmoid(a*(m - b))` goes to the register. For infinite `a` it is whether the
    gate is open: it opens where `m > b`, and closes where `m < c` and not `m > b`."""
    COSINE_RUNNING = 19
    """As `RUNNING`, of `x/|s|`."""


def unit(row: Row) -> Row:
    """A vector of norm 1 with the same direction."""
    wide = row.astype(np.float64)
    return (wide / np.linalg.norm(wide)).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction of a program.

    Args:
        kind: the map.
        read: (width,) float32; None reads nothing, and `x` is 0.
        write: (width,) float32; None writes nothing but what `BLEND` leaves of the stream.
        params: `a, b, c, d`.
        sees_edits: whether it reads the stream with the edits of the instructions before it.
            Those of one operation read the same stream.
        gate: register that its edit is multiplied with, or that a gate is written to; -1 for none.
        content: hash of what workers keep for it, the autoencoder of `SPLICE`.
    """

    kind: Kind
    read: Row | None = None
    write: Row | None = None
    params: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    sees_edits: bool = field(default=True)
    gate: int = -1
    content: str = ""


def run_program(
    stream: NDArray[np.floating],
    program: Sequence[Instruction],
    registers: NDArray[np.floating] | None = None,
    token_id: int | None = None,
    position: int = 0,
) -> NDArray[np.float64]:
    """Edit the stream of one token: the definition of a program, in float64 (width,).

    Args:
        stream: (width,); what the site holds. It is not changed.
        program: the instructions, in order.
        registers: (`NEXT_TOKEN + N_LATCHES`,); values of gates, which gates without a state write
            to. What others find depends on other tokens, so they write nothing here.
        token_id: of the token, for programs that ask for it; None is no token's.
        position: of the token, for schedules.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import Instruction, Kind, run_program

        east = np.array([1.0, 0.0], dtype=np.float32)
        without = Instruction(Kind.LINEAR, read=east, write=east, params=(-1.0, 0, 0, 0))
        assert run_program(np.array([3.0, 4.0]), [without]).tolist() == [0.0, 4.0]
        ```
    """
    before = np.asarray(stream, dtype=np.float64)
    gates = np.zeros(NEXT_TOKEN + N_LATCHES) if registers is None else registers
    seen, now = before, before.copy()
    for i, one in enumerate(program):
        if one.sees_edits and i:
            seen = now.copy()
        if one.kind >= Kind.LATCH:
            continue
        norm = float(np.linalg.norm(seen))
        x = 0.0 if one.read is None else float(one.read.astype(np.float64) @ seen)
        a, b, _, _ = one.params
        if one.kind == Kind.TOKEN_GATE:
            is_named = token_id is not None and bool(np.any(one.read == token_id + 1))
            gates[one.gate] = float(is_named != bool(a))
            continue
        if one.kind == Kind.SCHEDULE:
            assert one.read is not None
            gates[one.gate] = one.read[min(max(position - int(b), 0), int(a) - 1)]
            continue
        if one.kind == Kind.JOIN:
            value, held = gates[one.gate], gates[int(b)]
            value = 1.0 - value if one.params[2] else value
            gates[int(b)] = (value, held * value, max(held, value))[int(a)]
            continue
        if one.kind in (Kind.GATE, Kind.COSINE_GATE):
            at = x / norm if one.kind == Kind.COSINE_GATE and norm else x
            if one.write is not None:
                at = 0.0 if at + one.write[0] <= one.write[1] else at + float(one.write[0])
            sigmoid = 1.0 / (1.0 + np.exp(np.clip(a * (b - at), -80.0, 80.0)))
            gates[one.gate] = float(at > b if np.isinf(a) else sigmoid)
            continue
        write = np.zeros(1) if one.write is None else one.write.astype(np.float64)
        if one.kind == Kind.BLEND:
            step = a * (write - seen)
        elif one.kind == Kind.PART:
            part = np.zeros(1) if one.read is None else one.read.astype(np.float64)
            step = a * (write - part * seen)
        elif one.kind == Kind.RENORM:
            step = seen * (float(np.linalg.norm(before)) / norm - 1.0) if norm else 0.0 * seen
        else:
            step = _factor(one, x, norm) * write
        now = now + (1.0 if one.gate < 0 else gates[one.gate]) * step
    return now


def _factor(one: Instruction, x: float, norm: float) -> float:
    a, b, c, d = one.params
    if one.kind == Kind.SPLICE:
        raise ValueError("the weights of an autoencoder are no part of a program")
    if one.kind == Kind.LINEAR:
        return a * x + b
    if one.kind == Kind.NORM:
        return a * norm
    if one.kind == Kind.CLIP:
        return a * (min(max(x, b), c) - x)
    active = x + a > b
    activation = x + a if active else 0.0
    if (d in (1, 3) and not active) or (d >= 2 and activation >= c):
        return 0.0
    return c - activation if one.kind == Kind.LATENT_SET else c


Choice = Literal["heads", "neurons", "experts"]
CHOICES: tuple[Choice, ...] = ("heads", "neurons", "experts")
"""Fields of an edit, of which one may be given."""


class Chosen(NamedTuple):
    """The numbers of a row that an edit acts on, as if they were the whole row."""

    numbers: NDArray[np.int64]
    """Ascending within each part, in the order in which the parts were named."""
    width: int
    """Of the row."""

    def widen(self, program: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
        """Let a program that was written for the chosen numbers act on whole rows."""
        return tuple(self._widen(one) for one in program)

    def _widen(self, one: Instruction) -> Instruction:
        kind, read = one.kind, one.read
        if kind == Kind.BLEND:
            kind, read = Kind.PART, np.ones(len(self.numbers), dtype=np.float32)
        return replace(one, kind=kind, read=self._row(read), write=self._row(one.write))

    def _row(self, values: Row | None) -> Row | None:
        if values is None:
            return None
        row = np.zeros(self.width, dtype=np.float32)
        row[self.numbers] = values
        return row


def chosen_numbers(
    choice: Mapping[Choice, tuple[int, ...]], width: SiteWidth, field: str
) -> Chosen | None:
    """Find the numbers that an edit acts on."""
    for name, parts in choice.items():
        n = width.heads if name == "heads" else width.width
        what = f"key {name}" if width.site in ("k", "v") else name
        wrong = [part for part in parts if not 0 <= part < n]
        if wrong:
            raise SpecError(
                f"{field}.{name}: {wrong[0]}; {width.site} of this model has {n} {what}, numbered "
                f"0 to {n - 1}"
            )
        size = width.width // n
        numbers = np.asarray(parts, dtype=np.int64)[:, None] * size + np.arange(size)
        return Chosen(numbers.reshape(-1), width.width)
    return None


_END: Final = 1 << 24
"""Ids are below: float32 holds these numbers, and no others, exactly."""


def sampled_match(positions: Positions) -> TokenMatch | None:
    """Find the token match of an edit that acts on sampled tokens."""
    if isinstance(positions, TokenMatch) and positions.among == "completion":
        return positions
    return None


def check_token_ids(match: TokenMatch, width: SiteWidth, vocab: int, field: str) -> None:
    """Refuse ids that the model does not have, or more than a row has room for."""
    ids, room = _ids(match), width.width // width.shards
    end = vocab or _END - 1
    wrong = [one for one in ids if not 0 <= one < end]
    if wrong:
        raise SpecError(
            f"{field}.positions.token_ids: {wrong[0]}; the model has tokens 0 to {end - 1}"
        )
    if len(ids) > room:
        raise SpecError(
            f"{field}.positions.token_ids: {len(ids)} ids; {room} at most at {width.site}, which "
            "has as many numbers on a rank"
        )


def token_gate_key(match: TokenMatch) -> tuple[object, ...]:
    """Key that is equal for edits that can share one gate."""
    return frozenset(match.token_ids or ()), match.exclude


def token_gate(match: TokenMatch, width: SiteWidth, register: int) -> Instruction:
    """Make the gate that opens for tokens with one of some ids.

    It needs nothing but the token, so each tap of an edit has one of its own, and so has each
    stage of a pipeline. Ranks that share a row each have all ids in their part of it.
    """
    ids = _ids(match)
    row = np.zeros((width.shards, width.width // width.shards), dtype=np.float32)
    row[:, : len(ids)] = np.asarray(ids) + 1
    whole = np.zeros(width.width, dtype=np.float32)
    whole[: row.size] = row.reshape(-1)
    params = (float(match.exclude), 0.0, 0.0, 0.0)
    return Instruction(Kind.TOKEN_GATE, whole, None, params, True, register)


def _ids(match: TokenMatch) -> list[int]:
    return sorted(set(match.token_ids or ()))
