"""Are the tokens that were named edited, these only, and by how much? Tests 2, 3 and 10."""

from __future__ import annotations

import numpy as np

from tests.kit.tiny_models import READOUT

from .alignment import unique_asks
from .protocol import Answer, Ask, Engine, FloatArray, Suite, Vector, Verdict

__all__ = ["chunked_prefill", "decode_phase", "dose_response", "edited_positions", "readout"]

POSITIONS = (0, 31, 32, 150)
AMOUNT = 4.0
DOSES = (-4.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 4.0)
SLOPE_TOLERANCE = 0.01


def readout(answer: Answer) -> FloatArray:
    """The coordinate that nothing but steering writes, in the last captured layer, by position.

    Raises:
        RuntimeError: the request failed, or its response has no activations.
    """
    if answer.error is not None or answer.rows is None:
        raise RuntimeError(answer.error or "the response has no activations")
    found: FloatArray = answer.rows[-1, :, READOUT]
    return found


def edited_positions(answer: Answer) -> list[int]:
    """Positions whose row was edited, by at least half of what was asked for."""
    return [int(p) for p in np.flatnonzero(np.abs(readout(answer)) > AMOUNT / 2)]


def _edit(hidden: int, positions: tuple[int, ...] | None) -> Vector:
    values = np.zeros((1, hidden) if positions is None else (1, len(positions), hidden), np.float32)
    values[..., READOUT] = 1.0
    return Vector(values, layers=(1,), scale=AMOUNT, positions=positions)


def _asks(
    n_prompt: int, max_tokens: int, vectors: tuple[Vector, ...], suite: Suite, seed: int
) -> Ask:
    last = (suite.truth.layers - 1,)
    plain = unique_asks([n_prompt], max_tokens=max_tokens, capture=last, seed=seed)[0]
    return Ask(plain.prompt, max_tokens, last, vectors)


def chunked_prefill(engine: Engine, suite: Suite) -> Verdict:
    """Test 2: a vector at four positions of a prompt that is prefilled in chunks of 32 tokens."""
    vector = _edit(suite.truth.hidden, POSITIONS)
    asks = [_asks(200, 1, vectors, suite, seed=2) for vectors in ((), (vector,))]
    plain, steered = (edited_positions(answer) for answer in engine.generate(asks, together=False))
    wrong = sorted(set(steered) ^ set(POSITIONS)) + plain
    return Verdict(
        "2 chunked prefill",
        not wrong,
        steered,
        f"exactly {list(POSITIONS)}",
        f"edited without being asked: {plain}" if plain else "",
    )


def decode_phase(engine: Engine, suite: Suite) -> Verdict:
    """Test 3: a vector for position 0 alone, and 16 sampled tokens."""
    ask = _asks(50, 16, (_edit(suite.truth.hidden, (0,)),), suite, seed=3)
    edited = edited_positions(engine.generate([ask])[0])
    decoded = [p for p in edited if p >= len(ask.prompt)]
    is_prompt_right = [p for p in edited if p < len(ask.prompt)] == [0]
    return Verdict(
        "3 decode phase",
        not decoded and is_prompt_right,
        len(decoded),
        "0 edited decode tokens, and position 0 edited",
        "" if is_prompt_right else f"edited positions: {edited}",
    )


def dose_response(engine: Engine, suite: Suite) -> Verdict:
    """Test 10: what a later layer reads against the coefficient, over prompt and decode tokens."""
    hidden = suite.truth.hidden
    asks = []
    for dose in DOSES:
        vector = Vector(_edit(hidden, None).values, layers=(1,), scale=dose)
        asks.append(_asks(40, 8, (vector,), suite, seed=10))
    reads = [readout(answer).astype(np.float64) for answer in engine.generate(asks)]
    doses = np.concatenate([np.full(len(r), dose) for r, dose in zip(reads, DOSES, strict=True)])
    seen = np.concatenate(reads)
    slope = float((doses * seen).sum() / (doses * doses).sum())
    worst = float(np.abs(seen / doses - 1).max())
    return Verdict(
        "10 dose-response",
        abs(slope - 1) <= SLOPE_TOLERANCE and worst <= SLOPE_TOLERANCE,
        slope,
        f"slope 1 within {SLOPE_TOLERANCE:.0%}, and so each token",
        f"largest deviation of one token {worst:.2%}",
        {"tokens": len(seen), "doses": list(DOSES)},
    )
