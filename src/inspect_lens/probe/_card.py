"""The card: what a probe is, where it comes from, and what it was measured to do."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from inspect_lens.spec import RESID_POST, Positions, Site, parse_positions

from ._groups import stretch
from ._head import LEARNED_POOLS, HeadSpec, parse_head_pool
from ._metrics import required_negatives
from ._seen import SeenSamples

__all__ = [
    "Baseline",
    "Calibration",
    "Evaluation",
    "Interval",
    "LayerScore",
    "ModelRef",
    "ProbeCard",
    "Threshold",
    "TrainingFacts",
    "Transfer",
]


def _package_version() -> str:
    try:
        return version("inspect-lens")
    except PackageNotFoundError:
        return "unknown"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Interval(_Record):
    """A two-sided interval and the method that made it."""

    low: float
    high: float
    confidence: float = 0.95
    method: str


class ModelRef(_Record):
    """The model whose activations the probe reads."""

    name: str
    """Model name or path as the provider was given it."""
    sha256: str | None = None
    """`fingerprint_model` of the weights; None when they were not at hand."""
    revision: str | None = None
    """Revision of a model from a hub."""


class TrainingFacts(_Record):
    """What the direction was fitted on."""

    dataset: str
    sha256: str
    """Hash of the activation set, labels and groups included."""
    n_positive: int
    """Samples, not tokens."""
    n_negative: int
    n_tokens: int
    """That were selected in all samples."""
    n_groups: int
    """Groups in the fit; none of them is in the selection set."""
    group_key: str = "group"
    """What a group is."""
    selection_n: int = 0
    """Samples that the layer was chosen on; they are in no other set."""
    dropped: int = 0
    """Samples left out before the fit, for the reason in `notes`."""
    on_policy: bool = True
    """Whether the model itself wrote the completions that were read."""
    rows: Literal["tokens", "mean", "last"] | None = None
    """What one row of the fit was: a token, or the mean or the last token of a sample; None where
    whole samples were read, and in cards of releases that did not write it."""


class LayerScore(_Record):
    """One layer of the sweep, measured on the selection set."""

    layer: int
    auroc: float
    separation: float
    """Distance of the class means over their pooled standard deviation; breaks ties."""


class Threshold(_Record):
    """Where scores begin to be flagged, and the control set that says so."""

    value: float
    """A score strictly above it is flagged."""
    fpr: float
    """False positive rate that it was set for."""
    control: str
    """Name of the control set."""
    control_sha256: str | None = None
    n_control: int
    n_groups: int | None = None
    """Independent groups of the control samples; None where they were not counted."""
    n_above: int
    """Control samples above the threshold."""
    interval: Interval
    """Of the realised rate `n_above / n_control`; of independent samples, its upper bound is exact
    for new samples that are exchangeable with the control set."""
    n_left_out: int = 0
    """Samples of the control set that are positive, and so say nothing of false positives."""

    @property
    def few_groups(self) -> str:
        """That too few groups hold the control samples to show the rate; empty where they do."""
        need = required_negatives(self.fpr)
        if self.n_groups is None or self.n_groups >= min(need, self.n_control):
            return ""
        return f"only {self.n_groups} independent groups, and {need} show a rate of {self.fpr:g}"


class Evaluation(_Record):
    """Performance on a set that decided nothing."""

    name: str
    sha256: str
    n_positive: int
    n_negative: int
    disjoint_by: str
    """No value of this key is shared with the training or the selection set; `content` where only
    the samples that the card lists were compared, `not checked` where nothing was."""
    n_seen: int | None = None
    """Samples that took part in making the probe, which count for nothing here; None where its
    card does not list its samples."""
    n_groups: int | None = None
    """Independent groups of the samples; None in cards of releases that did not count them."""
    too_few: str = ""
    """Why no verdict can rest on these groups, as `GroupCounts.too_few` says it; else empty."""
    auroc: float | None = None
    """None when a class is missing."""
    auroc_interval: Interval | None = None
    auroc_bootstrap: Interval | None = None
    recall: float | None = None
    """Share of positives above the stored threshold."""
    recall_interval: Interval | None = None
    fpr: float | None = None
    """Share of negatives above the stored threshold."""
    fpr_interval: Interval | None = None

    @property
    def by_group(self) -> Interval | None:
        """`auroc_bootstrap`, unless it is a point, as of perfect separation, and no interval."""
        made = self.auroc_bootstrap
        return None if made is None or made.low == made.high else made

    @property
    def interval(self) -> Interval | None:
        """Of the AUROC, to show: `auroc_interval` if it counts groups, else `by_group` if any."""
        taken = self.auroc_interval
        if taken is not None and taken.method.startswith("obuchowski"):
            return taken
        return self.by_group or taken

    @property
    def least(self) -> float | None:
        """Lower end of the AUROC for a verdict: the lowest of its intervals.

        That by group is spread by what draws of few groups lack (see `compare_auroc`).
        """
        if self.auroc is None or self.interval is None:
            return None
        drawn, wider = self.by_group or self.interval, 1.0
        if self.by_group is not None and self.n_groups is not None:
            wider = stretch(self.n_groups)
        other = self.auroc_interval or drawn
        return min(self.auroc - wider * (self.auroc - drawn.low), other.low)

    @property
    def not_judged(self) -> str:
        """Why the interval is none that a verdict can rest on; empty where it is."""
        n = self.n_positive + self.n_negative
        if self.too_few or self.n_groups is None or self.n_groups == n or self.by_group:
            return self.too_few
        taken = self.auroc_interval
        # Obuchowski's and the exact one of perfect separation count groups; DeLong's does not.
        by_sample = taken is not None and taken.method == "delong"
        return f"no interval by its {self.n_groups} groups" if by_sample else ""


class Baseline(_Record):
    """What something simpler than the probe does on the same set."""

    name: str
    """`bag of words (answer)`, `length`, `random direction`, the name of a judge, or another."""
    set: str
    """Name of the set."""
    auroc: float | None = None
    auroc_interval: Interval | None = None
    p_value: float | None = None
    """One-sided, of the null hypothesis that the probe's AUROC is no larger; paired."""
    test: str = ""
    """Where `p_value` comes from: `delong`, or `cluster bootstrap` where groups have several
    samples; why there is none where these are too few; empty in cards of releases that knew
    DeLong's only."""
    note: str = ""


class Transfer(_Record):
    """Whether what was learned on the training set holds on a set of another kind."""

    set: str
    transfers: bool | None
    """The lower bound of the AUROC's interval lies above the bar; None where the set has too few
    independent groups to tell."""
    bar: float
    """AUROC that counts as transfer."""
    statement: str
    """One sentence for people."""


class Calibration(_Record):
    """Map from scores to probabilities."""

    method: Literal["platt", "temperature", "isotonic"]
    set: str
    """Name of the set it was fitted on."""
    n: int
    slope: float | None = None
    """Of Platt and temperature: p = sigmoid(slope · score + intercept)."""
    intercept: float | None = None
    x: tuple[float, ...] = ()
    """Of isotonic: scores of the steps, ascending."""
    y: tuple[float, ...] = ()
    """Of isotonic: probabilities at them."""
    ece: float | None = None
    """Expected calibration error (15 bins) on a set that it was not fitted on."""
    brier: float | None = None

    def probability(self, score: float) -> float:
        """Probability of the positive class for a score; of isotonic, flat outside its steps."""
        if self.method == "isotonic":
            return float(np.interp(score, self.x, self.y))
        z = self._linear(score)
        return 1.0 / (1.0 + math.exp(-z)) if z >= 0 else math.exp(z) / (1.0 + math.exp(z))

    def logit(self, score: float) -> float:
        """Log odds of the positive class; those of isotonic are kept within 1/(n + 2) of 0 and 1.

        Isotonic regression says 0 or 1 of whole ranges, whose log odds are infinite; n samples
        do not show more than that (Laplace's rule of succession).
        """
        if self.method != "isotonic":
            return self._linear(score)
        edge = 1.0 / (self.n + 2)
        p = min(max(self.probability(score), edge), 1.0 - edge)
        return math.log(p / (1.0 - p))

    def _linear(self, score: float) -> float:
        slope = 1.0 if self.slope is None else self.slope
        return slope * score + (self.intercept or 0.0)


class ProbeCard(_Record):
    """Facts about a probe; saved as `card.json`, rendered as `card.md`."""

    name: str = Field(min_length=1)
    """`<model>/<name>`, its folder below `probes/`."""
    description: str = ""
    """What a large score means."""
    method: str = ""
    """How the direction was found, with its settings."""
    source: str = ""
    """Paper or code that the method comes from."""

    layers: Annotated[tuple[int, ...], Field(min_length=1)]
    """Layers that the probe reads, ascending; scores of several layers are averaged."""
    hidden: int = Field(gt=0)
    """Width of the residual stream."""
    site: Site = RESID_POST
    positions: Positions = "completion"
    """Tokens that the probe reads; the last sampled token, which is never fed to the model,
    is not among them."""
    pool: str = "mean"
    """How token scores become one score."""
    selection: str = ""
    """Tokens among `positions` that were read, as `select_tokens` takes it; empty means all."""
    kind: Literal["linear", "neural"] = "linear"
    """Which class the tensors belong to: `Probe` or `NeuralProbe`."""
    head: HeadSpec | None = None
    """Settings of a neural probe."""

    model: ModelRef | None = None
    training: TrainingFacts | None = None
    seen: SeenSamples | None = None
    """Samples that took part; None in cards of releases that did not list them."""
    sweep: tuple[LayerScore, ...] = ()
    thresholds: tuple[Threshold, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    baselines: tuple[Baseline, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    calibration: Calibration | None = None
    selectivity: float | None = None
    """Accuracy on the task minus accuracy on a control task with labels that mean nothing."""

    notes: tuple[str, ...] = ()
    inspect_lens_version: str = Field(default_factory=_package_version)
    command: str = ""
    """Command that made the probe."""
    created: datetime = Field(default_factory=lambda: datetime.now(UTC).replace(microsecond=0))

    @field_validator("layers")
    @classmethod
    def _layers(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if list(value) != sorted(set(value)) or value[0] < 0:
            raise ValueError(f"{value} is not ascending, unique and 0-based; sort the layers")
        return value

    @field_validator("positions", mode="before")
    @classmethod
    def _positions(cls, value: Any) -> Any:
        return parse_positions(value, field="positions")

    @field_validator("pool")
    @classmethod
    def _pool(cls, value: str) -> str:
        return str(parse_head_pool(value))

    @model_validator(mode="after")
    def _kind(self) -> ProbeCard:
        learned = self.pool.partition(":")[0] in LEARNED_POOLS
        if self.kind == "linear" and (learned or self.head is not None):
            raise ValueError(
                f"kind 'linear' with pool {self.pool!r}; a learned pool and a head belong to kind "
                "'neural'"
            )
        return self
