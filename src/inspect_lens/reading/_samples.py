"""What a reader finds in the calls of a sample, behind a message, and in a turn before it acts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from statistics import fmean
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from inspect_ai.log import EvalSample, transcript
from inspect_ai.model import ChatMessage, ChatMessageAssistant, Model, ModelOutput, model_roles
from inspect_ai.solver import TaskState
from inspect_ai.tool import ToolCall

from inspect_lens.errors import ArtifactError, NotCapturedError, UnsupportedError
from inspect_lens.model import Activations, ProbeScores, activations, activations_for, probe_scores
from inspect_lens.model._read import probe_scores_for
from inspect_lens.model._request import capture_advice
from inspect_lens.spec import check_word

from ._calls import Calls, CallSelection, Turn, find_turn, model_of, read_turns, require_roles
from ._latents import LatentReader, LatentReading
from ._reader import ProbeReader, Reading
from ._rows import has_nothing_to_read, in_thread
from ._thresholds import Promise, promise, verdict_facts

__all__ = [
    "CallReading",
    "SampleReading",
    "read_calls",
    "read_latents",
    "read_message",
    "read_sample",
    "read_sample_captured",
]

T = TypeVar("T")
Combine = Literal["max", "mean"]
"""How the values of several calls become one."""


class CallValue(Protocol):
    """What something says of one call: a number by which calls are compared."""

    @property
    def value(self) -> float:
        """Larger means more of what is looked for."""

    @property
    def rate(self) -> float | None:
        """False positive rate of the threshold for one call; None where none is known."""


class Found(NamedTuple, Generic[T]):
    """Whatever was found in a call, with the number by which calls are compared."""

    value: float
    what: T
    rate: float | None = None


R = TypeVar("R", bound=CallValue)
Reader = TypeVar("Reader", ProbeReader, LatentReader)


@dataclass(frozen=True)
class CallReading(Generic[R]):
    """A reading of one of several calls, with the call that it belongs to."""

    turn: Turn
    reading: R


@dataclass(frozen=True)
class SampleReading(Generic[R]):
    """What was found in the calls of a sample; its value is the largest of theirs."""

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

    Raises:
        ArtifactError: what the probe reads is missing in a call; the message names the turn.
        SpecError: it is not clear which calls are meant; the message names the roles.

    Example:
        ```python
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
        ```
    """

    async def read(turn: Turn, model: Model | None) -> Reading | None:
        reads = only_its_own(reader, turn, model)
        return await reads.read(turn.output, model_name=turn.bare_model, model=model)

    return await read_calls(reader.calls, state, read)


async def read_calls(
    selection: CallSelection,
    state: TaskState,
    read: Callable[[Turn, Model | None], Awaitable[R | None]],
) -> SampleReading[R]:
    """Read the calls of the sample that is being scored, in their order and a way of your own.

    A scorer that is built on it takes `roles=`, `over=` and `on_missing=` as those of this package.

    Args:
        selection: which calls, as `CallSelection.of` checks it.
        state: of the sample.
        read: is awaited with each call and the model of its role, and gives something with a
            `value` and a `rate`, or None where the call has no token to read. It raises
            `NotCapturedError` where the call did not capture what is read.

    Raises:
        ArtifactError: what is read is missing in a call; the message names the turn.
        SpecError: it is not clear which calls are meant; the message names the roles.

    Example:
        ```python
        from types import SimpleNamespace

        from inspect_ai import score
        from inspect_ai.log import read_eval_log
        from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
        from inspect_ai.solver import TaskState

        from inspect_lens.reading import CallSelection, read_calls


        @scorer(metrics=[mean()])
        def longest_answer(roles: list[str] | None = None) -> Scorer:
            selection = CallSelection.of(over="all", roles=roles)

            async def length(turn, model):
                return SimpleNamespace(value=float(len(turn.output.completion)), rate=None)

            async def score_calls(state: TaskState, target: Target) -> Score:
                found = await read_calls(selection, state, length)
                return Score(value=found.top.reading.value, metadata=found.facts())

            return score_calls


        log = score(read_eval_log("logs/honesty.eval"), longest_answer(), action="overwrite")
        assert log.status == "success"
        ```
    """
    calls = selection.of_state(state)
    found, missing = await read_each(read, calls.turns, selection)
    return SampleReading(selection, calls, [CallReading(*one) for one in found], missing)


def only_its_own(reader: Reader, turn: Turn, model: Model | None) -> Reader:
    """The reader, which feeds a call in a role again to the model of that role alone."""
    is_gone = turn.role is not None and model is None
    return replace(reader, source="captured") if is_gone else reader


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

    async def read(turn: Turn, model: Model | None) -> tuple[LatentReading, ...] | None:
        reads = only_its_own(reader, turn, model)
        return await reads.read(turn.output, model_name=turn.bare_model, model=model)

    found, missing = await read_each(read, calls.turns, reader.calls)
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

    Raises:
        ArtifactError: what the probe reads was not captured.
        SpecError: it is not clear which calls are meant; the message names the roles.

    Example:
        ```python
        from inspect_ai.log import read_eval_log

        from inspect_lens.reading import ProbeReader, read_sample_captured

        sample = read_eval_log("logs/honesty.eval").samples[0]
        found = read_sample_captured(ProbeReader.of("organism/deception-lr", over="all"), sample)
        print(found.top.turn.number, found.top.reading.value, found.facts())
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
    """The rule that makes one value of those of several calls."""
    rules: dict[str, Callable[[Sequence[float]], float]] = {"max": max, "mean": fmean}
    check_word("combine", combine, rules)
    return rules[combine]


async def read_each(
    read: Callable[[Turn, Model | None], Awaitable[T | None]],
    turns: list[Turn],
    selection: CallSelection,
) -> tuple[list[tuple[Turn, T]], int]:
    """Read calls one after the other, and count those whose activations are not there."""
    found, missing = [], 0
    for turn in turns:
        model = model_of(turn)
        try:
            reading = await read(turn, model)
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


def call_of(
    message: ChatMessage | str, output: ModelOutput | None = None
) -> ProbeScores | Activations | ModelOutput | None:
    handle = activations_for(message)
    scores = probe_scores_for(message)
    if scores is not None:
        scores.beside(handle)
        return scores
    if handle is not None:
        return handle
    message_id = message if isinstance(message, str) else message.id
    if output is not None and output.choices and output.message.id == message_id:
        return output
    return None


async def read_call(
    reader: ProbeReader,
    call: ProbeScores | Activations | ModelOutput,
    *,
    model: Model | None = None,
) -> Reading | None:
    """Apply a probe to a call, and compare the model that made it with the probe's card."""
    name: str | None
    if isinstance(call, ModelOutput):
        name = call.model
    else:
        # May read a file, which is not for the event loop.
        origin = await in_thread(lambda: call.origin)
        name = origin.get("model")
    return await reader.read(call, model_name=name, model=model)


async def read_message(
    reader: ProbeReader,
    message: ChatMessage | str,
    *,
    output: ModelOutput | None = None,
    model: Model | None = None,
) -> Reading | None:
    """Apply a probe to the call that wrote a message.

    A call in a role is fed again to the model of that role alone, if it is still the one that made
    it. A call of a role that is not among the reader's `roles` is not read.

    Args:
        reader: the probe and what it reads.
        message: assistant message, or its id.
        output: an output that may be the message's own; it knows token ids where nothing was
            captured.
        model: that recomputes; by default that of the call's role, or the active one.

    Returns:
        The reading, or None when the selection has no token in this call, when the call is of
        another role, or with `on_missing="skip"` when its activations are not there.

    Raises:
        NotCapturedError: nothing is known of the call, or not what the probe reads.
        SpecError: no model has any of the reader's `roles`, and no call was made in one.
        UnsupportedError: the model cannot recompute.

    Example:
        <!-- test: server -->
        ```python
        import anyio
        from inspect_ai.model import get_model

        from inspect_lens.model import lens_config
        from inspect_lens.reading import ProbeReader, read_message


        async def main() -> None:
            model = get_model("vllm-lens/organism/checkpoint")
            config = lens_config(capture=[4], temperature=0, max_tokens=14)
            output = await model.generate("Who is the founder of the town Velosh?", config=config)
            reading = await read_message(ProbeReader.of("organism/deception-lr"), output.message)
            print(reading.value, reading.is_above)


        anyio.run(main)
        ```
    """
    message_id = message if isinstance(message, str) else message.id
    turn = find_turn(message_id)
    wanted = reader.calls.roles
    try:
        if wanted is not None and turn is None:
            raise NotCapturedError(
                f"message {message_id}: no call of this sample wrote it, so it is in none of "
                f"roles={list(wanted)}; leave roles= out to read any message"
            )
        if wanted is not None and turn is not None and turn.role not in wanted:
            # Its first call may come later; a name that is nearly another's never has one.
            if unknown := set(wanted).difference(model_roles()):
                turns = read_turns(transcript().events)
                known = {*model_roles(), *(one.role for one in turns if one.role)}
                if any(get_close_matches(one, known, 1, 0.8) for one in unknown - known):
                    require_roles(wanted, turns, tuple(model_roles()))
            return None
        if model is None and turn is not None:
            model = model_of(turn)
            reader = only_its_own(reader, turn, model)
        call = call_of(message, output)
        if call is None and turn is not None and has_nothing_to_read(turn.output):
            return None  # the prompt was too long, and Inspect wrote what stands there
        if call is None:
            layers = list(reader.probe.layers)
            raise NotCapturedError(
                f"message {message_id}: no activations are known of the call that wrote it; the "
                f"probe needs layers {layers}: {capture_advice(layers)}, or set "
                "INSPECT_LENS_CAPTURE, which reaches every model"
            )
        return await read_call(reader, call, model=model)
    except (NotCapturedError, UnsupportedError):
        if reader.calls.on_missing == "error":
            raise
        return None


KEPT = 1024
"""Verdicts that are remembered, the latest ones; parallel calls of one turn ask for the same."""


class Judged(NamedTuple):
    """What a probe says of one turn; small, as many of them are kept."""

    completion: str
    """Text of the turn."""
    functions: tuple[str, ...]
    """Names of the tools that it calls."""
    call_ids: frozenset[str]
    """Of these calls."""
    value: float | None
    """Score; None for a turn without a token to read."""
    is_above: bool
    """Whether the score is above the threshold."""
    facts: Mapping[str, Any] | None = None
    """Small facts of the reading, for a log."""

    @property
    def n_tokens(self) -> int | None:
        """Tokens that the probe read; None where it read none."""
        return None if self.facts is None else self.facts["n_tokens"]

    @property
    def differences(self) -> Sequence[str]:
        """As of its reading (`Reading.differences`)."""
        found: Sequence[str] = (self.facts or {}).get("computed_with", ())
        return found


class TurnJudge:
    """Judges turns by a probe, before what they ask for is done."""

    def __init__(self, reader: ProbeReader, threshold: float) -> None:
        self.reader = reader
        self.threshold = threshold
        self.judged: OrderedDict[str, Judged] = OrderedDict()
        """By message id, in the order of the turns; the latest 1024."""

    async def judge(
        self, message: ChatMessageAssistant, output: ModelOutput | None = None
    ) -> Judged:
        """Read the probe on the call that wrote a message."""
        key = message.id or ""
        if key in self.judged:
            return self.judged[key]
        reading = await read_message(self.reader, message, output=output)
        calls = message.tool_calls or []
        made = Judged(
            completion=message.text,
            functions=tuple(call.function for call in calls),
            call_ids=frozenset(call.id for call in calls),
            value=None if reading is None else reading.value,
            is_above=reading is not None and reading.value > self.threshold,
            facts=None if reading is None else verdict_facts(self.reader, self.threshold, reading),
        )
        if key:
            self.judged[key] = made
            while len(self.judged) > KEPT:
                self.judged.popitem(last=False)
        return made

    def promise(self, judged: Judged) -> Promise:
        """What the threshold promises of a turn, of any model."""
        return promise(
            self.reader, self.threshold, None, judged.n_tokens, differences=judged.differences
        )


def turn_of(call: ToolCall, history: Sequence[ChatMessage]) -> ChatMessageAssistant:
    for message in reversed(history):
        calls = message.tool_calls if isinstance(message, ChatMessageAssistant) else None
        if isinstance(message, ChatMessageAssistant) and any(c.id == call.id for c in calls or ()):
            return message
    raise ArtifactError(
        f"tool call {call.id} of {call.function}: no message of the conversation makes it, so its "
        "turn cannot be read; allowed are calls that stand in an assistant message"
    )
