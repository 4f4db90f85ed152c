"""How rules of token aggregation are written; `inspect_lens.probe` has what they do."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from inspect_lens.errors import SpecError
from inspect_lens.spec.values._strict import shown

__all__ = [
    "POOLS",
    "SENTENCE_POOL",
    "Pool",
    "check_engine_pool",
    "parse_pool",
]

SENTENCE_POOL: Final = "sentence_mean_max"
"""Name of the pooling rule that needs the ends of sentences."""

_PLAIN: Final = ("mean", "last", "max")
_WIDE: Final[dict[str, float]] = {
    "top_k_mean": 5,
    "rolling_mean_max": 10,
    "softmax_mean": 5.0,
    "ema": 0.1,
    "ema_max": 0.1,
}
_WHOLE = frozenset({"top_k_mean", "rolling_mean_max"})
_WHOLE_TEXT = re.compile(r"0*([1-9][0-9]{0,6})")
_RATE_TEXT = re.compile(r"[0-9.eE+-]{1,32}")

POOLS: Final = (*_PLAIN, *_WIDE, SENTENCE_POOL)
"""Names of the rules that make one score of a sample's token scores."""


class Pool(NamedTuple):
    """How token scores become one score: `mean`, `top_k_mean:5` and others."""

    name: str
    """One of `POOLS`."""
    k: float | None = None
    """Tokens of a top-k mean or of a window, sharpness of a softmax, rate of an average; None
    where the rule has no parameter."""

    def __str__(self) -> str:
        """The form that `parse_pool` reads."""
        if self.k is None:
            return self.name
        return f"{self.name}:{self.width if self.name in _WHOLE else format(self.k, 'g')}"

    @property
    def width(self) -> int:
        """The parameter as a number of tokens."""
        return int(self.k or 1)

    @property
    def rate(self) -> float:
        """The parameter as a number."""
        return float(self.k or 0.0)


def parse_pool(value: str) -> Pool:
    """Parse the name of a pooling rule, such as `top_k_mean:5`.

    Args:
        value: `mean`, `last`, `max`, `top_k_mean` (k 5), `rolling_mean_max` (window 10),
            `softmax_mean` (sum of s·exp(phi·s) over sum of exp(phi·s), phi 5), `ema`
            (exponential average, rate 0.1, its last value), `ema_max` (its largest),
            `sentence_mean_max` (largest mean of a sentence). Those with a number also take
            another one, such as `top_k_mean:3` or `ema:0.2`.

    Returns:
        The rule, its parameter filled in.

    Raises:
        SpecError: anything else.

    Source:
        Defaults of top-k and window: arXiv:2601.11516; softmax and exponential average:
        arXiv:2506.10805.

    Example:
        ```python
        from inspect_lens.probe import parse_pool

        pool = parse_pool("top_k_mean:5")
        assert (pool.name, pool.width) == ("top_k_mean", 5)
        ```
    """
    name, colon, text = str(value).partition(":")
    if (name in _PLAIN or name == SENTENCE_POOL) and not colon:
        return Pool(name)
    if name in _WIDE:
        given = _parameter(name, text) if colon else _WIDE[name]
        if given is not None:
            return Pool(name, given)
    raise SpecError(
        f"pool={shown(value)}; allowed are {', '.join((*_PLAIN, SENTENCE_POOL))}, and with a "
        f"parameter as in top_k_mean:5 or ema:0.1 {', '.join(_WIDE)} (tokens up to 9999999, rates "
        "of an average up to 1); correct the name"
    )


def _parameter(name: str, text: str) -> float | None:
    """A positive number that the rule can use, or None."""
    if name in _WHOLE:
        found = _WHOLE_TEXT.fullmatch(text) if len(text) <= 32 else None
        return int(found[1]) if found else None
    try:
        number = float(text) if _RATE_TEXT.fullmatch(text) else 0.0
    except ValueError:
        return None
    top = 1.0 if name.startswith("ema") else 1e6
    return number if 0.0 < number <= top else None


def check_engine_pool(value: str) -> str:
    """Check that a pooling rule can run inside the engine."""
    if parse_pool(value).name == SENTENCE_POOL:
        engine = ", ".join(pool for pool in POOLS if pool != SENTENCE_POOL)
        raise SpecError(
            f"{SENTENCE_POOL} needs the texts of tokens, which a probe inside the engine does not "
            f"see; choose one of {engine}, or ask for token scores (tokens) or a capture and pool "
            "them on the client with inspect_lens.probe.pool_scores(scores, pool, ends=...)"
        )
    return value
