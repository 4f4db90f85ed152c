"""What a gate whose decisions last makes of a sequence of scores, token by token in plain numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inspect_lens.spec import Gate, Rule

__all__ = ["expected_factors", "expected_gate"]


def expected_gate(
    gate: Gate, scores: Sequence[float] | NDArray[np.floating]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Follow a gate over the sampled tokens of a request.

    Args:
        gate: that is followed.
        scores: (n,); what it reads at each sampled token.

    Returns:
        (n,) factor of its edits at each of them, and (n,) whether it was open behind it.
    """
    values: list[float] = []
    opens: list[bool] = []
    mean, is_open = 0.0, False
    for i, score in enumerate(np.asarray(scores, dtype=np.float64)):
        weight = 1.0 if gate.ema is None or not i else gate.ema
        mean = weight * float(score) + (1 - weight) * mean
        if gate.scope == "rest":
            is_open = is_open or mean > gate.threshold
        elif is_open and gate.closes_below is not None:
            is_open = not mean < gate.closes_below
        else:
            is_open = mean > gate.threshold
        smooth = gate.sharpness is not None
        at = (gate.sharpness or 0.0) * (mean - gate.threshold)
        values.append(float(1 / (1 + np.exp(-at))) if smooth else float(is_open))
        opens.append(is_open)
    factors = values if gate.scope == "token" else [0.0, *values[:-1]]
    return np.asarray(factors), np.asarray(opens)


def expected_factors(
    when: Gate | Rule, rows: NDArray[np.float64], n_prompt: int
) -> NDArray[np.float64]:
    """What a rule makes of sampled tokens, of gates that do not read the prompt.

    Args:
        when: the rule, or a gate.
        rows: (layers, tokens, width); what they read.
        n_prompt: tokens of the prompt.

    Returns:
        (sampled tokens,) factors of the edit.
    """
    if isinstance(when, Gate):
        u = when.direction.to_float32().astype(np.float64)
        scores = rows[when.layer, n_prompt:] @ u + when.bias
        if when.active_above is not None:
            scores = np.where(scores > when.active_above, scores, 0.0)
        return expected_gate(when, scores)[0]
    made = np.ones(rows.shape[1] - n_prompt)
    for part in when.all:
        made *= expected_factors(part, rows, n_prompt)
    for part in when.none:
        made *= 1.0 - expected_factors(part, rows, n_prompt)
    if when.any:
        made *= np.max([expected_factors(part, rows, n_prompt) for part in when.any], axis=0)
    return made
