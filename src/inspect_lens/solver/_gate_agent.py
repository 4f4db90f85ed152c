"""A gate around an agent: each of its turns is judged before its tool calls are carried out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inspect_ai.approval import Approval, ApprovalPolicy, Approver, approval, approver
from inspect_ai.event import Event, ModelEvent, ToolEvent
from inspect_ai.log import transcript
from inspect_ai.model import ChatMessage
from inspect_ai.solver import Generate, Solver, TaskState
from inspect_ai.tool import ToolCall, ToolCallView

from inspect_lens.errors import CaptureError
from inspect_lens.model import lens_scope
from inspect_lens.model._host import active_approver
from inspect_lens.reading import ProbeReader
from inspect_lens.reading._judge import Judged, TurnJudge, turn_of
from inspect_lens.reading._thresholds import promise, rates

from ._decisions import GateAttempt, GateDecision, Outcome, record_decision, withhold

__all__ = ["AgentGate"]


class AgentGate:
    """Runs an agent, and judges its turns."""

    def __init__(
        self, reader: ProbeReader, threshold: float, *, stops: bool, replacement: str
    ) -> None:
        self._reader = reader
        self._threshold = threshold
        self._stops = stops
        self._replacement = replacement

    async def run(self, inner: Solver, state: TaskState, generate: Generate) -> TaskState:
        """Run the agent on a sample."""
        judge = TurnJudge(self._reader, self._threshold)
        asked = _Asked()
        stopped: list[str] = []
        before = len(transcript().events)
        probe = self._reader.probe
        capture = {
            "layers": probe.layers, "site": probe.site, "positions": self._reader.positions
        }  # fmt: skip
        watch = _approver(judge, asked, stopped if self._stops else None, self._record(state))
        try:
            with lens_scope(capture=capture), approval([ApprovalPolicy(watch, "*")]):
                state = await inner(state, generate)
        except Exception:
            # Inspect ends a sample by an error of its own; ours is known by what was noted.
            if not stopped:
                raise
        events = transcript().events[before:]
        _require_seen(events, asked, str(state.model))
        if stopped:
            return withhold(state, self._replacement, message_id=stopped[0])
        return await self._answer(state, asked)

    def _record(self, state: TaskState) -> _Record:
        return _Record(state, self._reader, self._threshold, stops=self._stops)

    async def _answer(self, state: TaskState, asked: _Asked) -> TaskState:
        """Judge the answer that the agent ended with, if it was no turn with tool calls."""
        if not state.output.choices or state.output.message.id in asked.turns:
            return state
        judge = TurnJudge(self._reader, self._threshold)
        judged = await judge.judge(state.output.message, state.output)
        self._record(state)(judged, turn=len(asked.turns))
        if judged.is_above and self._stops:
            return withhold(state, self._replacement)
        return state


@dataclass
class _Asked:
    """What the gate was asked about in one run."""

    turns: set[str] = field(default_factory=set)
    """Ids of the messages."""
    calls: set[str] = field(default_factory=set)
    """Ids of their tool calls."""


class _Record:
    """Writes what was decided of a turn."""

    def __init__(
        self, state: TaskState, reader: ProbeReader, threshold: float, *, stops: bool
    ) -> None:
        self._state, self._reader, self._threshold, self._stops = state, reader, threshold, stops

    def __call__(self, judged: Judged, turn: int) -> None:
        outcome: Outcome = "passed"
        if judged.value is None:
            outcome = "unread"
        elif judged.is_above:
            outcome = "stopped" if self._stops else "flagged"
        attempt = GateAttempt(
            completion=judged.completion,
            value=judged.value,
            is_above=judged.is_above,
            tool_calls=judged.functions,
        )
        decision = GateDecision(
            probe=self._reader.probe.name,
            action="stop" if self._stops else "flag",
            threshold=self._threshold,
            attempts=(attempt,),
            chosen=0,
            outcome=outcome,
            turn=turn,
            **rates(self._reader, self._threshold, None, judged.n_tokens),
        )
        record_decision(self._state, decision)


def _approver(
    judge: TurnJudge, asked: _Asked, stopped: list[str] | None, record: _Record
) -> Approver:
    """Judges turns, and then lets the approver decide that was there before."""
    around = active_approver()

    @approver(name="probe_gate")
    def probe_gate() -> Approver:
        async def approve(
            message: str, call: ToolCall, view: ToolCallView, history: list[ChatMessage]
        ) -> Approval:
            turn = turn_of(call, history)
            judged = await judge.judge(turn)
            asked.calls |= judged.call_ids
            if (key := turn.id or "") not in asked.turns:
                asked.turns.add(key)
                record(judged, turn=len(asked.turns) - 1)
            if judged.is_above and stopped is not None:
                stopped.append(key)
                return Approval(
                    decision="terminate",
                    explanation=f"{judge.reader.probe.name} scores {judged.value:.4g}, above "
                    f"{judge.threshold:.4g}; the calls of this turn were not carried out. "
                    + promise(judge.reader, judge.threshold, None, judged.n_tokens),
                )
            if around is not None:
                return await around(message, call, view, history)
            return Approval(decision="approve")

        return approve

    return probe_gate()


def _require_seen(events: Sequence[Event], asked: _Asked, model: str) -> None:
    """Refuse a run in which tools ran that the gate was not asked about."""
    shown = {e.id: e for e in events if isinstance(e, ToolEvent)}
    turns = [
        e for e in events if isinstance(e, ModelEvent) and e.model == model and e.output.choices
    ]
    for i, turn in enumerate(turns):
        for call in turn.output.message.tool_calls or ():
            tool = shown.get(call.id)
            # Without an event an agent carried it out by itself, if it went on after it.
            ran = tool.error is None if tool is not None else i + 1 < len(turns)
            if ran and call.id not in asked.calls and call.parse_error is None:
                raise CaptureError(
                    f"probe_gate: the agent carried out a call of {call.function} that the gate "
                    "was not asked about; allowed are agents that call tools through Inspect, "
                    "without approval= of their own, which replaces the gate; give the policies "
                    "to the task, and they apply behind the gate"
                )
