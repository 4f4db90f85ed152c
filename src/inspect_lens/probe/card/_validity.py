"""What has to stand beside an AUROC before anybody believes it: one record, shown everywhere."""

from __future__ import annotations

from typing import Final, NamedTuple

from inspect_lens._base.artifact import with_interval
from inspect_lens.probe.statistics._measured import Evaluation

BESIDE_AUROC: Final = (
    "honest answers above the threshold",
    "best baseline",
    "length baseline",
    "labels from",
    "answers that do what their label says",
)
"""What stands beside each AUROC, in the order in which every surface shows it."""
_UNKNOWN: Final = "not measured"
_OF_WHAT_IS_SAID: Final = ("judge", "ground truth")


class Validity(NamedTuple):
    """What stands beside the AUROC of one set, in words.

    Cards, reports, token pages and commands show these five, and take them from here.

    Example:
        ```python
        from inspect_lens.probe import Validity, load_probe

        measured = load_probe("organism/deception-lr").card.evaluations[0]
        found = Validity.of(measured)
        assert found.best_baseline.startswith("bag of words")
        print(found)  # one line
        ```
    """

    honest_rate: str
    """Share of the set's own honest answers, its negatives, that exceed the card's threshold for
    answers: its false positive rate in this domain."""
    best_baseline: str
    """Name and AUROC of the strongest simpler method."""
    length_baseline: str
    """AUROC of the length of the text, which some sets are told by."""
    labels_from: str
    """An instruction, a judge, or the truth; `not said` where the data set does not say."""
    behaviour: str
    """Share of the answers that do what their label says, where an instruction labels them."""

    @classmethod
    def of(cls, measured: Evaluation) -> Validity:
        """What is known of a set.

        Args:
            measured: of a probe's card, or of `evaluate_probe`.

        Returns:
            The record; what was not measured says so.
        """
        best = measured.best_baseline
        lengths = [
            b for b in measured.baselines if b.name.startswith("length") and b.auroc is not None
        ]
        longest = max(lengths, key=lambda b: b.auroc or 0.0, default=None)
        rate = _UNKNOWN
        if measured.fpr is not None:
            rate = with_interval(measured.fpr, measured.fpr_interval)
        return cls(
            honest_rate=rate,
            best_baseline=_UNKNOWN if best is None else f"{best.name} {best.auroc:.3f}",
            length_baseline=_UNKNOWN if longest is None else f"{longest.auroc:.3f}",
            labels_from=measured.label_source or "not said",
            behaviour=_behaviour(measured),
        )

    def __str__(self) -> str:
        """In one line."""
        return "; ".join(f"{name} {text}" for name, text in zip(BESIDE_AUROC, self, strict=True))


def _behaviour(measured: Evaluation) -> str:
    if measured.behaviour is not None:
        return f"{measured.behaviour:.0%}"
    # A judge and the truth label what was said, so an answer cannot fail to do it.
    return "no instruction labels them" if measured.label_source in _OF_WHAT_IS_SAID else _UNKNOWN
