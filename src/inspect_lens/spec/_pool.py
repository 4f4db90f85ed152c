"""How the scores of many tokens become one: each rule is one class.

A rule sees one token at a time and keeps a state of fixed size, so that a whole answer, a stream
and a monitor after every token get the same bits.
"""

from __future__ import annotations

import math
import re
from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, Final, NamedTuple

from pydantic import AfterValidator

from inspect_lens.errors import SpecError

from ._values import shown

__all__ = ["POOLS", "SENTENCE_POOL", "Pool", "parse_pool"]

SENTENCE_POOL: Final = "sentence_mean_max"
"""Name of the pooling rule that needs the ends of sentences."""

_WHOLE_TEXT = re.compile(r"0*([1-9][0-9]{0,6})")
_RATE_TEXT = re.compile(r"[0-9.eE+-]{1,32}")
_RULES: dict[str, type[PoolRule]] = {}


class PoolRule:
    """State of one rule; `add` takes a token, `add_all` several, and `value` needs one at least.

    To add one, write a subclass here; its name is then one of `POOLS`.
    """

    name: ClassVar[str]
    default: ClassVar[float | None] = None
    """Its parameter where none is given; None where it has none."""
    most: ClassVar[float] = 9_999_999
    """The largest parameter."""
    is_whole: ClassVar[bool] = True
    """Whether the parameter is a number of tokens."""

    def __init_subclass__(cls) -> None:
        """Make a rule known by its name."""
        if _RULES.setdefault(cls.name, cls).__qualname__ != cls.__qualname__:
            raise TypeError(f"{cls.__qualname__}: another rule is called {cls.name!r}")

    def __init__(self, pool: Pool) -> None:
        """Begin with no token."""

    def add(self, score: float, end: bool) -> None:
        """Take a token's score, and whether a sentence ends with it."""
        raise NotImplementedError

    def add_all(self, scores: Sequence[float], ends: Iterable[bool]) -> None:
        """Take tokens one by one, or at once with the same bits."""
        for score, end in zip(scores, ends, strict=False):
            self.add(score, end)

    @property
    def value(self) -> float:
        """The score of all tokens so far."""
        raise NotImplementedError


class _Mean(PoolRule):
    name = "mean"

    def __init__(self, _: Pool) -> None:
        self.total, self.n = 0.0, 0

    def add(self, score: float, end: bool) -> None:
        self.total += score
        self.n += 1

    @property
    def value(self) -> float:
        return self.total / self.n


class _Last(PoolRule):
    name = "last"

    def __init__(self, _: Pool) -> None:
        self.state = math.nan

    def add(self, score: float, end: bool) -> None:
        self.state = score

    @property
    def value(self) -> float:
        return self.state


class _Max(_Last):
    name = "max"

    def __init__(self, _: Pool) -> None:
        self.state = -math.inf

    def add(self, score: float, end: bool) -> None:
        self.state = max(self.state, score)

    def add_all(self, scores: Sequence[float], ends: Iterable[bool]) -> None:
        self.state = max(self.state, *scores)  # the first of equal ones, as above


class _TopK(PoolRule):
    name = "top_k_mean"
    default = 5

    def __init__(self, pool: Pool) -> None:
        self.k, self.kept = pool.width, list[float]()

    def add(self, score: float, end: bool) -> None:
        insort(self.kept, score)
        if len(self.kept) > self.k:
            del self.kept[0]

    @property
    def value(self) -> float:
        total = 0.0
        for score in reversed(self.kept):
            total += score
        return total / len(self.kept)


class _RollingMax(PoolRule):
    name = "rolling_mean_max"
    default = 10

    def __init__(self, pool: Pool) -> None:
        self.window: deque[float] = deque(maxlen=pool.width)
        self.best = -math.inf

    def add(self, score: float, end: bool) -> None:
        self.window.append(score)
        if len(self.window) == self.window.maxlen:
            self.best = max(self.best, self._mean())

    def _mean(self) -> float:
        total = 0.0
        for score in self.window:
            total += score
        return total / len(self.window)

    @property
    def value(self) -> float:
        # Before the window is full, all there is makes the one window.
        return self._mean() if len(self.window) != self.window.maxlen else self.best


class _Softmax(PoolRule):
    name = "softmax_mean"
    default, most, is_whole = 5.0, 1e6, False

    def __init__(self, pool: Pool) -> None:
        self.sharpness, self.top, self.total, self.weight = pool.rate, -math.inf, 0.0, 0.0

    def add(self, score: float, end: bool) -> None:
        if score > self.top:
            shrink = math.exp(self.sharpness * (self.top - score))
            self.top, self.total, self.weight = score, self.total * shrink, self.weight * shrink
        weight = math.exp(self.sharpness * (score - self.top))
        self.total += score * weight
        self.weight += weight

    @property
    def value(self) -> float:
        return self.total / self.weight


class _Average(_Last):
    name = "ema"
    default, most, is_whole = 0.1, 1.0, False

    def __init__(self, pool: Pool) -> None:
        self.rate, self.state = pool.rate, math.nan

    def add(self, score: float, end: bool) -> None:
        first = math.isnan(self.state)
        self.state = score if first else self.rate * score + (1.0 - self.rate) * self.state


class _AverageMax(_Average):
    name = "ema_max"

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.largest = -math.inf

    def add(self, score: float, end: bool) -> None:
        super().add(score, end)
        self.largest = max(self.largest, self.state)

    @property
    def value(self) -> float:
        return self.largest


class _SentenceMax(PoolRule):
    name = SENTENCE_POOL

    def __init__(self, pool: Pool) -> None:
        self.sentence, self.best = _Mean(pool), -math.inf

    def add(self, score: float, end: bool) -> None:
        self.sentence.add(score, end)
        if end:
            self.best, self.sentence = max(self.best, self.sentence.value), _Mean(Pool("mean"))

    @property
    def value(self) -> float:
        return max(self.best, self.sentence.value) if self.sentence.n else self.best


POOLS: Final = tuple(_RULES)
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
        rule = _RULES.get(self.name)
        is_whole = rule is not None and rule.is_whole
        return f"{self.name}:{self.width if is_whole else format(self.k, 'g')}"

    @property
    def width(self) -> int:
        """The parameter as a number of tokens."""
        return int(self.k or 1)

    @property
    def rate(self) -> float:
        """The parameter as a number."""
        return float(self.k or 0.0)

    def begin(self) -> PoolRule:
        """The state of the rule before the first token."""
        return _RULES[self.name](self)


def parse_pool(value: str) -> Pool:
    """Parse the name of a pooling rule, such as `top_k_mean:5`; its parameter is filled in.

    Args:
        value: `mean`, `last`, `max`, `top_k_mean` (k 5), `rolling_mean_max` (window 10),
            `softmax_mean` (sum of s·exp(phi·s) over sum of exp(phi·s), phi 5), `ema`
            (exponential average, rate 0.1, its last value), `ema_max` (its largest),
            `sentence_mean_max` (largest mean of a sentence). Those with a number also take
            another one, such as `top_k_mean:3` or `ema:0.2`.

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
    rule = _RULES.get(name)
    if rule is not None and (rule.default is not None or not colon):
        given = _parameter(rule, text) if colon else rule.default
        if given is not None or not colon:
            return Pool(name, given)
    plain = ", ".join(name for name, rule in _RULES.items() if rule.default is None)
    wide = ", ".join(name for name, rule in _RULES.items() if rule.default is not None)
    raise SpecError(
        f"pool={shown(value)}; allowed are {plain}, and with a parameter as in top_k_mean:5 or "
        f"ema:0.1 {wide} (tokens up to 9999999, rates of an average up to 1); correct the name"
    )


def _parameter(rule: type[PoolRule], text: str) -> float | None:
    """A positive number that the rule can use, or None."""
    if rule.is_whole:
        found = _WHOLE_TEXT.fullmatch(text) if len(text) <= 32 else None
        return int(found[1]) if found else None
    try:
        number = float(text) if _RATE_TEXT.fullmatch(text) else 0.0
    except ValueError:
        return None
    return number if 0.0 < number <= rule.most else None


def _check_engine_pool(value: str) -> str:
    if parse_pool(value).name == SENTENCE_POOL:
        engine = ", ".join(pool for pool in POOLS if pool != SENTENCE_POOL)
        raise SpecError(
            f"{SENTENCE_POOL} needs the texts of tokens, which a probe inside the engine does not "
            f"see; choose one of {engine}, or ask for token scores (tokens) or a capture and pool "
            "them on the client with inspect_lens.probe.pool_scores(scores, pool, ends=...)"
        )
    return value


EnginePool = Annotated[str, AfterValidator(_check_engine_pool)]
"""A pooling rule that can run inside the engine."""
