"""A gate around an agent: each of its turns is judged before its tool calls are carried out."""

from __future__ import annotations

from collections.abc import Sequence

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

from ._decisions import Gate, GateAttempt, GateDecision, withhold


def gated(inner: Solver, reader: ProbeReader, gate: Gate) -> Solver:
    """An agent whose turns are judged."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        return await _Run(reader, gate, state).run(inner, generate)

    return solve


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
        known = rates(self.judge.reader, self.judge.threshold, None, judged.n_tokens)
        return self.gate.decide(self.state, [attempt], len(self.turns), **known)

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
            "calls of this turn were not carried out. "
            + promise(reader, cut, None, judged.n_tokens),
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
