"""When an edit acts, and how strongly: gates, rules that join them, and schedules."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

import numpy as np
from pydantic import (
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from ._engine import RESID_POST, Site, limits_of
from ._instruction import N_REGISTERS, NEXT_TOKEN, SAME_TOKEN, Instruction, Kind, Row, unit
from ._tensor import Tensor, TensorData, WireModel, as_tensor_data, freeze_tensor
from ._values import MOST_GATES, Flag, Integer, Number, Value, shown

__all__ = ["MOST_GATES", "MOST_SCHEDULED", "Gate", "Rule", "Schedule", "is_gate_key"]

_KEY = re.compile("[0-9a-f]{64}")
GateKey: TypeAlias = Annotated[str, Field(pattern=f"^{_KEY.pattern}$")]
"""What a receipt has of a gate that may stay open in later requests."""


def is_gate_key(value: object) -> bool:
    """Whether a value from outside has the form of a gate's key."""
    return isinstance(value, str) and _KEY.fullmatch(value) is not None


_MOST_DEPTH = 4
_LATENT_FIELDS = ("bias", "active_above")


class Gate(WireModel):
    """A probe that an edit is multiplied with.

    The factor is `sigmoid(sharpness * (<s, direction> - threshold))`, or with `sharpness=None` 1
    above the threshold and else 0. With `scope="token"` each token has its own, read at or before
    the edit. With `scope="next"` it is that of the sampled token before, and with `scope="rest"`
    the edit acts on every sampled token behind the first one that was above the threshold; these
    may be read at any layer, also behind the edit.

    With `scope="rest"`, `reads` may name the prompt instead: its last token, or the mean of all its
    tokens. That is decided once, when the prompt has been computed, and the edit then acts on every
    sampled token from the first one on that is fed to the model.

    `ema` averages the score over sampled tokens, `m = ema*x + (1 - ema)*m`, beginning with the
    score of the first one. `closes_below` is hysteresis: a gate that has opened stays open until
    the score, or its average, falls below it. Prompt tokens never enter: a cached one is not seen.

    A latent of a sparse autoencoder is read with its row of the encoder as `direction`, its `bias`
    and `active_above`: the score is then its activation. `SparseAutoencoder.gate` fills them in.

    Source:
        Conditional activation steering, arXiv:2409.05907 (`reads="prompt_mean"` with
        `similarity="cast"` is its condition).

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import Ablate, Gate

        lies = np.random.default_rng(0).standard_normal(256)
        gate = Gate(direction=lies, layer=3, threshold=1.5)
        edit = Ablate(direction=lies, layers=[4, 5], when=gate)
        assert edit.when.layer == 3
        ```
    """

    direction: Tensor
    """(width,); what the stream is multiplied with."""
    layer: Integer
    """Layer at which the stream is read, 0-based."""
    site: Site = RESID_POST
    """Site at which it is read."""
    threshold: Number = Field(default=0.0, allow_inf_nan=False)
    """Above it the edit acts."""
    sharpness: Number | None = Field(default=None, allow_inf_nan=False, gt=0)
    """Steepness of the sigmoid; None is a step."""
    similarity: Literal["dot", "cosine", "cast"] = "dot"
    """The score: `dot` is the product with the direction, `cosine` that of both at norm 1, and
    `cast`, of the prompt only, the cosine of the row and of `tanh` of its projection on the
    direction. That one has no sign: it says how much of the row lies along the direction."""
    bias: Number = Field(default=0.0, allow_inf_nan=False)
    """Added to the product: of a latent, as `Latents.bias`."""
    active_above: Number | None = Field(default=None, allow_inf_nan=False, ge=0)
    """Of a latent: the score is `z = <s, direction> + bias` where that is larger than this, and
    else 0, as in JumpReLU (0 is ReLU); None leaves `z` as it is."""
    scope: Literal["token", "next", "rest"] = "token"
    """Tokens it decides on: the one it reads, the sampled one behind that, or the rest of the
    request behind that."""
    ema: Number | None = Field(default=None, allow_inf_nan=False, gt=0, le=1)
    """Weight of the newest score in its moving average over sampled tokens; None averages nothing,
    and so does 1."""
    closes_below: Number | None = Field(default=None, allow_inf_nan=False)
    """Score below which a gate that has opened closes again, less than `threshold`; None is
    `threshold` itself."""
    reads: Literal["completion", "last_prompt", "prompt_mean"] | None = None
    """With `scope="rest"`, what may open it: each sampled token (the default), the last token of
    the prompt alone, or the mean over all tokens of the prompt. For the mean the engine computes
    the whole prompt, also where its beginning is in the prefix cache. The mean of a latent is that
    of its activations, and that of anything else the score of the mean row."""
    shadow: Flag = False
    """Whether the edits of a gate that `is_lasting` are left out: the receipt says when they would
    have begun, and the answer is the plain one."""
    conversation: Flag = False
    """With `scope="rest"`, whether it may stay open in later requests: once it is open, the receipt
    has its `key`, and a request that brings the key among its `open_gates` begins with it open."""

    @field_validator("direction", mode="before")
    @classmethod
    def _direction(cls, value: Any, info: ValidationInfo) -> TensorData:
        limits = limits_of(info)
        judge = None if limits is None else limits.judge_edit
        return freeze_tensor(as_tensor_data(value, field="when.direction", judge=judge))

    @model_validator(mode="after")
    def _check(self) -> Self:
        values = self.direction.to_float32()
        if values.ndim != 1 or not values.size:
            raise ValueError(
                f"direction has shape {values.shape}; a gate reads one (width,) vector"
            )
        if not np.isfinite(values).all() or not values.any():
            raise ValueError("direction holds NaN or infinity, or nothing but zeros")
        if self.scope == "rest" and self.sharpness is not None:
            raise ValueError(
                "sharpness beside scope='rest': the gate opens at once and stays open; leave "
                "sharpness out"
            )
        for name in ("reads", "conversation"):
            if self.scope != "rest" and getattr(self, name):
                raise ValueError(f"{name} beside scope={self.scope!r}: it belongs to scope='rest'")
        if self.shadow and not self.is_lasting:
            raise ValueError(
                "shadow beside scope='token': no receipt tells of such a gate; use scope='next' or "
                "'rest', ema or closes_below"
            )
        self._check_score()
        self._check_running()
        return self

    def _check_score(self) -> None:
        if self.is_latent and self.similarity != "dot":
            raise ValueError(
                f"bias and active_above beside similarity={self.similarity!r}: a latent is read as "
                "a product; leave one of them out"
            )
        for name in _LATENT_FIELDS:
            if abs(getattr(self, name) or 0.0) > float(np.finfo(np.float32).max):
                raise ValueError(
                    f"{name}={getattr(self, name):g}: beyond float32, which latents are read in"
                )
        if self.similarity == "cast" and not self.reads_prompt:
            raise ValueError(
                "similarity='cast' is that of a prompt; set scope='rest' and reads='prompt_mean' "
                "or 'last_prompt', or use similarity='cosine'"
            )

    def _check_running(self) -> None:
        if self.closes_below is not None:
            if self.scope == "rest":
                raise ValueError("closes_below beside scope='rest', whose gates stay open")
            if self.sharpness is not None:
                raise ValueError("closes_below beside sharpness: one is a step, and one is smooth")
            if self.closes_below >= self.threshold:
                raise ValueError(
                    f"closes_below={self.closes_below:g} is not below threshold={self.threshold:g}"
                )
        if self.ema is not None and self.reads_prompt:
            raise ValueError(
                f"ema beside reads={self.reads!r}: that is read once, and ema averages sampled "
                "tokens"
            )

    @property
    def gates(self) -> tuple[Gate, ...]:
        """Itself, as a rule has its gates."""
        return (self,)

    @property
    def denied(self) -> frozenset[str]:
        """None: a gate alone is not denied; see `Rule.denied`."""
        return frozenset()

    @property
    def is_latent(self) -> bool:
        """Whether its score is more than a product: a latent's, with a bias or an activation."""
        return self.bias != 0 or self.active_above is not None

    @property
    def reads_prompt(self) -> bool:
        """Whether it decides once, when the prompt has been computed."""
        return self.reads in ("last_prompt", "prompt_mean")

    @property
    def is_running(self) -> bool:
        """Whether its decision on a token is kept, or depends on the tokens before."""
        return self.scope == "next" or self.ema is not None or self.closes_below is not None

    @property
    def is_lasting(self) -> bool:
        """Whether its decisions outlive a step, and receipts tell of it."""
        return self.scope != "token" or self.is_running

    @property
    def lasts_by(self) -> str:
        """What makes it lasting, for messages."""
        if self.scope != "token":
            return f"scope={self.scope!r}"
        return "closes_below" if self.ema is None else "ema"

    @property
    def first_register(self) -> int:
        """Of the block of registers that it belongs to; see `N_LATCHES`."""
        if not self.is_running:
            return N_REGISTERS if self.is_lasting else 0
        return SAME_TOKEN if self.scope == "token" else NEXT_TOKEN

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        form: dict[str, Any] = handler(self)
        # What is not asked for is left out.
        unused = [name for name in ("ema", "closes_below") if getattr(self, name) is None]
        if not self.is_latent:
            unused += _LATENT_FIELDS
        if not self.is_lasting:
            unused += ["scope", "reads", "shadow"]
        if not self.conversation:
            unused.append("conversation")
        for name in unused:
            form.pop(name, None)
        return form

    def instruction(self, register: int) -> Instruction:
        """Make the instruction for the tap at `layer` that puts the gate into a register."""
        read: Row = self.direction.to_float32()
        if self.reads_prompt:
            kind = Kind.PROMPT_MEAN if self.reads == "prompt_mean" else Kind.PROMPT_LAST
            above = -math.inf if self.active_above is None else self.active_above
            code = float(("dot", "cosine", "cast").index(self.similarity))
            return Instruction(kind, read, None, (code, self.threshold, self.bias, above), True,
                               register)  # fmt: skip
        is_cosine = self.similarity == "cosine"
        if is_cosine:
            read = unit(read)
        steep = math.inf if self.sharpness is None else self.sharpness
        closes, weight = 0.0, 0.0
        if self.is_running:
            kind = Kind.COSINE_RUNNING if is_cosine else Kind.RUNNING
            # One that closes at its threshold is never held open by the rule for closing.
            closes = math.inf if self.closes_below is None else self.closes_below
            closes = -math.inf if self.scope == "rest" else closes
            weight = 1.0 if self.ema is None else self.ema
        elif self.scope == "rest":
            kind = Kind.COSINE_LATCH if is_cosine else Kind.LATCH
        else:
            kind = Kind.COSINE_GATE if is_cosine else Kind.GATE
        latent: Row | None = None
        if self.is_latent:
            least = np.finfo(np.float32).min if self.active_above is None else self.active_above
            latent = np.asarray([self.bias, least], dtype=np.float32)
        params = (steep, self.threshold, closes, weight)
        return Instruction(kind, read, latent, params, True, register)

    @property
    def content(self) -> tuple[object, ...]:
        """What makes two gates the same."""
        score = self.direction.sha256, self.similarity, self.bias, self.active_above
        how = self.threshold, self.sharpness, self.scope, self.reads or "completion"
        parts = *score, self.layer, self.site, *how, self.ema, self.closes_below
        # `key` hashes how these are written, and equal gates have one key: -0.0 becomes 0.0.
        return tuple(part + 0.0 if isinstance(part, float) else part for part in parts)

    @property
    def key(self) -> str:
        """By which a later request opens it: a hash of what it reads and how it decides."""
        return hashlib.sha256(repr(self.content).encode()).hexdigest()


def _which(value: Any) -> str:
    is_rule = isinstance(value, Mapping) and not set(Rule.names).isdisjoint(value)
    return "rule" if is_rule or isinstance(value, Rule) else "gate"


class Rule(WireModel):
    """Gates joined by and, or and not: all of `all`, at least one of `any`, and none of `none`.

    Each entry is a gate or another rule. The edit is multiplied with each factor of `all`, with the
    largest of `any`, and with 1 minus each of `none`, so that smooth gates stay smooth.

    Source:
        Rules over several conditions, arXiv:2409.05907.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import Ablate, Gate, Rule

        rng = np.random.default_rng(0)
        harmful, legal, medical = (
            Gate(direction=v, layer=2, threshold=0.5) for v in rng.standard_normal((3, 256))
        )
        rule = Rule(any=[legal, medical], none=[harmful])
        edit = Ablate(direction=rng.standard_normal(256), layers=[3], when=rule)
        assert len(edit.when.gates) == 3
        ```
    """

    names: ClassVar[tuple[str, ...]] = ("all", "any", "none")
    """Its fields."""

    all: tuple[When, ...] = ()
    """Each of these has to hold."""
    any: tuple[When, ...] = ()
    """One of these has to hold; none at all is no condition."""
    none: tuple[When, ...] = ()
    """None of these may hold."""

    @field_validator("all", "any", "none", mode="before")
    @classmethod
    def _parts(cls, value: Any) -> Any:
        return (value,) if isinstance(value, Gate | Rule | Mapping) else value

    @model_validator(mode="before")
    @classmethod
    def _few(cls, values: Any) -> Any:
        # Before a gate is read: rules in rules multiply, and each gate has a tensor.
        _check_size(values)
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        # Once more, for parts that came as iterators.
        _check_size(self)
        if not self.gates:
            raise ValueError("a rule joins gates, and this one has none; give all, any or none")
        if len({gate.shadow for gate in self.gates}) > 1:
            raise ValueError(
                "shadow of some of its gates: an edit is left out or acts; set shadow on all gates "
                "of the rule, or on none"
            )
        return self

    @property
    def parts(self) -> tuple[Gate | Rule, ...]:
        """What it joins, in the order of its fields."""
        return (*self.all, *self.any, *self.none)

    @property
    def gates(self) -> tuple[Gate, ...]:
        """All gates in it, also in rules that it joins."""
        return tuple(gate for part in self.parts for gate in part.gates)

    @property
    def shadow(self) -> bool:
        """As for a gate: whether the edits are left out."""
        return self.gates[0].shadow

    @property
    def is_lasting(self) -> bool:
        """Whether one of its gates is."""
        return any(gate.is_lasting for gate in self.gates)

    @property
    def denied(self) -> frozenset[str]:
        """Keys of gates for which it matters that they are shut."""
        inner = [part.denied for part in self.parts if isinstance(part, Rule)]
        of_none = [gate.key for part in self.none for gate in part.gates]
        return frozenset(of_none).union(*inner)

    @property
    def content(self) -> tuple[object, ...]:
        """What makes two rules the same."""
        return tuple(tuple(map(_told_apart, getattr(self, name))) for name in self.names)

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        form: dict[str, Any] = handler(self)
        return {name: parts for name, parts in form.items() if parts}


When: TypeAlias = Annotated[
    Annotated[Gate, Tag("gate")] | Annotated[Rule, Tag("rule")], Discriminator(_which)
]
"""A gate, or a rule that joins several."""
Rule.model_rebuild()


def placed(when: Gate | Rule | None, field: str) -> Iterator[tuple[str, Gate]]:
    """The gates of an edit, each with its path in the request."""
    if isinstance(when, Gate):
        yield field, when
    elif when is not None:
        for name in Rule.names:
            for i, part in enumerate(getattr(when, name)):
                yield from placed(part, f"{field}.{name}[{i}]")


def _told_apart(part: Gate | Rule) -> tuple[object, ...]:
    # With `conversation` a gate may begin open, and without it never.
    return (part.content, part.conversation) if isinstance(part, Gate) else part.content


def _check_size(rule: object) -> None:
    if (n := _n_gates(rule)) > MOST_GATES:
        raise ValueError(f"a rule of {n} gates; {MOST_GATES} at most")


def _n_gates(part: Any, depth: int = 0) -> int:
    """Gates of a rule, which may be JSON still and nested deeper than Python can follow."""
    if _which(part) == "gate":
        return 1
    if depth == _MOST_DEPTH:
        raise ValueError(f"rules are nested more than {_MOST_DEPTH} deep; join gates in fewer")
    form = part if isinstance(part, Mapping) else vars(part)
    lists = [form.get(name, ()) for name in Rule.names]
    inner = [one for at in lists for one in (at if isinstance(at, list | tuple) else [at])]
    return sum(_n_gates(one, depth + 1) for one in inner)


MOST_SCHEDULED = 1 << 14
"""Sampled tokens over which a schedule may change; the last factor stays."""
_FADED = 24
"""Half-lives after which the factor is 0: what is left by then is below the precision of float32.
"""


class Schedule(Value):
    """Strength of an edit over the sampled tokens, set in advance: a factor for each of them.

    Tokens are counted as they are fed to the model: 0 is the first sampled one. Between two points
    the factor is that of the point before (`step`), or goes from one to the other in a straight
    line or along half a cosine; behind the last point it stays. A `half_life` halves it every so
    many tokens, from 1 on. The factor depends on the token's place alone, so batches, speculation
    and pre-emption change nothing.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import Add, Schedule

        fading = Schedule(points=[(0, 1.0), (32, 0.0)], between="cosine")
        edit = Add(vector=np.ones(256), layers=[3], positions="completion", schedule=fading)
        assert [round(edit.schedule.at(k), 3) for k in (0, 16, 32, 99)] == [1.0, 0.5, 0.0, 0.0]
        assert Schedule(half_life=8).at(16) == 0.25
        ```
    """

    points: tuple[tuple[Integer, Number], ...] | None = Field(default=None)
    """(token, factor) pairs, tokens ascending; in front of the first point its factor holds."""
    between: Literal["step", "linear", "cosine"] | None = Field(default=None)
    """How the factor goes from a point to the next; None is `linear`."""
    half_life: Number | None = Field(default=None, allow_inf_nan=False, gt=0, le=512)
    """Tokens in which the factor halves; after 24 times as many it is 0."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.points is None) == (self.half_life is None):
            raise ValueError("give points or half_life, and only one of them")
        if self.points is None:
            if self.between is not None:
                raise ValueError("between beside half_life: it is about points; leave it out")
            return self
        at = [token for token, _ in self.points]
        if not at or at[0] < 0 or at[-1] >= MOST_SCHEDULED or sorted(set(at)) != at:
            raise ValueError(
                f"points at {shown(at)}; give one or more, with tokens that ascend from 0 to at "
                f"most {MOST_SCHEDULED - 1}"
            )
        if not all(abs(factor) <= _LARGEST_FACTOR for _, factor in self.points):
            raise ValueError(
                f"points: a factor is not finite, or beyond {_LARGEST_FACTOR:g}; put what is "
                "stronger into the edit itself"
            )
        return self

    @property
    def factors(self) -> Row:
        """(tokens,) float32; that of the first sampled tokens, of which the last one stays."""
        return _factors(self.points, self.between, self.half_life)

    def at(self, token: int) -> float:
        """The factor of a sampled token, counted from 0; that of the first one in front of it."""
        return float(self.factors[min(max(token, 0), len(self.factors) - 1)])

    @property
    def largest(self) -> float:
        """The largest factor, its sign aside."""
        return float(np.abs(self.factors).max())

    def instruction(self, register: int, n_prompt: int) -> Instruction:
        """Make the instruction that puts the factor of a token into a register, for each tap.

        Args:
            register: it goes to.
            n_prompt: tokens of the prompt, behind which the sampled ones begin.
        """
        params = (float(len(self.factors)), float(n_prompt), 0.0, 0.0)
        return Instruction(Kind.SCHEDULE, self.factors, None, params, True, register)


_LARGEST_FACTOR = 1e4


@lru_cache(maxsize=256)
def _factors(
    points: tuple[tuple[int, float], ...] | None, between: str | None, half_life: float | None
) -> Row:
    if half_life is not None:
        wide = np.append(0.5 ** (np.arange(math.ceil(_FADED * half_life)) / half_life), 0.0)
    else:
        assert points is not None
        tokens, values = (np.asarray(x, dtype=np.float64) for x in zip(*points, strict=True))
        # The point before each token, and the share of the way to the next.
        each = np.arange(int(tokens[-1]) + 1)
        before = np.maximum(np.searchsorted(tokens, each, side="right") - 1, 0)
        share = np.maximum(each - tokens[before], 0.0) / np.append(np.diff(tokens), 1.0)[before]
        if between == "step":
            share = np.zeros_like(share)
        elif between == "cosine":
            share = (1.0 - np.cos(np.pi * share)) / 2.0
        steps = np.append(np.diff(values), 0.0)
        wide = values[before] + share * steps[before]
    made: Row = wide.astype(np.float32)
    made.flags.writeable = False
    return made
