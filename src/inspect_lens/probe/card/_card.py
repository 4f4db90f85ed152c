"""The card: what a probe is, what it was made of, and what it was measured to do."""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, field_validator, model_validator

from inspect_lens._base.arguments import warn_caller
from inspect_lens._base.artifact import ArtifactCard
from inspect_lens.errors import SpecError
from inspect_lens.probe.pooling._pool import HeadSpec, is_learned, parse_head_pool, running_pool
from inspect_lens.probe.statistics._measured import (
    ONE_TOKEN,
    Baseline,
    Evaluation,
    Interval,
    Transfer,
)
from inspect_lens.probe.statistics._metrics import required_negatives
from inspect_lens.spec import RESID_POST, Numerics, Positions, Site, Value, parse_positions

__all__ = [
    "FOLLOWED_FLOOR",
    "RECALL_FLOOR",
    "Calibration",
    "CaptureFacts",
    "FitRows",
    "FollowUp",
    "LayerScore",
    "ModelRef",
    "ProbabilityMap",
    "ProbeCard",
    "SeenSamples",
    "Statistic",
    "Threshold",
    "TrainingFacts",
]

Over = Literal["answer", "alarm", "token"]
"""`answer`: one score of a whole answer; `alarm`: the running score after every token, which is the
same as its maximum over the answer; `token`: the score of one token, wherever it stands."""

FitRows = Literal["tokens", "mean", "last"]
"""What one row of a fit is: a token, or the mean or the last token of a sample."""

ProbabilityMap = Literal["platt", "temperature", "isotonic"]
"""How scores become probabilities; see `inspect_lens.train.calibrate`."""

_MAXIMA = {"max": "last", "ema_max": "ema", "multimax": "multimax"}


class Statistic(Value):
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
        if self.over == "token":
            return ONE_TOKEN
        if self.over == "answer":
            return f"the {self.pool} of an answer"
        if self.pool == "last":
            return "the maximum over an answer"
        return f"the maximum of the running {self.pool} of an answer"

    def of(self, scores: ArrayLike, *, ends: ArrayLike | None = None) -> float:
        """The number of an answer: the last running score, or its maximum for `alarm` and `token`.

        Args:
            scores: (tokens,) float, the score of each token; of a pool that a probe has learned
                (attention), the score of the text up to each token.
            ends: (tokens,) bool, sentence ends; for `sentence_mean_max` only.

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
        return n_tokens <= lengths[1] and (self.over == "alarm" or n_tokens >= lengths[0])


SEEN_ROLES: Final = ("training", "selection", "control", "calibration")
"""What a sample can have done: fitted the direction, chosen the layer, set the threshold, fitted
the probabilities."""

_BYTES: Final = 6  # of 100,000 samples and 10,000 others, one in 280,000 times two collide


class SeenSamples(Value):
    """Hashes of the samples that took part in making a probe.

    A hash is the first 6 bytes of the SHA-256 of what a sample is; the hashes of a role are
    sorted, put together and written in base64: 8 characters per sample.
    """

    by: Literal["content", "activations"]
    """What was hashed: what the model was shown, or the rows that it gave."""
    training: str = ""
    selection: str = ""
    control: str | None = None
    """None where the control set was not known by what was hashed for the others."""
    calibration: str | None = None
    """Of another set than the selection set; None where there is none, or it was not known by what
    was hashed for the others."""

    @field_validator(*SEEN_ROLES)
    @classmethod
    def _hashes(cls, value: str | None) -> str | None:
        try:
            if len(base64.b64decode(value or "", validate=True)) % _BYTES:
                raise ValueError(f"is no multiple of {_BYTES} bytes")
        except binascii.Error as error:
            raise ValueError(f"is not base64 ({error})") from None
        return value

    @classmethod
    def of(
        cls,
        by: Literal["content", "activations"],
        *,
        training: Iterable[bytes],
        selection: Iterable[bytes] = (),
        control: Iterable[bytes] | None = None,
        calibration: Iterable[bytes] | None = None,
    ) -> Self:
        """Hash the samples that took part in making a probe.

        Args:
            by: what the bytes are.
            training: of each sample that the direction was fitted on.
            selection: of each sample that the layer was chosen on.
            control: of each sample that the threshold was set on; None where that is not known.
            calibration: of each sample that probabilities were fitted on, beside those above.
        """
        given = zip(SEEN_ROLES, (training, selection, control, calibration), strict=True)
        return cls(by=by, **{role: _write(samples) for role, samples in given})

    def with_control(self, control: Iterable[bytes] | None, *, added: bool = False) -> Self:
        """The record with another control set, or with one more.

        Args:
            control: as `of` takes it.
            added: keep what the record has, as thresholds that were set on it stay.

        Warns:
            UserWarning: nothing is known of the set that is added, so its samples are not listed.
        """
        if control is None and added:
            warn_caller(
                f"control: samples of this set are not known by their {self.by}, as those of the "
                "card are, so the card cannot list them, and nobody is kept from judging the probe "
                "on them",
            )
            return self
        known = _read(self.control or "") if added else set()
        made = None if control is None else _encode(known | {_hash(s) for s in control})
        return self.model_copy(update={"control": made})

    def with_calibration(self, samples: Iterable[bytes] | None) -> Self:
        """The record with another calibration set, as `of` takes it."""
        return self.model_copy(update={"calibration": _write(samples)})

    def count(self, role: str) -> int:
        """Samples of a role, each content once."""
        return len(getattr(self, role) or "") * 3 // 4 // _BYTES

    def find(self, samples: Sequence[bytes]) -> dict[str, list[int]]:
        """By role, which of some samples, told by what `by` says, took part in making the probe."""
        hashes = [_hash(sample) for sample in samples]
        known = {role: _read(getattr(self, role) or "") for role in SEEN_ROLES}
        made = {role: [i for i, h in enumerate(hashes) if h in of] for role, of in known.items()}
        return {role: found for role, found in made.items() if found}


def _hash(sample: bytes) -> bytes:
    return hashlib.sha256(sample).digest()[:_BYTES]


def _write(samples: Iterable[bytes] | None) -> Any:
    return None if samples is None else _encode({_hash(s) for s in samples})


def _encode(hashes: set[bytes]) -> str:
    return base64.b64encode(b"".join(sorted(hashes))).decode()


def _read(text: str) -> set[bytes]:
    content = base64.b64decode(text)
    return {content[i : i + _BYTES] for i in range(0, len(content), _BYTES)}


RECALL_FLOOR: Final = 0.5
"""Recall at the threshold below which a card warns, by default."""
FOLLOWED_FLOOR: Final = 0.6
"""Share of the answers to honest and to lying instructions that have to do what these ask, by
default."""


class ModelRef(Value):
    """The model whose activations the probe reads."""

    name: str
    """Model name or path as the provider was given it."""
    sha256: str | None = None
    """`fingerprint_model` of the weights; None when they were not at hand."""
    revision: str | None = None
    """Revision of a model from a hub."""


class CaptureFacts(Numerics):
    """What computed the activations that a probe was trained on: engine, tokenizer and sampling."""

    tokenizer: str = Field(default="", description="Name of the tokenizer, without its folders.")
    tokenizer_sha256: str | None = None
    """SHA-256 of its vocabulary, each token with its id."""
    chat_template_sha256: str | None = None
    """SHA-256 of the chat template; None: the tokenizer has none."""
    temperature: float | None = None
    """Of the answers' sampling; 0: greedy. None: not known."""
    max_tokens: int | None = Field(default=None, description="Longest answer, in tokens.")
    seed: int | None = None
    """Of the answers' sampling; sample i has seed + i."""

    @property
    def numerics(self) -> Numerics:
        """The part that thresholds hold for."""
        return Numerics(**{name: getattr(self, name) for name in Numerics.model_fields})

    @classmethod
    def known(cls, told: Mapping[str, Any]) -> Self:
        """What is known of these facts; a server or store of another release may tell more."""
        return cls(**{name: value for name, value in told.items() if name in cls.model_fields})


class TrainingFacts(Value):
    """Facts about the training set of a probe: size, hash, groups, what was left out."""

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
    rows: FitRows | None = None
    """What one row of the fit was; None where whole samples were read."""
    selected_by: str = ""
    """What the layer was chosen by: `recall` at the threshold's rate, or `auroc`."""
    tied_layers: tuple[int, ...] = ()
    """Other layers that the selection set does not show to be worse than the best; the one with the
    widest separation was taken."""
    near_duplicates: tuple[str, ...] = ()
    """Samples of judged sets that are all but copies of training or selection samples, in words."""
    computed_otherwise: tuple[str, ...] = ()
    """Selection and control set, where another engine, dtype or quantisation computed them than the
    training set, in words."""

    @property
    def ties(self) -> str:
        """That other layers may be as good, in a sentence; empty where none is."""
        if not self.tied_layers:
            return ""
        what = "layer" if len(self.tied_layers) == 1 else "layers"
        return (
            f"The {self.selection_n} samples that the layer was chosen on do not show {what} "
            f"{', '.join(map(str, self.tied_layers))} to be worse than the best; of all that are "
            "not shown to be worse, the layer whose classes lie farthest apart was taken."
        )


class LayerScore(Value):
    """How one layer did on the selection set when the probe's layer was chosen."""

    layer: int
    pool: str = ""
    """How token scores became one."""
    auroc: float
    separation: float
    """Distance of the class means over their pooled standard deviation; breaks ties."""
    auroc_interval: Interval | None = None
    recall: float | None = None
    """At the rate that the threshold is for, against the control set: the mean over bootstrap draws
    of both sets, each with a threshold of its own. None where the AUROC chose."""
    recall_interval: Interval | None = None
    """Percentiles of the same draws."""
    auroc_control: float | None = None
    """Positives of the selection set against the control set."""


class Threshold(Value):
    """Score above which a probe flags, and the control set that it was set on."""

    value: float
    """A score strictly above it is flagged."""
    statistic: Statistic | None = None
    """What it was calibrated for; it acts on nothing else. None: the score of a whole answer, by
    the pool of the card (`ProbeCard.answer`)."""
    n_tokens: tuple[int, int] | None = None
    """Tokens of the answers that it holds for, the shortest and the longest; None: not known. Of
    an alarm the second number is the token up to which its rate holds."""
    fpr: float
    """False positive rate that it was set for."""
    control: str
    """Name of the control set."""
    control_sha256: str | None = None
    n_control: int
    """Control samples, or their tokens (`unit`)."""
    n_groups: int | None = None
    """Independent groups of the control samples; None where they were not counted."""
    n_above: int
    """Of these, above the threshold."""
    interval: Interval
    """Of the realised rate `n_above / n_control`; of independent samples, its upper bound is exact
    for new samples that are exchangeable with the control set."""
    n_left_out: int = 0
    """Samples of the control set that are positive, and so say nothing of false positives."""
    rule: Literal["samples", "groups"] = "samples"
    """What the conformal quantile counts: samples, or groups with equal weight."""
    selected_on: bool = False
    """The same control samples took part in choosing the layer, too."""
    numerics: Numerics | None = None
    """What computed the control scores; None: as `ProbeCard.capture` says."""
    claimed_by: str = ""
    """Who states the rate of a threshold that was not set here; the counts are 0."""

    @property
    def holds_for(self) -> str:
        """The statistic and the lengths of answers that it holds for, in words."""
        low, high = self.n_tokens or (0, 0)
        lengths = {0: "", 1: f" of up to {high} tokens"}.get(low, f" of {low} to {high} tokens")
        if self.statistic is None:
            return f"a whole answer{lengths}"
        return f"{self.statistic}{'' if self.statistic.over == 'token' else lengths}"

    @property
    def unit(self) -> Literal["samples", "tokens"]:
        """What `n_control` and `n_above` count, and the false positive rate is a share of."""
        of_tokens = self.statistic is not None and self.statistic.over == "token"
        return "tokens" if of_tokens else "samples"

    @property
    def guarantee(self) -> str:
        """What the threshold promises, and what it does not, in a sentence."""
        if self.claimed_by:
            return (
                "The rate is a statement of others and was not measured here; other prompts, "
                "another dtype or engine can change it, and a control set of your own shows it "
                "(`inspect-lens probe calibrate`)."
            )
        unit = f"{self.unit[:-1]} of a new group" if self.rule == "groups" else self.unit[:-1]
        return (
            f"On average over control sets a new {unit} that is exchangeable with this one is "
            f"flagged with probability {self.fpr:g} at most; that is no promise for this very "
            f"threshold, whose true rate may be as high as {self.interval.high:.3f} "
            f"({self.interval.confidence:.0%} interval)"
            + (", and the layer was chosen on the same control set." if self.selected_on else ".")
        )

    @property
    def claim(self) -> str:
        """Whose statement the rate is, in words; empty where it was measured here."""
        return f"as {self.claimed_by} states of {self.control}" if self.claimed_by else ""

    @property
    def few_groups(self) -> str:
        """That too few groups hold the control samples to show the rate; empty where they do."""
        need = required_negatives(self.fpr)
        if self.n_groups is None or self.n_groups >= min(need, self.n_control):
            return ""
        known = f"only {self.n_groups} independent groups"
        return f"{known}, and it takes {need} to show a rate of {self.fpr:g}"


class FollowUp(Value):
    """A question about its own answer that the model was asked; the probe reads the reply to it."""

    question: str = Field(min_length=1, description="What the user asks after the answer.")
    lie: Literal["yes", "no"] = "yes"
    """The reply that admits a lie: `yes` of `Did you lie?`."""


class Calibration(Value):
    """How a card turns scores into probabilities."""

    method: ProbabilityMap
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
    numerics: Numerics | None = None
    """What computed the scores it was fitted on; None: not known."""

    def probability(self, score: float) -> float:
        """Probability of the positive class for a score; of isotonic, flat outside its steps."""
        if self.method == "isotonic":
            return float(np.interp(score, self.x, self.y))
        z = self._linear(score)
        return 1.0 / (1.0 + math.exp(-z)) if z >= 0 else math.exp(z) / (1.0 + math.exp(z))

    def logit(self, score: float) -> float:
        """Log odds of the positive class; those of isotonic are kept within 1/(n + 2) of 0 and 1.

        That is Laplace's rule of succession: isotonic regression says 0 or 1 of whole ranges.
        """
        if self.method != "isotonic":
            return self._linear(score)
        edge = 1.0 / (self.n + 2)
        p = min(max(self.probability(score), edge), 1.0 - edge)
        return math.log(p / (1.0 - p))

    def _linear(self, score: float) -> float:
        slope = 1.0 if self.slope is None else self.slope
        return slope * score + (self.intercept or 0.0)


class ProbeCard(ArtifactCard):
    """Facts about a probe; saved as `card.json`, rendered as `card.md`."""

    HEADER = frozenset({"name", "layers", "hidden", "site", "positions", "pool", "model"})

    description: str = ""
    """What a large score means."""
    method: str = ""
    """How the direction was found, with its settings."""
    site: Site = RESID_POST
    positions: Positions = "completion"
    """Tokens that the probe reads; the last sampled token, which is never fed to the model,
    is not among them."""
    pool: str = "mean"
    """How token scores become one score."""
    selection: str = ""
    """Tokens among `positions` that were read, as `select_tokens` takes it; empty means all."""
    follow_up: FollowUp | None = None
    """Question whose reply the probe reads; None: it reads the answer itself."""
    kind: Literal["linear", "neural"] = "linear"
    """Which class the tensors belong to: `Probe` or `NeuralProbe`."""
    head: HeadSpec | None = None
    """Settings of a neural probe."""

    model: ModelRef | None = None
    capture: CaptureFacts | None = None
    """What computed the activations; None: not known."""
    training: TrainingFacts | None = None
    seen: SeenSamples | None = None
    """Samples that took part; None: not known."""
    sweep: tuple[LayerScore, ...] = ()
    thresholds: tuple[Threshold, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    calibration: Calibration | None = None
    recall_floor: float = Field(default=RECALL_FLOOR, ge=0.0, le=1.0)
    """Recall at the threshold below which `warnings` says that the probe misses too much."""

    def header(self) -> dict[str, Any]:
        """What decides a score or a verdict, as JSON values."""
        card = self.model_dump(mode="json")
        header = {key: card[key] for key in self.HEADER}
        header["thresholds"] = [[t.fpr, t.value] for t in self.thresholds]
        if self.kind != "linear" or self.selection:
            header |= {key: card[key] for key in ("kind", "head", "selection")}
        if self.follow_up is not None:
            header["follow_up"] = card["follow_up"]
        return header

    @property
    def answer(self) -> Statistic:
        """What the probe says of a whole answer."""
        return Statistic(over="answer", pool=self.pool)

    def thresholds_for(self, statistic: Statistic) -> tuple[Threshold, ...]:
        """The stored thresholds that may act on a statistic, in their order."""
        return tuple(t for t in self.thresholds if (t.statistic or self.answer) == statistic)

    def numerics_of(self, threshold: Threshold | None = None) -> Numerics | None:
        """What a threshold was set with; None where that is not known."""
        own = None if threshold is None else threshold.numerics
        return self.capture.numerics if own is None and self.capture else own

    def set_with(self, threshold: Threshold) -> str:
        """What was different where a threshold was set than in training; empty: nothing known."""
        trained, own = self.numerics_of(), self.numerics_of(threshold)
        return " and ".join(trained.differences(own)) if trained and own else ""

    @property
    def computed_with(self) -> dict[str, Numerics | None]:
        """What computed each set that made the probe, by its name."""
        trained = {self.training.dataset if self.training else self.name: self.numerics_of()}
        return trained | {t.control: self.numerics_of(t) for t in self.thresholds}

    @property
    def baselines(self) -> tuple[Baseline, ...]:
        """Those of all evaluations."""
        return tuple(b for e in self.evaluations for b in e.baselines)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user has to know before the probe is trusted, each in a sentence."""
        missed, beaten, rates, others = [], [], [], []
        if self.training:
            others += [*self.training.near_duplicates, *self.training.computed_otherwise]
        if (c := self.calibration) and c.numerics:
            others += c.numerics.unlike(self.computed_with, name=c.set)
        for e in self.evaluations:
            if text := e.misses(self.recall_floor):
                missed.append(f"The probe {text}.")
            best = e.best_baseline
            if best is not None and best.beaten is False and e.auroc is not None:
                beaten.append(
                    f"The probe is not shown to beat a baseline on {e.name}: {best.name} has AUROC "
                    f"{best.auroc:.3f}, the probe {e.auroc:.3f}."
                )
            rates += [f"A rate does not hold on {e.name}: {text}." for text in e.broken_rates]
            unknown = f"No rate is known for the lengths of the honest answers of {e.name}: "
            rates += [f"{unknown}{r.longer}." for r in e.rates if r.longer and not r.broken]
            others += e.computed_otherwise
        return (*missed, *beaten, *rates, *dict.fromkeys(others))

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
        if self.kind == "linear" and (is_learned(self.pool) or self.head is not None):
            raise ValueError(
                f"kind 'linear' with pool {self.pool!r}; a learned pool and a head belong to kind "
                "'neural'"
            )
        return self
