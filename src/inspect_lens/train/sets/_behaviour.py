"""Whether a model did what the instructions asked for that labels were taken from."""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from inspect_lens.errors import SpecError

from ._dataset import ActivationSet

_FEWEST: Final = 20
_WORDS: Final = re.compile(r"\w+")


def followed(data: ActivationSet) -> tuple[float, float] | None:
    """Shares of honest answers that name the truth, and of lies that do not."""
    if len(data) < _FEWEST or not {"condition", "truth", "completion"} <= set(data.columns):
        return None
    rows = zip(data.columns["truth"], data.columns["completion"], strict=True)
    said = np.array([_names(truth, answer) for truth, answer in rows])
    told = np.array(data.columns["condition"])
    honest, lies = said[told == "honest"], ~said[told == "lie"]
    if not honest.size or not lies.size or honest.size + lies.size < len(data):
        return None
    return float(honest.mean()), float(lies.mean())


def differing(data: ActivationSet) -> float | None:
    """Share of the questions whose answer under an instruction to lie is not the honest one.

    For sets that do not say what is true. Answers that differ in a word need not be lies, so no
    more of them than this are.
    """
    if len(data) < _FEWEST or not {"condition", "completion"} <= set(data.columns):
        return None
    said: dict[str, dict[str, str]] = {}
    rows = zip(data.groups, data.columns["condition"], data.columns["completion"], strict=True)
    for group, condition, answer in rows:
        said.setdefault(group, {})[condition] = " ".join(_WORDS.findall(answer.casefold()))
    pairs = [found for found in said.values() if found.keys() == {"honest", "lie"}]
    if 2 * len(pairs) < 0.9 * len(data):
        return None
    return float(np.mean([found["honest"] != found["lie"] for found in pairs]))


def require_followed(data: ActivationSet, floor: float) -> str:
    """What is to be said of a training set, or refuse it: a label is no behaviour."""
    shares = followed(data)
    if shares is not None:
        least = min(shares)
        text = (
            f"of {data.name!r}, {shares[0]:.0%} of the answers under an instruction to be honest "
            f"name the truth, and {shares[1]:.0%} of those under an instruction to lie do not"
        )
    elif (share := differing(data)) is not None:
        least = share
        text = (
            f"of {data.name!r}, {share:.0%} of the answers under an instruction to lie differ from "
            "the honest answer to the same question"
        )
    else:
        return ""
    if least < floor:
        raise SpecError(
            f"behaviour_floor={floor:g}: {text}, so a probe would learn the instruction and not "
            "what the model does; allowed is a model that follows both instructions; train on what "
            "it said (labels by the answer), take a larger model, or lower the floor"
        )
    return text


def _names(truth: str, answer: str) -> bool:
    return bool(re.search(rf"(?<!\w){re.escape(truth)}(?!\w)", answer, re.IGNORECASE))
