"""What a token page shows, how its samples are packed, and the HTML of every page."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray
from pydantic_core import to_json

from inspect_lens.probe import Statistic


def page_json(value: object) -> bytes:
    """JSON for the scripts of a page, where NaN and infinity are null."""
    return to_json(value, inf_nan_mode="null")


def render(template: str, **values: Any) -> str:
    """Fill in a template of `assets/`; every value that it names has to be given."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    loader = PackageLoader("inspect_lens.view", "assets")
    made = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    # Facts of a page; jinja2 writes "<" in them so that nothing can end their element.
    made.policies["json.dumps_function"] = lambda facts, **_: page_json(facts).decode()
    # Style sheets and scripts of ours, as they are.
    made.globals["asset"] = lambda name: Markup(loader.get_source(made, name)[0])
    made.filters["base64"] = lambda content: base64.b64encode(content).decode()
    return made


OF_TOKENS: Final = (Statistic(over="token"), Statistic(over="alarm", pool="last"))
"""Whose threshold single tokens may be compared with, the better one first: a maximum is a token.
"""

Origin = Literal["activations", "kept", "none"]
"""Computed here from activations; read from the files in which scorers kept them; or nowhere,
because the call's activations are not here and no scorer kept its scores."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One number per token: a probe at one of its layers, or over all of them."""

    probe: str
    layer: int | None
    """None: all layers of the probe, as it scores samples."""
    layers: tuple[int, ...]
    sha256: str
    pool: str
    positions: str
    threshold: float | None
    """Of the pooled value, in the unit of the token scores; None at a single layer of several."""
    fpr: float | None
    description: str
    finds: str = ""
    """How many positives the threshold finds, in a sentence; empty where its card does not say."""
    beside: tuple[str, ...] = ()
    """Of each set that the probe was measured on, its AUROC and what stands beside it."""
    neural: bool = False
    """Token values of a probe that weighs tokens are those before the weights."""


@dataclass(frozen=True)
class TurnView:
    """A run of tokens of one speaker."""

    role: str
    start: int
    """First token, in the sample's own numbering."""
    stop: int
    generated: bool
    """Written by the model in this call."""


@dataclass(frozen=True, kw_only=True)
class CallView:
    """One model call; tokens that the call before ended with are not repeated."""

    start: int
    """First of its tokens, in the sample's own numbering."""
    folded: int
    """Tokens at the beginning of the prompt that stand in the call before."""
    n_prompt: int
    n_completion: int
    values: tuple[float | None, ...]
    """Pooled score by series; None where the call has not all that the probe reads."""
    turns: tuple[TurnView, ...]
    origin: Origin = "activations"
    """Where its token scores come from."""
    captured: bool = True
    """Whether its activations were kept, here or elsewhere."""
    positions: tuple[int, ...] = ()
    """Position of each token in the call, -1 for text without one; empty where its tokens are
    shown in order from `folded` on."""


@dataclass(frozen=True, kw_only=True)
class SampleView:
    """One sample of the log."""

    id: str
    epoch: int
    label: Any
    target: str
    preview: str
    scores: dict[str, Any]
    """Every score of the log, dict scores as `scorer.key`; numbers, text or None."""
    calls: Sequence[CallView]
    token_ids: NDArray[np.int64]
    """(tokens,) of all calls, one after the other."""
    tokens: Sequence[str]
    """(tokens,) their texts."""
    special: NDArray[np.bool_]
    """(tokens,) marks of the template."""
    token_scores: NDArray[np.float32] = field(repr=False)
    """(series, tokens); NaN where a token was not captured."""
    read: NDArray[np.bool_] = field(repr=False)
    """(series, tokens) the tokens that the probe reads."""
    kept_by: tuple[str, ...] = ()
    """Scorers whose files gave token scores to calls without activations."""
    lost: str = ""
    """Address of the first file of token scores that the log refers to and that is not here."""

    @property
    def values(self) -> tuple[float | None, ...]:
        """Pooled score by series, of the last call, as scorers read it; None without calls."""
        return self.calls[-1].values if self.calls else (None,) * len(self.token_scores)


LEVELS = 65535


_SINK: Final = 5.0
"""Spans of the middle 80 % from the median, 13 standard deviations of normal scores."""


class Range(NamedTuple):
    """Where the token scores of a series lie; quantiles leave out those at attention sinks."""

    low: float
    high: float
    q02: float
    median: float
    q98: float

    def quantise(self, scores: NDArray[np.float32]) -> NDArray[np.uint16]:
        """Scores as levels; NaN is 0."""
        span = self.high - self.low
        share = (scores.astype(np.float64) - self.low) / (span if span > 0 else np.inf)
        levels = 1 + np.round(np.nan_to_num(share) * (LEVELS - 1))
        return np.where(np.isfinite(scores), levels, 0).astype(np.uint16)


class TokenTable:
    """Every token of the page once: its text, its id, and whether it is a mark."""

    def __init__(self) -> None:
        self._index: dict[tuple[int, str, bool], int] = {}

    def indices(self, sample: SampleView) -> NDArray[np.uint32]:
        """Index of each token of a sample, (tokens,)."""
        rows = zip(sample.token_ids.tolist(), sample.tokens, sample.special.tolist(), strict=True)
        found = [self._index.setdefault(row, len(self._index)) for row in rows]
        return np.array(found, dtype=np.uint32)

    def columns(self) -> dict[str, list[Any]]:
        """The table, as columns."""
        rows = list(self._index)
        return {
            "ids": [row[0] for row in rows],
            "texts": [row[1] for row in rows],
            "special": [i for i, row in enumerate(rows) if row[2]],
        }


def ranges(samples: Sequence[SampleView], n_series: int) -> list[Range]:
    """Range of each series over all samples; zeros where it has no score at all.

    Ends are of all scores, quantiles of the tokens that were read, as far as there are any.
    """
    made = []
    for i in range(n_series):
        parts = [s.token_scores[i][np.isfinite(s.token_scores[i])] for s in samples]
        values = np.concatenate([np.zeros(0, np.float32), *parts])
        if not values.size:
            made.append(Range(0.0, 0.0, 0.0, 0.0, 0.0))
            continue
        read = np.concatenate([s.token_scores[i][s.read[i]] for s in samples])
        read = read[np.isfinite(read)]
        shown = _ordinary(read if read.size else values)
        q02, median, q98 = np.quantile(shown, [0.02, 0.5, 0.98]).tolist()
        made.append(Range(float(values.min()), float(values.max()), q02, median, q98))
    return made


def _ordinary(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scores without those at attention sinks, where the stream is many times longer."""
    q10, median, q90 = np.quantile(values, [0.1, 0.5, 0.9])
    return values[np.abs(values - median) <= _SINK * (q90 - q10)] if q90 > q10 else values


def pack_sample(sample: SampleView, table: TokenTable, spread: Sequence[Range]) -> str:
    """The block of one sample, as base64."""
    header = page_json(
        {
            "calls": [
                {
                    "start": call.start, "folded": call.folded, "prompt": call.n_prompt,
                    "completion": call.n_completion, "values": [_number(v) for v in call.values],
                    "origin": call.origin, "at": list(call.positions),
                    "turns": [[t.role, t.start, t.stop, int(t.generated)] for t in call.turns],
                }
                for call in sample.calls
            ],
            "read": [_runs(row) for row in sample.read],
        }
    )  # fmt: skip
    indices = table.indices(sample)
    planes = [(indices >> shift & 255).astype(np.uint8).tobytes() for shift in (0, 8, 16)]
    for i, where in enumerate(spread):
        levels = where.quantise(sample.token_scores[i])
        planes += [(levels >> shift & 255).astype(np.uint8).tobytes() for shift in (0, 8)]
    size = len(header).to_bytes(4, "little") + len(indices).to_bytes(4, "little")
    # No time of day: the same log gives the same page.
    packed = gzip.compress(size + header + b"".join(planes), compresslevel=6, mtime=0)
    return base64.b64encode(packed).decode("ascii")


def _runs(marks: NDArray[np.bool_]) -> list[list[int]]:
    """Where marks are set, as `[start, stop]`."""
    edges = np.flatnonzero(np.diff(marks.astype(np.int8), prepend=0, append=0))
    found: list[list[int]] = edges.reshape(-1, 2).tolist()
    return found


def _number(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
