"""Which calls of a sample a scorer reads: the last one, or all, and every choice of each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from inspect_ai.event import Event, SampleLimitEvent
from inspect_ai.log import transcript
from inspect_ai.model import Model, ModelOutput, model_roles
from inspect_ai.solver import TaskState

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model import activations

from ._given import WITHHELD, is_withheld
from ._reader import ProbeReader
from ._reading import Reading
from ._rows import has_nothing_to_read
from ._turns import Turn, read_turns

__all__ = [
    "CallReading",
    "Calls",
    "Over",
    "calls_to_read",
    "check_over",
    "each_choice",
    "read_calls",
    "read_each",
]

T = TypeVar("T")
Over = Literal["last", "all"]
"""Which calls of a sample are read: that of its answer, or every one of its model."""


class Calls(NamedTuple):
    """The calls of a sample that are to be read.

    Example:
        ```python
        from inspect_lens.reading import Calls

        assert Calls([], n_turns=0, ended_by=None).ended_by is None  # nothing ended the sample
        ```
    """

    turns: list[Turn]
    """In their order; each has one choice."""
    n_turns: int
    """Calls of the sample's model, read or not."""
    ended_by: str | None
    """`probe_gate`, or the type of the limit that ended the sample before it had an answer, such
    as `operator` for a monitor's; its last call is read then. None for a sample with an answer."""


class CallReading(NamedTuple):
    """Reading of a probe on one of several calls, with the call that it belongs to.

    Example:
        ```python
        from inspect_ai.log import read_eval_log

        from inspect_lens.model import read_activations
        from inspect_lens.reading import CallReading, ProbeReader, read_turns

        sample = read_eval_log("logs/honesty.eval").samples[0]
        (turn,) = read_turns(sample.events)
        handle = read_activations(sample)[0].activations
        reading = ProbeReader.of("organism/deception-lr").read_captured(handle)
        print(CallReading(turn, reading).turn.number)
        ```
    """

    turn: Turn
    reading: Reading


def check_over(over: str) -> None:
    """Raise an error for a value of `over` that does not exist.

    Args:
        over: as a user wrote it.

    Raises:
        SpecError: it is none of them.

    Example:
        ```python
        from inspect_lens.reading import check_over

        check_over("all")
        ```
    """
    if over not in get_args(Over):
        raise SpecError(
            f"over={over!r}; allowed are {', '.join(get_args(Over))}; 'last' reads the call of the "
            "sample's answer, 'all' every call of its model"
        )


def calls_to_read(state: TaskState, over: Over = "last") -> Calls:
    """Find the calls of a sample that a scorer reads.

    A sample that a monitor, a gate or another limit ended has no answer of its own. Its last call
    stands for one, so that the sample stays in the metrics.

    Args:
        state: of the sample; its transcript is that of this task.
        over: `last` for the call that wrote the sample's answer, `all` for every call that the
            eval's model made, each choice of a call by itself.

    Returns:
        The calls; none where the model made no call.

    Raises:
        SpecError: `last`, and the call has several choices.

    Example:
        ```python
        from inspect_ai import score
        from inspect_ai.log import read_eval_log
        from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
        from inspect_ai.solver import TaskState

        from inspect_lens.reading import calls_to_read


        @scorer(metrics=[mean()])
        def calls_made() -> Scorer:
            async def count(state: TaskState, target: Target) -> Score:
                return Score(value=len(calls_to_read(state, "all").turns))

            return count


        log = score(read_eval_log("logs/honesty.eval"), calls_made(), action="overwrite")
        assert log.samples[0].scores["calls_made"].value == 1
        ```
    """
    events = transcript().events
    turns = read_turns(events, model=str(state.model))
    ended = _ended_by(state.output, events) if has_nothing_to_read(state.output) else None
    answer = _answer(state, turns)
    if over == "all":
        found = turns or ([] if answer is None else [answer])
        return Calls([one for turn in found for one in each_choice(turn)], len(turns), ended)
    if answer is None:
        return Calls([], len(turns), ended)
    if len(answer.output.choices) > 1:
        raise SpecError(
            f"num_choices={len(answer.output.choices)}: the call has several answers, and "
            "over='last' would read the first alone; allowed is over='all', which reads each "
            "choice and says which has the largest value, or num_choices=1"
        )
    return Calls([answer], len(turns), ended)


async def read_calls(reader: ProbeReader, turns: Sequence[Turn]) -> list[CallReading]:
    """Read a probe on several model calls.

    A call in a role is compared with the card by the model that made it, and is fed again to the
    model of that role alone, if it is still the one that made it.

    Args:
        reader: the probe and what it reads.
        turns: of a sample.

    Returns:
        The readings; calls without a token to read are left out.

    Raises:
        ArtifactError: what the probe reads is missing in a call; the message names the turn.

    Example:
        ```python
        import anyio
        from inspect_ai.log import read_eval_log

        from inspect_lens.reading import ProbeReader, read_calls, read_turns

        reader = ProbeReader.of("organism/deception-lr", source="captured")
        sample = read_eval_log("logs/honesty.eval").samples[0]
        (found,) = anyio.run(read_calls, reader, read_turns(sample.events))
        assert found.turn.number == 0
        ```
    """

    async def read(turn: Turn, model: Model | None, only_captured: bool) -> Reading | None:
        reads = replace(reader, source="captured") if only_captured else reader
        name = turn.model.partition("/")[2]
        return await reads.read(turn.output, model_name=name, model=model)

    return [CallReading(turn, reading) for turn, reading in await read_each(read, turns)]


async def read_each(
    read: Callable[[Turn, Model | None, bool], Awaitable[T | None]], turns: Sequence[Turn]
) -> list[tuple[Turn, T]]:
    """Read calls one after the other, whatever reads them.

    Args:
        read: takes a call, the model of its role, and whether only what was captured may be read,
            as the model of the role is not the one that made the call.
        turns: of a sample.

    Returns:
        What was read, each with its call; calls without a token to read are left out.

    Raises:
        ArtifactError: what is read is missing in a call; the message names the turn.
    """
    found = []
    for turn in turns:
        model = _model_of(turn)
        try:
            reading = await read(turn, model, bool(turn.role) and model is None)
        except ArtifactError as error:
            if len(turns) == 1:
                raise
            raise ArtifactError(f"turn {turn.number} ({turn.message_id}): {error}") from None
        if reading is not None:
            found.append((turn, reading))
    return found


def _answer(state: TaskState, turns: Sequence[Turn]) -> Turn | None:
    """The call of the sample's answer; the last one of a sample that was ended without one."""
    output = state.output
    if not has_nothing_to_read(output):
        message_id = output.message.id if output.choices else None
        known = next((turn for turn in turns if turn.message_id == message_id), None)
        if known is not None:
            # What stands in the state knows more: an event of a log has no token ids.
            return known._replace(output=output)
        return Turn(len(turns), message_id, output, None, str(state.model))
    withheld = (output.metadata or {}).get(WITHHELD)
    stopped = next((turn for turn in turns if turn.message_id == withheld), None)
    return stopped or (turns[-1] if turns else None)


def _ended_by(output: ModelOutput, events: Sequence[Event]) -> str | None:
    if is_withheld(output):
        return "probe_gate"
    limits = [event.type for event in events if isinstance(event, SampleLimitEvent)]
    return limits[-1] if limits else None


def each_choice(turn: Turn) -> list[Turn]:
    """Each choice of a call as an output of its own."""
    output = turn.output
    if len(output.choices) < 2:
        return [turn]
    made = [turn._replace(output=output.model_copy(update={"choices": output.choices[:1]}))]
    shared: dict[str, Any] = {
        key: value
        for key, value in (output.metadata or {}).items()
        if key not in ("activations", "token_ids")
    }
    for index, choice in enumerate(output.choices[1:], 1):
        handle = activations(choice.message.metadata)
        own = {} if handle is None else {"activations": handle}
        only = output.model_copy(update={"choices": [choice], "metadata": shared | own})
        made.append(turn._replace(message_id=choice.message.id, output=only, choice=index))
    return made


def _model_of(turn: Turn) -> Model | None:
    """The model of the turn's role, if it is the one that made the call; None without a role."""
    found = model_roles().get(turn.role) if turn.role else None
    models = found if isinstance(found, list) else [found]
    return next((model for model in models if str(model) == turn.model), None)
