"""`Reading`: what a probe says of one model call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import ArtifactError, UnsupportedError
from inspect_lens.model import ProbeScores
from inspect_lens.probe import (
    AnyProbe,
    Calibration,
    CardPoint,
    Statistic,
    first_crossing,
)
from inspect_lens.spec import Positions

from ._rows import Rows, select_positions
from ._thresholds import acting_value, promise, rates
from ._token_scores import TokenScores

if TYPE_CHECKING:
    from ._reader import ProbeReader


class Forms(NamedTuple):
    """Hashes of the forms in which the engine runs a probe."""

    tokens: str
    text: str | None
    """Of the one whose score is that of the text up to a token; None where tokens are enough."""


class ScoredTokens(NamedTuple):
    """Scores of the selected tokens of one output, in the place of their activations.

    What `Rows` says of activations, this says of scores; neither has the other's array.
    """

    scores: NDArray[np.float64]
    """(tokens,) what the probe's `score_tokens` says of them."""
    layers: tuple[int, ...]
    positions: range | tuple[int, ...]
    """Absolute positions over prompt and completion, in the order of the tokens."""
    source: Literal["engine"]
    n_prompt: int
    """Prompt tokens of the call."""
    token_ids: tuple[int, ...]
    """Id of the token at each position."""
    handle: ProbeScores
    """What the scores were taken from."""
    text: float | None
    """Score of all these tokens, of a pool that is no rule over token scores."""


def forms_of(probe: AnyProbe) -> Forms | None:
    """The engine's forms of a probe; None where it has none."""
    try:
        tokens, text = probe.engine_forms()
    except UnsupportedError:
        return None
    return Forms(tokens.sha256, None if text is None else text.sha256)


def pick_scores(
    handle: ProbeScores, forms: Forms, positions: Positions, layers: tuple[int, ...]
) -> ScoredTokens | None:
    """Take the scores of a probe out of what the engine said of a call; may read a file."""
    wanted = select_positions(positions, handle.n_prompt, handle.n_completion)
    if wanted is None:
        return None
    found = {column.by.engine_sha256: column for column in handle.columns}
    column = found.get(forms.tokens)
    if column is None:
        raise ArtifactError(f"the engine ran {', '.join(handle.probes)}, and not this probe")
    at = _places(column.positions, wanted)
    text = None
    if forms.text is not None:
        running = found.get(forms.text)
        first = tuple(running.positions[: len(wanted)]) if running is not None else ()
        if running is None or first != tuple(wanted):
            raise ArtifactError("the engine's attention was over other tokens")
        text = float(running.scores[len(wanted) - 1])
    ids = (*handle.prompt_token_ids, *handle.token_ids)
    chosen = ids[wanted.start : wanted.stop] if isinstance(wanted, range) else [
        ids[p] for p in wanted
    ]  # fmt: skip
    scores = column.scores[at].astype(np.float64)
    return ScoredTokens(
        scores, layers, wanted, "engine", handle.n_prompt, tuple(chosen), handle, text
    )


def _places(have: range | tuple[int, ...], wanted: range | tuple[int, ...]) -> slice | list[int]:
    runs = isinstance(have, range) and isinstance(wanted, range)
    if runs and len(have) and wanted[0] >= have[0] and wanted[-1] <= have[-1]:
        return slice(wanted[0] - have[0], wanted[-1] + 1 - have[0])
    at = {position: i for i, position in enumerate(have)}
    absent = [position for position in wanted if position not in at]
    if absent:
        raise ArtifactError(f"token position {absent[0]} was not scored by the engine")
    return [at[position] for position in wanted]


@dataclass(frozen=True)
class Reading:
    """Score, token scores and threshold of a probe on one model call.

    Example:
        ```python
        from inspect_lens.model import read_activations
        from inspect_lens.reading import ProbeReader

        reader = ProbeReader.of("organism/deception-lr")
        reading = reader.read_captured(read_activations("logs/honesty.eval")[1].activations)
        print(reading.value, reading.verdict, reading.probability)
        print(reading.first_crossing(0.5))  # the first token above 0.5, or None
        ```
    """

    value: float
    """The pooled score; larger means more of what the probe finds."""
    rows: Rows | ScoredTokens
    """The activations that were read, or the scores that the engine gave to their tokens."""
    reader: ProbeReader
    model_verified: bool
    """The model's fingerprint is that of the probe's card."""
    model_name: str | None = None
    """Of the model that made the call, where it was said."""
    refused: str | None = None
    """Why the engine did not run the probe, where it was asked to."""

    @property
    def source(self) -> Literal["engine", "rows", "recomputed"]:
        """Where the scores are from.

        `engine`: a probe in the engine gave them as the tokens were written; `rows`: captured
        activations; `recomputed`: activations of the same tokens, fed again.
        """
        return self.rows.source

    @property
    def threshold(self) -> CardPoint | None:
        """Of the probe's card, for the settings that it was set for."""
        return self.reader.threshold

    @property
    def rate(self) -> float | None:
        """False positive rate of the threshold, where it holds.

        None without a threshold, for a model that is not known to be the card's, and for an answer
        of another length.
        """
        if self.threshold is None or self.reader.no_rate(self.model_name) or not self.covered:
            return None
        return self.threshold.fpr

    @property
    def covered(self) -> bool:
        """Whether the threshold holds for answers of this length, as far as the card says."""
        point = self.threshold
        return point is None or point.statistic.covers(len(self.rows.positions), point.n_tokens)

    @property
    def is_above(self) -> bool | None:
        """Whether the value is above the threshold; None without one."""
        return None if self.threshold is None else self.value > self.threshold.value

    @property
    def verdict(self) -> Literal["above threshold", "below threshold"] | None:
        """The same in words."""
        if self.is_above is None:
            return None
        return "above threshold" if self.is_above else "below threshold"

    @property
    def probability(self) -> float | None:
        """Calibrated probability of the positive class; None without a calibration."""
        calibration = self.reader.calibration
        return None if calibration is None else calibration.probability(self.value)

    def token_scores(self) -> NDArray[np.float64]:
        """Score of each token that was read, (tokens,) float64, at `rows.positions`."""
        return self._scores

    @cached_property
    def _scores(self) -> NDArray[np.float64]:
        if isinstance(self.rows, ScoredTokens):
            return self.rows.scores
        return self.reader.probe.score_tokens(self.rows.acts, self.rows.layers)

    def first_crossing(self, threshold: float | None = None, *, pool: str = "last") -> int | None:
        """Index into `rows.positions` of the first token that raises the alarm.

        Args:
            threshold: by default that of the card for an alarm on this pool.
            pool: what is compared: `last` for single tokens, `ema:0.1`, `mean`, …

        Returns:
            The index, or None when nothing crosses.

        Raises:
            SpecError: there is no threshold, or the pool is unknown.
            ArtifactError: the pool goes by sentences, and there is no tokenizer.
        """
        cut = acting_value(self.reader, threshold, Statistic(over="alarm", pool=pool))
        ends = self.reader.sentence_ends(self.rows, self.model_name, pool)
        return first_crossing(self.token_scores(), cut, pool=pool, ends=ends)

    def record(
        self, *, label: str | None = None, message_id: str | None = None, turn: int = 0
    ) -> TokenScores:
        """The token scores with all that a reader needs to draw them; see `read_token_scores`.

        Args:
            label: key of a dict score; the probe's name by default.
            message_id: assistant message of the call.
            turn: 0-based number of the call in its sample.

        Returns:
            The record.
        """
        rows, probe, chosen = self.rows, self.reader.probe, self.reader.selection
        return TokenScores(
            probe=label or probe.name,
            probe_sha256=probe.sha256,
            layers=rows.layers,
            site=str(probe.site),
            pool=self.reader.pool,
            threshold=self.threshold.value if self.threshold else None,
            value=self.value,
            message_id=message_id,
            turn=turn,
            source=rows.source,
            n_prompt=rows.n_prompt,
            positions=np.asarray(rows.positions, dtype=np.int64),
            token_ids=np.asarray(rows.token_ids, dtype=np.int64),
            scores=self.token_scores(),
            # A file of its own where other tokens are read than the engine scored.
            stands_in=rows.handle if isinstance(rows, ScoredTokens) and not chosen else None,
        )

    def explain(self) -> str:
        """One or two sentences for a reader."""
        rows, plan = self.rows, self.reader
        layers = ", ".join(map(str, rows.layers))
        text = (
            f"{plan.probe.name} scores {self.value:.4g} ({plan.pool} over {len(rows.positions)} "
            f"tokens at layer {layers}, {SAID[rows.source]})."
        )
        if (asked := plan.probe.card.follow_up) is not None:
            text += f" It was made for replies to the question {asked.question!r} only."
        if self.threshold is None:
            return f"{text} No threshold was calibrated for these settings."
        cut = self.threshold.value
        means = promise(plan, cut, self.model_name, len(rows.positions))
        return f"{text} That is {self.verdict} {cut:.4g}. {means}"

    def metadata(self) -> dict[str, Any]:
        """Small facts only: Inspect writes this into every sample of the log."""
        plan = self.reader
        facts = {
            "probe": plan.probe.name,
            "probe_sha256": plan.probe.sha256,
            "layers": list(self.rows.layers),
            "pool": plan.pool,
            "n_tokens": len(self.rows.positions),
            "positions": self._shown_positions(),
            "source": self.rows.source,
            "threshold": self.threshold.value if self.threshold else None,
            "fpr": self.rate,
            "model_verified": self.model_verified,
        }
        if self.threshold is not None:
            facts |= rates(plan, self.threshold.value, self.model_name, len(self.rows.positions))
        if self.reader.selection:
            facts["selection"] = self.reader.selection
        if self.refused is not None:
            facts["not_in_engine"] = self.refused
        if (why := plan.no_rate(self.model_name)) is not None:
            facts["no_rate"] = why
        calibration = self.reader.calibration
        if calibration is not None:
            facts["probability"] = self.probability
            facts["calibration"] = _small(calibration)
        return facts

    def _shown_positions(self) -> list[int]:
        """A range as [start, end), as of a selection, which may have gaps; others as they are."""
        read = self.rows.positions
        if isinstance(read, range):
            return [read.start, read.stop]
        return [min(read), max(read) + 1] if self.reader.selection else list(read)


SAID = {"engine": "in the engine", "rows": "captured", "recomputed": "recomputed"}


def _small(calibration: Calibration) -> dict[str, Any]:
    """What a metric needs to compute probabilities again; steps of isotonic are too many."""
    facts = calibration.model_dump(include={"method", "slope", "intercept"}, exclude_none=True)
    return {**facts, "set": calibration.set}
