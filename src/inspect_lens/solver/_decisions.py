"""What a gate decided, in the transcript and in the sample's store."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from inspect_ai.log import transcript
from inspect_ai.model import ChatMessageAssistant, ModelOutput
from inspect_ai.solver import TaskState
from inspect_ai.util import StoreModel
from pydantic import BaseModel, ConfigDict, Field

from inspect_lens.reading._given import WITHHELD

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
    """Decisions of one sample, in its store: `state.store_as(GateDecisions).decisions`.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.util import Store

        from evals.organism_deception import organism_dataset
        from inspect_lens.solver import GateDecisions, probe_gate

        task = Task(
            dataset=organism_dataset("demo")[:1], solver=probe_gate("organism/deception-lr")
        )
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=14)
        (decision,) = GateDecisions(store=Store(log.samples[0].store)).decisions
        assert decision.outcome in ("passed", "flagged")
        ```
    """

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
    """The outcome of another attempt than the first."""
    return outcome if chosen else "passed"


def _record(state: TaskState, decision: GateDecision) -> None:
    """Write a decision into the transcript, the store and the sample's metadata.

    Of a gate that judged several turns the metadata tell the last one that did not just pass.
    """
    kept = state.store_as(GateDecisions)
    kept.decisions = [*kept.decisions, decision]
    mine = _run_of(kept.decisions)
    told = next((d for d in reversed(mine) if d.outcome not in ("passed", "unread")), decision)
    state.metadata["probe_gate"] = _facts(told) | {"turn": told.turn, "turns": len(mine)}
    transcript().info(
        {
            **_facts(decision),
            "turn": decision.turn,
            "tried": [a.model_dump(mode="json") for a in decision.attempts],
        },
        source="inspect_lens/probe_gate",
    )


def _run_of(decisions: Sequence[GateDecision]) -> list[GateDecision]:
    """The decisions of the gate that decided last: from its turn 0 on."""
    start = max(i for i, one in enumerate(decisions) if one.turn == 0)
    return list(decisions[start:])


def _facts(decision: GateDecision) -> dict[str, Any]:
    stands = decision.attempts[decision.chosen]
    holds_for = decision.threshold_tokens
    return {
        "probe": decision.probe,
        "action": decision.action,
        "threshold": decision.threshold,
        "fpr": decision.fpr,
        "recall": decision.recall,
        "outcome": decision.outcome,
        "value": stands.value,
        "flagged": stands.is_above,
        "attempts": len(decision.attempts),
        **({} if holds_for is None else {"threshold_tokens": holds_for}),
    }


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
