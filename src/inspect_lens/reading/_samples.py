"""What a reader finds in the calls of one sample: a reading per call, and the largest of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Generic, Literal, TypeVar

from inspect_ai.log import EvalSample
from inspect_ai.model import Model
from inspect_ai.solver import TaskState

from inspect_lens.errors import ArtifactError, NotCapturedError, SpecError, UnsupportedError
from inspect_lens.model import activations, probe_scores

from ._calls import Calls, CallSelection, Turn, model_of
from ._latents import LatentReader, LatentReading
from ._reader import ProbeReader
from ._reading import Reading

__all__ = [
    "CallReading",
    "Combine",
    "SampleReading",
    "combining",
    "read_latents",
    "read_sample",
    "read_sample_captured",
]

T = TypeVar("T")
Combine = Literal["max", "mean"]
"""How the values of several calls become one."""
R = TypeVar("R", Reading, LatentReading)


@dataclass(frozen=True)
class CallReading(Generic[R]):
    """A reading of one of several calls, with the call that it belongs to."""

    turn: Turn
    reading: R


@dataclass(frozen=True)
class SampleReading(Generic[R]):
    """What was found in the calls of a sample; its value is the largest of theirs.

    Example:
        ```python
        from inspect_ai.log import read_eval_log

        from inspect_lens.reading import ProbeReader, read_sample_captured

        reader = ProbeReader.of("organism/deception-lr", over="all")
        sample = read_eval_log("logs/honesty.eval").samples[0]
        found = read_sample_captured(reader, sample)
        print(found.top.turn.number, found.top.reading.value, found.facts())
        ```
    """

    selection: CallSelection
    calls: Calls
    read: list[CallReading[R]]
    """Those with a token to read, in the order of the calls."""
    n_missing: int = 0
    """Calls whose activations are not there, with `on_missing="skip"`."""

    @property
    def top(self) -> CallReading[R]:
        """The call with the largest value; the first of several."""
        return max(self.read, key=lambda one: one.reading.value)

    def facts(self, top: CallReading[R] | None = None) -> dict[str, Any]:
        """Small facts of which calls were read, for a score's metadata.

        A card's false positive rate is that of one completion. Over several, as many times the rate
        may be false positives, which `fpr_bound` says (Boole's inequality).

        Args:
            top: the call with the value; the one with the largest by default.

        Returns:
            The facts.
        """
        top = top or self.top
        facts: dict[str, Any] = {"turn": top.turn.number}
        if self.calls.roles:
            facts["roles"] = list(self.calls.roles)
        if self.calls.ended_by is not None:
            facts["ended_by"] = self.calls.ended_by
        if self.n_missing:
            facts["n_missing"] = self.n_missing
        if self.selection.over == "last":
            return facts
        rate = top.reading.rate
        return facts | {
            "over": self.selection.over,
            "choice": top.turn.choice,
            "message_id": top.turn.message_id,
            "n_turns": self.calls.n_turns,
            "n_turns_read": len({one.turn.number for one in self.read}),
            "turn_values": [one.reading.value for one in self.read],
            "fpr_bound": None if rate is None else min(1.0, rate * len(self.read)),
        }

    def say(self) -> str:
        """A sentence on which call the value is of, where that is not plain; with a space."""
        text, top, n = "", self.top, len(self.read)
        if n > 1:
            choice = f", choice {top.turn.choice}" if top.turn.choice else ""
            text = (
                f" It is the largest of {n} answers, in turn {top.turn.number}{choice} "
                "(counted from 0)."
            )
            if top.reading.rate is not None:
                bound = min(1.0, top.reading.rate * n)
                text += f" The rate holds for one answer; for this many it is at most {bound:.2%}."
        if self.calls.roles:
            text += f" The calls of {', '.join(self.calls.roles)} were read."
        if self.n_missing:
            text += f" {self.n_missing} calls captured nothing that could be read."
        if self.calls.ended_by is not None:
            text += f" The sample was ended by {self.calls.ended_by}; its last call was read."
        return text


async def read_sample(reader: ProbeReader, state: TaskState) -> SampleReading[Reading]:
    """Read a probe in the calls of the sample that is being scored.

    A call in a role is compared with the card by the model that made it, and is fed again to the
    model of that role alone, if it is still the one that made it.

    Args:
        reader: the probe, and which calls and tokens are read.
        state: of the sample.

    Returns:
        The readings.

    Raises:
        ArtifactError: what the probe reads is missing in a call; the message names the turn.
        SpecError: it is not clear which calls are meant; the message names the roles.

    Example:
        ```python
        from inspect_ai import score
        from inspect_ai.log import read_eval_log
        from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
        from inspect_ai.solver import TaskState

        from inspect_lens.reading import ProbeReader, read_sample


        @scorer(metrics=[mean()])
        def mean_over_turns() -> Scorer:
            reader = ProbeReader.of("organism/deception-lr", over="all")

            async def score_turns(state: TaskState, target: Target) -> Score:
                values = [one.reading.value for one in (await read_sample(reader, state)).read]
                return Score(value=sum(values) / len(values))

            return score_turns


        log = score(read_eval_log("logs/honesty.eval"), mean_over_turns(), action="overwrite")
        assert log.status == "success"
        ```
    """
    calls = reader.calls.of_state(state)

    async def read(turn: Turn, model: Model | None, only_captured: bool) -> Reading | None:
        reads = replace(reader, source="captured") if only_captured else reader
        name = turn.model.partition("/")[2]
        return await reads.read(turn.output, model_name=name, model=model)

    found, missing = await _each(read, calls.turns, reader.calls)
    return SampleReading(reader.calls, calls, [CallReading(*one) for one in found], missing)


async def read_latents(
    reader: LatentReader, state: TaskState
) -> dict[str, SampleReading[LatentReading]]:
    """Read latents of a sparse autoencoder in the calls of the sample that is being scored.

    Args:
        reader: the latents, and which calls and tokens are read.
        state: of the sample.

    Returns:
        The readings by the name of the latent.

    Raises:
        ArtifactError: what is read is missing in a call; the message names the turn.
        SpecError: the rows have another width than the autoencoder reads, or it is not clear
            which calls are meant.

    Example:
        ```python
        from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
        from inspect_ai.solver import TaskState

        from inspect_lens.reading import LatentReader, read_latents


        @scorer(metrics=[mean()])
        def most_active(reader: LatentReader) -> Scorer:
            async def score_latents(state: TaskState, target: Target) -> Score:
                found = await read_latents(reader, state)
                return Score(value={name: one.top.reading.value for name, one in found.items()})

            return score_latents
        ```
    """
    calls = reader.calls.of_state(state)

    async def read(
        turn: Turn, model: Model | None, only_captured: bool
    ) -> tuple[LatentReading, ...] | None:
        reads = replace(reader, source="captured") if only_captured else reader
        name = turn.model.partition("/")[2]
        return await reads.read(turn.output, model_name=name, model=model)

    found, missing = await _each(read, calls.turns, reader.calls)
    return {
        name: SampleReading(
            reader.calls, calls, [CallReading(turn, each[i]) for turn, each in found], missing
        )
        for i, name in enumerate(reader.latents)
    }


def read_sample_captured(reader: ProbeReader, sample: EvalSample) -> SampleReading[Reading]:
    """Read a probe in what a sample of a log captured, without an event loop or a model.

    The model is not compared with the card: a log's model may be anywhere.

    Args:
        reader: the probe, and which calls and tokens are read.
        sample: with its events.

    Returns:
        The readings.

    Raises:
        ArtifactError: what the probe reads was not captured.
        SpecError: it is not clear which calls are meant; the message names the roles.

    Example:
        ```python
        from inspect_ai.log import read_eval_log

        from inspect_lens.reading import ProbeReader, read_sample_captured

        sample = read_eval_log("logs/honesty.eval").samples[0]
        found = read_sample_captured(ProbeReader.of("organism/deception-lr"), sample)
        print(found.top.reading.value)
        ```
    """
    calls = reader.calls.of_sample(sample)
    found, missing = [], 0
    for turn in calls.turns:
        handle = activations(turn.output) or probe_scores(turn.output)
        try:
            if handle is None:
                raise NotCapturedError(
                    "activations: this call captured nothing; leave such calls out with "
                    'on_missing="skip"'
                )
            reading = reader.read_captured(handle)
        except NotCapturedError as error:
            if reader.calls.on_missing == "error":
                raise _at(turn, error, calls.turns) from None
            missing += 1
            continue
        if reading is not None:
            found.append(CallReading(turn, reading))
    return SampleReading(reader.calls, calls, found, missing)


def combining(combine: str) -> Callable[[Sequence[float]], float]:
    """The rule that makes one value of those of several calls.

    Args:
        combine: `max` or `mean`.

    Returns:
        The function from values, at least one, to their value.

    Raises:
        SpecError: there is no such rule.

    Example:
        ```python
        from inspect_lens.reading import combining

        assert combining("mean")([1.0, 2.0]) == 1.5
        ```
    """
    rules: dict[str, Callable[[Sequence[float]], float]] = {"max": max, "mean": fmean}
    if combine not in rules:
        raise SpecError(f"combine={combine!r}; allowed are {', '.join(rules)}")
    return rules[combine]


async def _each(
    read: Callable[[Turn, Model | None, bool], Awaitable[T | None]],
    turns: list[Turn],
    selection: CallSelection,
) -> tuple[list[tuple[Turn, T]], int]:
    """Read calls one after the other, and count those whose activations are not there."""
    found, missing = [], 0
    for turn in turns:
        model = model_of(turn)
        try:
            reading = await read(turn, model, bool(turn.role) and model is None)
        except (ArtifactError, UnsupportedError) as error:
            is_missing = isinstance(error, NotCapturedError | UnsupportedError)
            if selection.on_missing == "error" or not is_missing:
                raise _at(turn, error, turns) from None
            missing += 1
            continue
        if reading is not None:
            found.append((turn, reading))
    return found, missing


def _at(turn: Turn, error: Exception, turns: Iterable[Turn]) -> Exception:
    """The error with the turn's name, where there are several."""
    if len(list(turns)) == 1:
        return error
    return type(error)(f"turn {turn.number} ({turn.message_id}): {error}")
