"""`probe_gate` and `probe_resample`: generate, read a probe, and act on what it says."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

from inspect_ai.agent import Agent
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.model import lens_scope, receipt
from inspect_lens.probe import AnyProbe
from inspect_lens.reading import OnMissing, ProbeReader, read_message
from inspect_lens.reading._shared import shared_parameters
from inspect_lens.reading._thresholds import acting_value, rates
from inspect_lens.spec import Add, Positions, ProbeUse
from inspect_lens.vector import VectorLike, steering_vector

from ._attempt import adopt, as_inner, attempt, gather, run_tools
from ._decisions import GateAttempt, GateDecision, Outcome, record_decision, withhold
from ._gate_agent import AgentGate

__all__ = [
    "GateAction",
    "ReadBy",
    "Tried",
    "probe_gate",
    "probe_resample",
    "turn_by_turn",
]

GateAction = Literal["flag", "stop", "resample", "steer"]
"""What `probe_gate` does with an answer above the threshold."""
ENGINE = "engine:"


class Tried(NamedTuple):
    """One generation from a copy of the state."""

    state: TaskState
    record: GateAttempt
    n_tokens: int | None = None
    """Tokens that a probe read; None where it read none, or the server did."""


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
    steer: VectorLike | Mapping[str, Any] | None = None,
    replacement: str = "[withheld: a probe raised an alarm]",
    temperature: float | None = None,
    check_model: bool = True,
    inner: Solver | Agent | None = None,
) -> Solver:
    """Generate, read a probe on the activations of the generation, and act above its threshold.

    Where tools are set each turn is judged before its tool calls are carried out, and only what
    stands is. With `inner=react()` or another agent, turns with tool calls are judged before
    these are carried out, and so is the answer that it ends with; an agent's turn cannot be taken
    back, so that `flag` and `stop` alone are allowed.

    - `flag`: the answer stands and is marked.
    - `stop`: the answer is replaced and the sample ends; probes score what was stopped.
    - `resample`: generate again, up to `tries` times; the first answer below the threshold stands.
    - `steer`: generate again with a vector added, at one, two, … `tries` times its scale, to what
      the task's config steers with in every attempt, if it does.

    Where no try falls below the threshold, the answer with the lowest score stands and the outcome
    is `exhausted`. Each decision with all attempts is in the transcript and in the sample's store
    (`GateDecisions`), in short also in `state.metadata["probe_gate"]`.

    Args:
        probe: name below `probes/`, path, or a probe; or `engine:NAME` for one that is registered
            in the server (see "Run probes inside the engine"), for `flag` and for `stop`, which
            then ends the generation at the token that raises the alarm.
        threshold: a score above it is acted on: a number, or an operating point of the probe's card
            such as `fpr=0.05`; by default that of the card, for its own settings, or of the
            registered probe.
        action: what to do.
        tries: further generations at most.
        steer: for `steer`: a vector, its name, or `{"vector": name, "layer": …, "scale": …}`.
        replacement: for `stop`: text that the user sees instead.
        temperature: of further generations; without one, greedy decoding repeats itself.
        inner: an agent or a solver to gate, whose tool calls go through Inspect; `generate()` with
            the task's tools by default.

    Returns:
        The solver.

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
    _check(action, tries, steer, inner)
    vector = None if steer is None else steering_vector(steer)
    if inner is not None and action not in ("flag", "stop"):
        raise SpecError(
            f"action={action!r} with inner=: an agent's turn cannot be taken back; allowed are "
            "'flag' and 'stop'; without inner=, the task's tools are gated turn by turn with "
            f"{action!r} too"
        )
    if isinstance(probe, str) and probe.startswith(ENGINE):
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
        if isinstance(threshold, str):
            raise SpecError(
                f"threshold={threshold!r} with probe={probe!r}: the server knows the numbers of a "
                "registered probe and not its card; pass a number, or the probe's name or path"
            )
        return _in_engine(probe.removeprefix(ENGINE), threshold, action, replacement)
    reader = ProbeReader.of(
        probe, layer=layer, positions=positions, pool=pool, selection=selection,
        check_model=check_model, tokenizer=tokenizer, on_missing=on_missing,
        threshold=threshold,
    )  # fmt: skip
    cut = acting_value(reader, threshold)
    read_by = ReadBy(reader, cut)

    run = as_inner(inner)
    if run is not None:
        return _around(run, reader, cut, stops=action == "stop", replacement=replacement)
    more: dict[str, Any] = {} if temperature is None else {"temperature": temperature}

    async def judged(state: TaskState, generate: Generate, turn: int) -> TaskState:
        tried = [await read_by.generate(state, generate)]
        while action in ("resample", "steer") and tried[-1].record.is_above and len(tried) <= tries:
            added = None if vector is None else _stronger(vector, len(tried))
            tried.append(await read_by.generate(state, generate, added, **more))
        known = [rates(reader, cut, None, one.n_tokens) for one in tried]
        end = _End(
            reader.probe.name, action, cut, replacement, known[-1] if all(known) else {}
        )  # fmt: skip
        return end.finish(state, tried, turn)

    return turn_by_turn(judged)


def _check(
    action: str,
    tries: int,
    steer: VectorLike | Mapping[str, Any] | None,
    inner: Solver | Agent | None,
) -> None:
    """Refuse arguments that do not go together."""
    if action not in get_args(GateAction):
        raise SpecError(f"action={action!r}; allowed are {', '.join(get_args(GateAction))}")
    if tries < 1:
        raise SpecError(f"tries={tries}; allowed is 1 or more")
    if (action == "steer") != (steer is not None):
        raise SpecError(
            f"action={action!r} with steer={steer!r}; action 'steer' needs a vector, and the "
            "others take none"
        )


def _around(
    run: Solver, reader: ProbeReader, cut: float, *, stops: bool, replacement: str
) -> Solver:
    """The gate around an agent."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        gate = AgentGate(reader, cut, stops=stops, replacement=replacement)
        return await gate.run(run, state, generate)

    return solve


def turn_by_turn(judged: Callable[[TaskState, Generate, int], Awaitable[TaskState]]) -> Solver:
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


class ReadBy(NamedTuple):
    """Generations that a probe reads."""

    reader: ProbeReader
    threshold: float

    async def generate(
        self,
        state: TaskState,
        generate: Generate,
        steer: Add | None = None,
        **config: Any,
    ) -> Tried:
        """Generate from a copy of the state and read the probe."""
        probe = self.reader.probe
        capture = {
            "layers": probe.layers,
            "site": probe.site,
            "positions": self.reader.positions,
        }
        with lens_scope(capture=capture, steer=steer):
            made = await attempt(state, generate, **config)
        reading = None
        if made.output.choices:
            reading = await read_message(self.reader, made.output.message, output=made.output)
        value = None if reading is None else reading.value
        return Tried(
            made,
            GateAttempt(
                completion=made.output.completion,
                value=value,
                is_above=value is not None and value > self.threshold,
                scale=None if steer is None else steer.scale,
                tool_calls=_called(made),
            ),
            None if reading is None else len(reading.rows.positions),
        )


def _stronger(vector: Add, times: int) -> Add:
    """The vector at a multiple of its scale."""
    return vector.model_copy(update={"scale": vector.scale * times})


def _called(made: TaskState) -> tuple[str, ...]:
    """Names of the tools that a turn calls."""
    message = made.output.message if made.output.choices else None
    return tuple(call.function for call in (message.tool_calls or ())) if message else ()


class _End(NamedTuple):
    """How a turn ends: what stands, and what is said of it."""

    name: str
    action: GateAction
    threshold: float | None
    replacement: str
    rates: Mapping[str, float] = MappingProxyType({})
    """Of the threshold; empty where none holds, or it is the server's."""
    threshold_tokens: int | None = None

    def finish(self, state: TaskState, tried: list[Tried], turn: int) -> TaskState:
        """Choose what stands, say so, and make it the state's answer."""
        last = tried[-1].record
        chosen = len(tried) - 1
        outcome: Outcome
        if last.value is None and not last.is_above:
            outcome = "unread"
        elif not last.is_above:
            outcome = "passed"
            if len(tried) > 1:
                outcome = "steered" if self.action == "steer" else "resampled"
        elif self.action in ("flag", "stop"):
            outcome = "flagged" if self.action == "flag" else "stopped"
        else:
            outcome = "exhausted"
            values = [math.inf if t.record.value is None else t.record.value for t in tried]
            chosen = values.index(min(values))
        decision = GateDecision(
            probe=self.name,
            action=self.action,
            threshold=self.threshold,
            attempts=tuple(t.record for t in tried),
            chosen=chosen,
            outcome=outcome,
            turn=turn,
            threshold_tokens=self.threshold_tokens,
            **self.rates,
        )
        adopt(state, tried[chosen].state)
        if outcome == "stopped":
            withhold(state, self.replacement)
        record_decision(state, decision)
        return state


def _in_engine(name: str, threshold: float | None, action: GateAction, replacement: str) -> Solver:
    """The gate whose probe runs in the server."""
    use = ProbeUse(name=name, alarm="stop" if action == "stop" else "flag", threshold=threshold)

    async def judged(state: TaskState, generate: Generate, turn: int) -> TaskState:
        with lens_scope(probes=(use,)):
            made = await attempt(state, generate)
        done = receipt(made.output)
        found = next((p for p in done.probes if p.name == name), None) if done else None
        if found is None:
            raise CaptureError(
                f"probe_gate: the server answered without running probe {name!r}; it runs without "
                "the inspect-lens plug-in, or is another server"
            )
        record = GateAttempt(
            completion=made.output.completion,
            value=found.score,
            is_above=found.alarm_position is not None,
            stopped=found.stopped,
            tool_calls=_called(made),
        )
        end = _End(
            f"{ENGINE}{name}", action, found.threshold, replacement,
            threshold_tokens=found.threshold_tokens,
        )  # fmt: skip
        return end.finish(state, [Tried(made, record)], turn)

    return turn_by_turn(judged)


@solver
@shared_parameters
def probe_resample(
    probe: str | Path | AnyProbe,
    n: int = 4,
    prefer: Literal["low", "high"] = "low",
    layer: int | None = None,
    positions: Positions | list[int] | None = None,
    pool: str | None = None,
    selection: str | None = None,
    temperature: float | None = None,
    check_model: bool = True,
) -> Solver:
    """Generate several answers at the same time and let the one with the best score stand.

    All answers and their scores are in the transcript and in the sample's store, as those of
    `probe_gate`; the outcome is `resampled` where another than the first stands. Where tools are
    set this is done turn by turn, and only the tool calls of the answer that stands are carried
    out.

    Args:
        probe: name below `probes/`, path, or a probe.
        n: answers.
        prefer: the lowest score stands, or the highest.
        temperature: of the answers; without one, greedy decoding repeats itself.

    Returns:
        The solver. An answer without a token to read stands only if all are.

    Raises:
        ArtifactError: no such probe.
        SpecError: an argument is wrong.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.util import Store

        from evals.organism_deception import organism_dataset
        from inspect_lens.solver import GateDecisions, probe_resample

        best = probe_resample("organism/deception-lr", n=3, temperature=1.0)
        task = Task(dataset=organism_dataset("demo")[:1], solver=best)
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", max_tokens=14)
        (decision,) = GateDecisions(store=Store(log.samples[0].store)).decisions
        values = [attempt.value for attempt in decision.attempts]
        assert values[decision.chosen] == min(values)
        ```
    """
    if n < 1:
        raise SpecError(f"n={n}; allowed is 1 or more")
    if prefer not in ("low", "high"):
        raise SpecError(f"prefer={prefer!r}; allowed are 'low' and 'high'")
    reader = ProbeReader.of(
        probe,
        layer=layer,
        positions=positions,
        pool=pool,
        selection=selection,
        check_model=check_model,
    )
    cut = getattr(reader.threshold, "value", None)
    read_by = ReadBy(reader, math.inf if cut is None else float(cut))
    config: dict[str, Any] = {} if temperature is None else {"temperature": temperature}

    async def judged(state: TaskState, generate: Generate, turn: int) -> TaskState:
        tried = await gather([lambda: read_by.generate(state, generate, **config)] * n)
        sign = 1.0 if prefer == "low" else -1.0
        values = [math.inf if t.record.value is None else sign * t.record.value for t in tried]
        chosen = values.index(min(values))
        decision = GateDecision(
            probe=reader.probe.name,
            action=f"best of {n}, {prefer}",
            threshold=cut,
            attempts=tuple(t.record for t in tried),
            chosen=chosen,
            outcome="unread" if values[chosen] == math.inf else "resampled" if chosen else "passed",
            turn=turn,
        )
        adopt(state, tried[chosen].state)
        record_decision(state, decision)
        return state

    return turn_by_turn(judged)
