"""`probe_gate`: generate, read a probe, and act on what it says."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from inspect_ai.agent import Agent
from inspect_ai.approval import Approval, ApprovalPolicy, Approver, approval, approver
from inspect_ai.event import Event, ModelEvent, ToolEvent
from inspect_ai.log import transcript
from inspect_ai.model import ChatMessage, ChatMessageAssistant, ModelOutput
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import ToolCall, ToolCallView
from inspect_ai.util import StoreModel
from pydantic import BaseModel, ConfigDict, Field

from inspect_lens._base.arguments import refuse_idle
from inspect_lens._base.concurrency import together
from inspect_lens._base.http import NO_PLUGIN
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.model import lens_scope, receipt
from inspect_lens.model._host import active_approver
from inspect_lens.probe import AnyProbe
from inspect_lens.reading import OnMissing, ProbeReader, Reading, read_message
from inspect_lens.reading._rows import WITHHELD
from inspect_lens.reading._samples import Judged, TurnJudge, turn_of
from inspect_lens.reading._shared import shared_parameters
from inspect_lens.reading._thresholds import acting_value, promise
from inspect_lens.spec import Add, Positions, ProbeUse
from inspect_lens.vector import VectorLike, steering_vector

from ._attempt import adopt, attempt, run_tools
from ._lens import as_inner

__all__ = ["GateAction", "GateAttempt", "GateDecision", "GateDecisions", "probe_gate"]

GateAction = Literal["flag", "stop", "resample", "steer", "best"]
"""What `probe_gate` does with an answer above the threshold; `best` compares answers instead."""

Outcome = Literal["passed", "flagged", "stopped", "resampled", "steered", "exhausted", "unread"]
"""What finally stands: an answer below the threshold (`passed` at once, `resampled` or `steered`
after tries, or another than the first of `best`), a marked one (`flagged`), a replaced one
(`stopped`), the least bad one after all tries (`exhausted`), or one that had no token to read
(`unread`)."""


class GateAttempt(BaseModel):
    """One answer that `probe_gate` generated, and its probe score."""

    model_config = ConfigDict(frozen=True)

    completion: str
    value: float | None = None
    """Score; None where there was no token to read."""
    is_above: bool
    scale: float | None = None
    """Of the steering, where it was steered."""
    stopped: bool = False
    """The engine ended it."""
    tool_calls: tuple[str, ...] = ()
    """Names of the tools that it calls. Those of attempts that do not stand were not run."""


class GateDecision(BaseModel):
    """What `probe_gate` decided on one answer: attempts, scores, the one chosen."""

    model_config = ConfigDict(frozen=True)

    probe: str
    action: str
    threshold: float | None = None
    """None where a probe has none and answers were only compared."""
    fpr: float | None = None
    """Rate at which harmless answers are acted on; None where the threshold is not the card's."""
    recall: float | None = None
    """Share that the threshold finds of the positives of the held-out set where it finds least."""
    computed_with: tuple[str, ...] = ()
    """How engine, dtype and quantisation differ from the card's; its rates may not hold then."""
    threshold_tokens: int | None = None
    """Tokens up to which the rate of a threshold of the server holds, as its receipt says."""
    attempts: tuple[GateAttempt, ...]
    """In the order in which they were made."""
    chosen: int
    """Index of the attempt that stands; of the one that was judged where it was replaced."""
    outcome: Outcome
    turn: int = 0
    """0-based number of the turn among those that this gate judged in the sample."""


class GateDecisions(StoreModel):
    """Decisions of one sample, in its store: `state.store_as(GateDecisions).decisions`."""

    decisions: list[GateDecision] = Field(default_factory=list)


class Gate(NamedTuple):
    """What acts on answers, and writes down what it decides."""

    probe: str
    action: GateAction
    threshold: float | None
    replacement: str = ""
    """For `stop`."""
    prefer: Literal["low", "high"] = "low"
    """For `best`."""

    def decide(
        self, state: TaskState, attempts: Sequence[GateAttempt], turn: int, **facts: Any
    ) -> GateDecision:
        """Choose which of the attempts at a turn stands; facts are those of the threshold."""
        chosen, outcome = self._choose(attempts)
        decision = GateDecision(
            probe=self.probe, action=self.action, threshold=self.threshold,
            attempts=tuple(attempts), chosen=chosen, outcome=outcome, turn=turn, **facts,
        )  # fmt: skip
        _record(state, decision)
        return decision

    def _choose(self, attempts: Sequence[GateAttempt]) -> tuple[int, Outcome]:
        last = len(attempts) - 1
        sign = 1.0 if self.prefer == "low" else -1.0
        values = [math.inf if a.value is None else sign * a.value for a in attempts]
        lowest = values.index(min(values))
        if self.action == "best":
            return lowest, "unread" if values[lowest] == math.inf else _again(lowest, "resampled")
        if not attempts[-1].is_above:
            if attempts[-1].value is None:
                return last, "unread"
            return last, _again(last, "steered" if self.action == "steer" else "resampled")
        if self.action in ("flag", "stop"):
            return last, "flagged" if self.action == "flag" else "stopped"
        return lowest, "exhausted"


def _again(chosen: int, outcome: Outcome) -> Outcome:
    return outcome if chosen else "passed"


def _record(state: TaskState, decision: GateDecision) -> None:
    """Write a decision into the transcript, the store and the sample's metadata."""
    kept = state.store_as(GateDecisions)
    kept.decisions = [*kept.decisions, decision]
    # From its turn 0 on: another gate may have decided before.
    start = max(i for i, one in enumerate(kept.decisions) if one.turn == 0)
    mine = kept.decisions[start:]
    # Of a gate that judged several turns the metadata tell the last one that did not just pass.
    told = next((d for d in reversed(mine) if d.outcome not in ("passed", "unread")), decision)
    state.metadata["probe_gate"] = _facts(told) | {"turns": len(mine)}
    tried = [attempt.model_dump(mode="json") for attempt in decision.attempts]
    transcript().info(_facts(decision) | {"tried": tried}, source="inspect_lens/probe_gate")


_FACTS: Final = {"probe", "action", "threshold", "fpr", "recall", "outcome", "turn"}


def _facts(decision: GateDecision) -> dict[str, Any]:
    stands, holds_for = decision.attempts[decision.chosen], decision.threshold_tokens
    return decision.model_dump(include=_FACTS) | {
        "value": stands.value, "flagged": stands.is_above, "attempts": len(decision.attempts),
        **({} if holds_for is None else {"threshold_tokens": holds_for}),
    }  # fmt: skip


def withhold(state: TaskState, replacement: str, *, message_id: str | None = None) -> TaskState:
    """Put a text in the place of a turn, and end the sample."""
    if message_id is None and state.output.choices:
        message_id = state.output.message.id
    message = ChatMessageAssistant(content=replacement, model=state.output.model, source="generate")
    output = ModelOutput.from_message(message, stop_reason="content_filter")
    facts = {"model": state.output.model, "metadata": {WITHHELD: message_id or True}}
    state.output = output.model_copy(update=facts)
    ids = [m.id for m in state.messages]
    kept = ids.index(message_id) if message_id in ids else len(ids)
    state.messages = [*state.messages[:kept], message]
    state.completed = True
    return state


class _Run:
    """An agent on one sample."""

    def __init__(self, reader: ProbeReader, gate: Gate, state: TaskState) -> None:
        assert gate.threshold is not None
        self.gate = gate
        self.judge = TurnJudge(reader, gate.threshold)
        self.state = state
        self.turns: list[str] = []
        """Ids of the messages that were judged."""
        self.calls: set[str] = set()
        """Ids of their tool calls."""
        self.stopped: str | None = None
        """The message that was stopped."""

    async def run(self, inner: Solver, generate: Generate) -> TaskState:
        """Run the agent, and judge the answer that it ends with."""
        before = len(transcript().events)
        policy = ApprovalPolicy(self._approver(), "*")
        try:
            with lens_scope(capture=self.judge.reader.capture), approval([policy]):
                self.state = await inner(self.state, generate)
        except Exception:
            # Inspect ends a sample by an error of its own; ours is known by what was noted.
            if self.stopped is None:
                raise
        self._require_seen(transcript().events[before:])
        state = self.state
        if self.stopped is not None:
            return withhold(state, self.gate.replacement, message_id=self.stopped)
        if not state.output.choices or state.output.message.id in self.turns:
            return state
        judged = await self.judge.judge(state.output.message, state.output)
        decision = self._decide(judged)
        is_stopped = decision.outcome == "stopped"
        return withhold(state, self.gate.replacement) if is_stopped else state

    def _decide(self, judged: Judged) -> GateDecision:
        attempt = GateAttempt(
            completion=judged.completion, value=judged.value, is_above=judged.is_above,
            tool_calls=judged.functions,
        )  # fmt: skip
        return self.gate.decide(
            self.state, [attempt], len(self.turns),
            computed_with=tuple(judged.differences), **self.judge.promise(judged).rates,
        )  # fmt: skip

    def _approver(self) -> Approver:
        """Judges turns, and then lets the approver decide that was there before."""
        around = active_approver()

        @approver(name="probe_gate")
        def probe_gate() -> Approver:
            async def approve(
                message: str, call: ToolCall, view: ToolCallView, history: list[ChatMessage]
            ) -> Approval:
                refused = await self._judge(call, history)
                if refused is not None:
                    return refused
                if around is not None:
                    return await around(message, call, view, history)
                return Approval(decision="approve")

            return approve

        return probe_gate()

    async def _judge(self, call: ToolCall, history: list[ChatMessage]) -> Approval | None:
        turn = turn_of(call, history)
        judged = await self.judge.judge(turn)
        self.calls |= judged.call_ids
        if (key := turn.id or "") not in self.turns:
            self._decide(judged)
            self.turns.append(key)
        if not judged.is_above or self.gate.action != "stop":
            return None
        self.stopped = self.stopped or key
        reader, cut = self.judge.reader, self.judge.threshold
        return Approval(
            decision="terminate",
            explanation=f"{reader.probe.name} scores {judged.value:.4g}, above {cut:.4g}; the "
            f"calls of this turn were not carried out. {self.judge.promise(judged).text}",
        )

    def _require_seen(self, events: Sequence[Event]) -> None:
        """Refuse a run in which tools ran that the gate was not asked about."""
        shown = {e.id: e for e in events if isinstance(e, ToolEvent)}
        model = str(self.state.model)
        turns = [
            e for e in events if isinstance(e, ModelEvent) and e.model == model and e.output.choices
        ]
        for i, turn in enumerate(turns):
            for call in turn.output.message.tool_calls or ():
                tool = shown.get(call.id)
                # Without an event an agent carried it out by itself, if it went on after it.
                ran = tool.error is None if tool is not None else i + 1 < len(turns)
                if ran and call.id not in self.calls and call.parse_error is None:
                    raise CaptureError(
                        f"probe_gate: the agent carried out a call of {call.function} that the "
                        "gate was not asked about; allowed are agents that call tools through "
                        "Inspect, without approval= of their own, which replaces the gate; give "
                        "the policies to the task, and they apply behind the gate"
                    )


ENGINE = "engine:"


class _Tried(NamedTuple):
    """One generation from a copy of the state."""

    state: TaskState
    record: GateAttempt
    reading: Reading | None = None
    """None where a probe read nothing, or the server did."""


@solver
@shared_parameters
def probe_gate(
    probe: str | Path | AnyProbe,
    threshold: float | str | None = None,
    action: GateAction = "flag",
    layer: int | None = None,
    positions: Positions | list[int] | None = None,
    pool: str | None = None,
    selection: str | None = None,
    tokenizer: str | None = None,
    on_missing: OnMissing = "error",
    tries: int = 3,
    prefer: Literal["low", "high"] = "low",
    steer: VectorLike | Mapping[str, Any] | None = None,
    replacement: str = "[withheld: a probe raised an alarm]",
    temperature: float | None = None,
    check_model: bool = True,
    inner: Solver | Agent | None = None,
) -> Solver:
    """Generate, read a probe on the activations of the generation, and act above its threshold.

    - `flag`: keep the answer and mark it.
    - `stop`: replace the answer and end the sample; probes score what was stopped.
    - `resample`: generate again, up to `tries` times; take the first answer below the threshold.
    - `best`: generate `tries` more answers at the same time as the first, and take the one with the
      best score, whatever the threshold. If that is another one, the outcome is `resampled`.
    - `steer`: generate again with a vector added, at one, two, … `tries` times its scale. It adds
      to the steering of the task's config.

    If no try falls below the threshold, the answer with the lowest score is taken and the outcome
    is `exhausted`. You find each decision with all attempts in the transcript and in the sample's
    store (`GateDecisions`), in short also in `state.metadata["probe_gate"]`.

    With tools, each turn is judged before its tool calls run, and only those of the chosen turn
    run. With `inner=react()` or another agent, only `flag` and `stop` are allowed, because an
    agent's turn cannot be taken back.

    Args:
        probe: name below `probes/`, path, or a probe; or `engine:NAME` for one that is registered
            in the server (see "Run probes inside the engine"), for `flag` and for `stop`, which
            then ends the generation at the token that raises the alarm.
        threshold: a score above it is acted on: a number, or an operating point of the probe's card
            such as `fpr=0.05`; by default that of the card, for its own settings, or of the
            registered probe.
        action: what to do.
        tries: further generations at most; all of them for `best`.
        prefer: for `best`: the lowest score stands, or the highest. An answer without a token to
            read stands only if all are.
        steer: for `steer`: a vector, its name, or `{"vector": name, "layer": …, "scale": …}`.
        replacement: for `stop`: text that the user sees instead.
        temperature: of further generations, and with `best` of the first one, too; without it,
            greedy decoding repeats itself.
        inner: an agent or a solver to gate, whose tool calls go through Inspect; `generate()` with
            the task's tools by default.

    Raises:
        ArtifactError: no such probe or vector.
        SpecError: an argument is wrong, or there is no threshold for these settings.
        CaptureError: while it runs, the agent carried out tool calls that the gate did not see.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval

        from evals.organism_deception import organism_dataset
        from inspect_lens.solver import probe_gate

        gate = probe_gate("organism/deception-lr", action="stop")
        task = Task(dataset=organism_dataset("demo")[:2], solver=gate)
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=14)
        for sample in log.samples:
            print(sample.metadata["probe_gate"]["outcome"], sample.output.completion)
        ```
    """
    _check(action, steer)
    idle: dict[str, Any] = {} if action in ("resample", "best", "steer") else {"tries": tries}
    idle |= {"temperature": temperature} if idle else {}
    idle |= {} if action == "stop" else {"replacement": replacement}
    idle |= {} if action == "best" else {"prefer": prefer}
    refuse_idle(probe_gate, f"with action={action!r}", **idle)
    vector = None if steer is None else steering_vector(steer)
    if inner is not None and action not in ("flag", "stop"):
        raise SpecError(
            f"action={action!r} with inner=: an agent's turn cannot be taken back; allowed are "
            "'flag' and 'stop'; without inner=, the task's tools are gated turn by turn with "
            f"{action!r} too"
        )
    if isinstance(probe, str) and probe.startswith(ENGINE):
        of_file: dict[str, Any] = {
            "layer": layer, "positions": positions, "pool": pool, "selection": selection,
            "tokenizer": tokenizer, "on_missing": None if on_missing == "error" else on_missing,
            "check_model": None if check_model else check_model,
        }  # fmt: skip
        cut = _number_for_engine(probe, action, threshold, inner, of_file)
        return _in_engine(Gate(probe, action, cut, replacement))
    reader = ProbeReader.of(
        probe, layer=layer, positions=positions, pool=pool, selection=selection,
        check_model=check_model, tokenizer=tokenizer, on_missing=on_missing,
        threshold=threshold,
    )  # fmt: skip
    compares = action != "best" or threshold is not None or reader.threshold is not None
    cut = acting_value(reader, threshold) if compares else None
    gate = Gate(reader.probe.name, action, cut, replacement, prefer)
    if (run := as_inner(inner)) is not None:

        async def solve(state: TaskState, generate: Generate) -> TaskState:
            return await _Run(reader, gate, state).run(run, generate)

        return solve
    more: dict[str, Any] = {} if temperature is None else {"temperature": temperature}

    async def judged(state: TaskState, generate: Generate, turn: int) -> TaskState:
        if action == "best":
            answers = (_generate(state, generate, reader, cut, **more) for _ in range(tries + 1))
            tried = await together(*answers)
        else:
            tried = [await _generate(state, generate, reader, cut)]
        while action in ("resample", "steer") and tried[-1].record.is_above and len(tried) <= tries:
            added = vector and vector.model_copy(update={"scale": vector.scale * len(tried)})
            tried.append(await _generate(state, generate, reader, cut, added, **more))
        readings = [one.reading for one in tried]
        lengths = [None if one is None else len(one.rows.positions) for one in readings]
        known = [{} if cut is None else promise(reader, cut, None, n).rates for n in lengths]
        differs = tuple(dict.fromkeys(text for one in readings if one for text in one.differences))
        rates = known[-1] if all(known) else {}
        return _finish(gate, state, tried, turn, computed_with=differs, **rates)

    return _turn_by_turn(judged)


def _check(action: str, steer: VectorLike | Mapping[str, Any] | None) -> None:
    if (action == "steer") != (steer is not None):
        raise SpecError(
            f"action={action!r} with steer={steer!r}; action 'steer' needs a vector, and the "
            "others take none"
        )


def _number_for_engine(
    probe: str,
    action: GateAction,
    threshold: float | str | None,
    inner: Solver | Agent | None,
    of_file: Mapping[str, Any],
) -> float | None:
    """The threshold, where it is all asked of a probe in the server that such a probe can do."""
    if action not in ("flag", "stop"):
        raise SpecError(
            f"action={action!r} with probe={probe!r}; a probe in the engine allows flag and "
            "stop; name a probe file for the others"
        )
    if inner is not None:
        raise SpecError(
            f"probe={probe!r} with inner=: a probe in the engine is read by the gate's own "
            "calls; allowed is the name or path of a probe file"
        )
    if given := [f"{name}={value!r}" for name, value in of_file.items() if value is not None]:
        raise SpecError(
            f"{', '.join(given)} with probe={probe!r}: what a registered probe reads is settled in "
            "the server; leave it out, or name a probe file"
        )
    if isinstance(threshold, str):
        raise SpecError(
            f"threshold={threshold!r} with probe={probe!r}: the server knows the numbers of a "
            "registered probe and not its card; pass a number, or the probe's name or path"
        )
    return threshold


def _turn_by_turn(judged: Callable[[TaskState, Generate, int], Awaitable[TaskState]]) -> Solver:
    """Judge a turn, carry out the tool calls of what stands, and go on as `generate()` does."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        choice = state.tool_choice
        for turn in count():
            state = await judged(state, generate, turn)
            if not await run_tools(state):
                break
        state.tool_choice = choice
        return state

    return solve


async def _generate(
    state: TaskState,
    generate: Generate,
    reader: ProbeReader,
    threshold: float | None,
    steer: Add | None = None,
    **config: Any,
) -> _Tried:
    """Generate from a copy of the state and read the probe."""
    with lens_scope(capture=reader.capture, steer=steer):
        made = await attempt(state, generate, **config)
    reading = None
    if made.output.choices:
        reading = await read_message(reader, made.output.message, output=made.output)
    value = None if reading is None else reading.value
    record = GateAttempt(
        completion=made.output.completion,
        value=value,
        is_above=value is not None and value > (math.inf if threshold is None else threshold),
        scale=None if steer is None else steer.scale,
        tool_calls=_called(made),
    )
    return _Tried(made, record, reading)


def _called(made: TaskState) -> tuple[str, ...]:
    message = made.output.message if made.output.choices else None
    return tuple(call.function for call in (message.tool_calls or ())) if message else ()


def _finish(
    gate: Gate, state: TaskState, tried: list[_Tried], turn: int, **facts: Any
) -> TaskState:
    decision = gate.decide(state, [one.record for one in tried], turn, **facts)
    adopt(state, tried[decision.chosen].state)
    return withhold(state, gate.replacement) if decision.outcome == "stopped" else state


def _in_engine(gate: Gate) -> Solver:
    name = gate.probe.removeprefix(ENGINE)
    alarm: Literal["stop", "flag"] = "stop" if gate.action == "stop" else "flag"
    use = ProbeUse(name=name, alarm=alarm, threshold=gate.threshold)

    async def judged(state: TaskState, generate: Generate, turn: int) -> TaskState:
        with lens_scope(probes=(use,)):
            made = await attempt(state, generate)
        done = receipt(made.output)
        found = next((p for p in done.probes if p.name == name), None) if done else None
        if found is None:
            raise CaptureError(
                f"probe_gate: the server answered without running probe {name!r}; {NO_PLUGIN}"
            )
        record = GateAttempt(
            completion=made.output.completion,
            value=found.score,
            is_above=found.alarm_position is not None,
            stopped=found.stopped,
            tool_calls=_called(made),
        )
        known = gate._replace(threshold=found.threshold)
        tried = [_Tried(made, record)]
        return _finish(known, state, tried, turn, threshold_tokens=found.threshold_tokens)

    return _turn_by_turn(judged)
