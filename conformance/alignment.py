"""Do captured rows belong to the request, position and layer they are returned for? Tests 1, 4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.kit.tiny_models import BITS, RESERVED

from .protocol import Answer, Ask, Engine, FloatArray, Suite, Truth, Verdict, fed

__all__ = ["alignment_under_batching", "marked_tokens", "preemption", "right_rows", "unique_asks"]

N_CONCURRENT = 64
WANTED_PREEMPTIONS = 20
_FIRST_ID = 3
"""Ids below are special tokens."""
_LAYER_COSINE = 0.99


def unique_asks(
    lengths: Sequence[int], *, max_tokens: int, capture: tuple[int, ...], seed: int
) -> list[Ask]:
    """Prompts in which no token id occurs twice, so that a row's token names its place.

    Args:
        lengths: of the prompts; their sum is at most the vocabulary.
        max_tokens: sampled by each request.
        capture: layers.
        seed: of the order of ids.
    """
    ids = np.random.default_rng(seed).permutation(np.arange(_FIRST_ID, 8192))[: sum(lengths)]
    ends = np.cumsum(lengths)
    return [
        Ask(tuple(int(i) for i in ids[end - n : end]), max_tokens, capture)
        for n, end in zip(lengths, ends, strict=True)
    ]


def marked_tokens(rows: FloatArray) -> list[int]:
    """Token id that each row of a marked model carries, -1 where the marks are no bits.

    Args:
        rows: (tokens, hidden).
    """
    bits = rows[:, :BITS]
    is_clean = (np.abs(np.abs(bits) - 1) < 0.25).all(axis=1)
    ids = ((bits > 0) << np.arange(BITS)).sum(axis=1)
    return [int(i) for i in np.where(is_clean, ids, -1)]


def right_rows(ask: Ask, answer: Answer, truth: Truth) -> tuple[int, int, str]:
    """Count the rows that stand where they belong.

    A row is right if it carries the token that was fed at its position and, of all layers' rows
    of the true forward pass at that position, is most like the one of its own layer. Rows too
    few or too many are wrong rows.

    Returns:
        Right rows, rows that there should be (or are, where that is more), and a complaint.
    """
    layers = ask.capture or ()
    tokens = fed(ask, answer)
    expected = len(layers) * len(tokens)
    if answer.error is not None or answer.rows is None:
        return 0, expected, answer.error or "the response has no activations"
    found = answer.rows
    total = max(expected, found.shape[0] * found.shape[1])
    if found.shape[:2] != (len(layers), len(tokens)):
        complaint = f"{found.shape[:2]} rows instead of {(len(layers), len(tokens))}"
    else:
        complaint = ""
    true = truth.residual_stream(tokens)[:, :, RESERVED:]
    n = min(found.shape[1], len(tokens))
    right = 0
    for i, layer in enumerate(layers[: found.shape[0]]):
        rows = found[i, :n]
        cosines = cosine(rows[None, :, RESERVED:], true[:, :n])
        is_layer = (cosines.argmax(axis=0) == layer) & (cosines[layer] >= _LAYER_COSINE)
        is_token = np.array(marked_tokens(rows)) == np.array(tokens[:n])
        right += int((is_layer & is_token).sum())
    return right, total, complaint


def cosine(a: FloatArray, b: FloatArray) -> Any:
    """Cosine along the last axis; 0 for a row of zeros."""
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return (a * b).sum(axis=-1) / np.where(norms == 0, 1, norms)


def _count(
    asks: Sequence[Ask], answers: Sequence[Answer], truth: Truth
) -> tuple[int, int, list[str]]:
    counts = [right_rows(ask, answer, truth) for ask, answer in zip(asks, answers, strict=True)]
    complaints = sorted({complaint for _, _, complaint in counts if complaint})
    return sum(c[0] for c in counts), sum(c[1] for c in counts), complaints


def alignment_under_batching(engine: Engine, suite: Suite) -> Verdict:
    """Test 1: 64 requests of mixed lengths at once, every layer."""
    rng = np.random.default_rng(1)
    lengths = [int(n) for n in rng.integers(1, 120, N_CONCURRENT)]
    layers = tuple(range(suite.truth.layers))
    asks = unique_asks(lengths, max_tokens=8, capture=layers, seed=1)
    right, total, complaints = _count(asks, engine.generate(asks), suite.truth)
    return Verdict(
        "1 alignment under batching",
        right == total,
        right / total,
        "1.0 of the rows",
        "; ".join(complaints[:3]),
        {"rows": total, "right": right, "requests": len(asks)},
    )


def preemption(engine: Engine, suite: Suite) -> Verdict:
    """Test 4: a cache too small for the requests; each row once, none missing."""
    rng = np.random.default_rng(4)
    before = engine.preemptions()
    right = total = rounds = 0
    complaints: list[str] = []
    while engine.preemptions() - before < WANTED_PREEMPTIONS and rounds < 4:
        lengths = [int(n) for n in rng.integers(30, 60, 48)]
        asks = unique_asks(lengths, max_tokens=150, capture=(1,), seed=40 + rounds)
        a, b, more = _count(asks, engine.generate(asks), suite.truth)
        right, total, rounds = right + a, total + b, rounds + 1
        complaints += more
    happened = engine.preemptions() - before
    name, limit = "4 pre-emption", f"1.0 of the rows, >= {WANTED_PREEMPTIONS} pre-emptions"
    data = {"rows": total, "right": right, "preemptions": happened}
    if happened < WANTED_PREEMPTIONS:
        return Verdict(name, None, happened, limit, f"only {happened} pre-emptions happened", data)
    detail = "; ".join(complaints[:3])
    return Verdict(name, right == total, right / total, limit, detail, data)
