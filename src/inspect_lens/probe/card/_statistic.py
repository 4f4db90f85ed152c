"""What a threshold is compared with: the score of an answer, a running score, or one token."""

from __future__ import annotations

from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import model_validator

from inspect_lens.errors import SpecError
from inspect_lens.probe.pooling._head import is_learned, parse_head_pool
from inspect_lens.probe.pooling._pool import running_pool
from inspect_lens.probe.statistics._measured import ONE_TOKEN, Record

Over = Literal["answer", "alarm", "token"]
"""`answer`: one score of a whole answer; `alarm`: the running score after every token, which is the
same as its maximum over the answer; `token`: the score of one token, wherever it stands."""

_MAXIMA = {"max": "last", "ema_max": "ema", "multimax": "multimax"}


class Statistic(Record):
    """The number of an answer that a threshold was calibrated for, and that it may act on.

    A threshold that 1 % of whole answers exceed is exceeded by the running score of many more,
    because an alarm compares after every token. So each threshold of a card names its statistic.
    What is the same number has one name: the maximum over an answer (`max`) is what an alarm on
    each token's own score compares, and becomes `Statistic(over="alarm", pool="last")`.

    Example:
        ```python
        from inspect_lens.probe import Statistic

        scores = [0.0, 4.0, -1.0]
        assert Statistic(over="answer", pool="mean").of(scores) == 1.0
        assert Statistic(over="alarm", pool="mean").of(scores) == 2.0  # after the second token
        assert Statistic(over="answer", pool="max") == Statistic(over="alarm", pool="last")
        ```
    """

    over: Over
    pool: str = "mean"
    """How token scores become the score that is compared; `last` for one token."""

    @model_validator(mode="before")
    @classmethod
    def _one_name(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        over, pool = data.get("over"), parse_head_pool(str(data.get("pool", "mean")))
        if over == "token":
            return {**data, "pool": "last"}
        if pool.name in _MAXIMA:
            over, pool = "alarm", pool._replace(name=_MAXIMA[pool.name])
        return {**data, "over": over, "pool": str(pool)}

    @classmethod
    def parse(cls, text: str, pool: str) -> Self:
        """The statistic that a user means.

        Args:
            text: `answer`, `alarm` or `token`, or one with its pool, such as `alarm:ema:0.1`.
            pool: of the probe's card, where the text names none.

        Returns:
            The statistic.

        Raises:
            SpecError: it is none of these.
        """
        over, colon, rule = text.partition(":")
        if over not in ("answer", "alarm", "token") or (over == "token" and colon):
            raise SpecError(
                f"statistic={text!r}; allowed are 'answer', 'alarm' and 'token', and with another "
                "pool than the card's 'answer:POOL' or 'alarm:POOL', such as 'alarm:ema:0.1'"
            )
        return cls.model_validate({"over": over, "pool": rule if colon else pool})

    def __str__(self) -> str:
        """In words, as messages name it."""
        if self.over == "token":
            return ONE_TOKEN
        if self.over == "answer":
            return f"the {self.pool} of an answer"
        if self.pool == "last":
            return "the maximum over an answer"
        return f"the maximum of the running {self.pool} of an answer"

    def of(self, scores: ArrayLike, *, ends: ArrayLike | None = None) -> float:
        """The number of an answer that the threshold is compared with.

        Args:
            scores: (tokens,) float, the score of each token; of a pool that a probe has learned
                (attention), the score of the text up to each token.
            ends: (tokens,) bool, sentence ends; for `sentence_mean_max` only.

        Returns:
            The last value of the running score for `answer`, and its maximum for `alarm` and
            `token`.

        Raises:
            SpecError: as `running_pool`.
        """
        running = running_pool(scores, "last" if is_learned(self.pool) else self.pool, ends=ends)
        return float(running[-1] if self.over == "answer" else np.max(running))

    def covers(self, n_tokens: int, lengths: tuple[int, int] | None) -> bool:
        """Whether an answer is as long as those of the control set, as far as these are known.

        Args:
            n_tokens: tokens of the answer that were read.
            lengths: shortest and longest control answer. A maximum only grows with an answer, so
                that an alarm's threshold holds for every shorter one, too.
        """
        if lengths is None or self.over == "token":
            return True
        low, high = lengths
        return n_tokens <= high and (self.over == "alarm" or n_tokens >= low)
