"""What a report shows: sets with scores, and the cases that tell most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import SpecError
from inspect_lens.probe import count_groups


@dataclass(frozen=True, eq=False, kw_only=True)
class ReportSet:
    """One set that a probe scored.

    Args:
        name: of the set.
        labels: (samples,) 0 and 1.
        scores: (samples,) float.
        groups: (samples,) clusters for the bootstrap; None draws samples. Too few
            (`inspect_lens.probe.count_groups`) draw none, and the ROC curve has no band.
        ids: (samples,) names.
        tokens: (samples,) texts of the tokens that were read, for the heat map.
        token_scores: (samples,) their scores.
        n_seen: samples that took part in making the probe; None where nobody can tell. A set with
            some of them is marked wherever it is shown.

    Raises:
        SpecError: lengths disagree.
    """

    name: str
    labels: NDArray[np.bool_]
    scores: NDArray[np.float64]
    groups: Sequence[str] | None = None
    ids: Sequence[str] = ()
    tokens: Sequence[Sequence[str]] = field(default=())
    token_scores: Sequence[NDArray[np.float64]] = field(default=())
    n_seen: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", np.asarray(self.labels).astype(bool))
        object.__setattr__(self, "scores", np.asarray(self.scores, dtype=np.float64))
        lengths = {"scores": len(self.scores), "tokens": len(self.tokens)}
        lengths |= {"token_scores": len(self.token_scores), "ids": len(self.ids)}
        n = len(self.labels)
        wrong = {k: v for k, v in lengths.items() if v != n and not (v == 0 and k != "scores")}
        if wrong or len(self.tokens) != len(self.token_scores):
            raise SpecError(
                f"{self.name}: {lengths} for {n} samples; allowed is one each, or none of tokens, "
                "token_scores and ids"
            )

    @property
    def both(self) -> bool:
        """There are samples of both classes, and so a ROC curve."""
        return bool(self.labels.any()) and not self.labels.all()

    @property
    def title(self) -> str:
        """Its name, and how many of its samples the probe knows, if it knows some."""
        seen = f" ({self.n_seen} of {len(self.labels)} seen)" if self.n_seen else ""
        return self.name + seen

    @property
    def no_band(self) -> str:
        """Why its ROC curve has no band, as `GroupCounts.too_few` says it; empty where it has."""
        return count_groups(self.labels, self.groups).too_few


class Case(NamedTuple):
    """A sample in the report's token heat map, with tokens and their scores."""

    verdict: str
    id: str
    score: float
    tokens: Sequence[str]
    token_scores: NDArray[np.float64]


def cases(data: ReportSet, *, each: int = 3) -> list[Case]:
    """The clearest and the worst cases of both classes.

    Args:
        data: a set with tokens.
        each: cases of a kind.

    Returns:
        Positives of the highest score, positives of the lowest (missed first), negatives of the
        highest (worst alarms), negatives of the lowest.

    Example:
        ```python
        from inspect_lens.view import ReportSet, cases

        data = ReportSet(
            name="test",
            labels=[True, True, False, False],
            scores=[2.0, -1.0, 1.5, -2.0],
            ids=list("abcd"),
            tokens=[["It", " is"]] * 4,
            token_scores=[[2.0, 2.0], [-1.0, -1.0], [1.5, 1.5], [-2.0, -2.0]],
        )
        for case in cases(data, each=1):
            print(case.verdict, case.id, case.score)
        ```
    """
    order = np.argsort(data.scores, kind="stable")
    positive = [int(i) for i in order if data.labels[i]]
    negative = [int(i) for i in order if not data.labels[i]]
    kinds = (
        ("positive, best", positive[::-1][:each]),
        ("positive, worst", positive[:each]),
        ("negative, worst", negative[::-1][:each]),
        ("negative, best", negative[:each]),
    )
    ids = data.ids or [str(i) for i in range(len(data.labels))]
    seen: set[int] = set()
    made = []
    for verdict, indices in kinds:
        for i in indices:
            if i not in seen:
                seen.add(i)
                score = float(data.scores[i])
                made.append(Case(verdict, ids[i], score, data.tokens[i], data.token_scores[i]))
    return made


def colour_scale(data: ReportSet) -> float:
    """Token score that gets the full colour."""
    every = np.abs(np.concatenate([np.asarray(s) for s in data.token_scores]))
    return float(np.quantile(every, 0.98)) or 1.0


# Told apart by people who see colours differently (Okabe and Ito).
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
