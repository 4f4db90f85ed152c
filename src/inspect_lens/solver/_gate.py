"""`probe_gate`: generate, read a probe, and act on what it says."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from inspect_ai.agent import Agent
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens._base.concurrency import together
from inspect_lens._base.http import NO_PLUGIN
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.model import lens_scope, receipt
from inspect_lens.probe import AnyProbe
from inspect_lens.reading import OnMissing, ProbeReader, read_message
from inspect_lens.reading._shared import shared_parameters
from inspect_lens.reading._thresholds import acting_value, rates
from inspect_lens.spec import Add, Positions, ProbeUse
from inspect_lens.vector import VectorLike, steering_vector

from ._attempt import adopt, as_inner, attempt, run_tools
from ._decisions import Gate, GateAction, GateAttempt, withhold
from ._gate_agent import gated

ENGINE = "engine:"


class _Tried(NamedTuple):
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
    prefer: Literal["low", "high"] = "low",
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
    - `best`: generate `tries` more answers at the same time as the first; the one with the best
      score stands, whatever the threshold. The outcome is `resampled` where that is another one.
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
        tries: further generations at most; all of them for `best`.
        prefer: for `best`: the lowest score stands, or the highest. An answer without a token to
            read stands only if all are.
        steer: for `steer`: a vector, its name, or `{"vector": name, "layer": …, "scale": …}`.
        replacement: for `stop`: text that the user sees instead.
        temperature: of further generations, and with `best` of the first one, too; without it,
            greedy decoding repeats itself.
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
    _check(action, tries, steer, prefer)
    vector = None if steer is None else steering_vector(steer)
    if inner is not None and action not in ("flag", "stop"):
        raise SpecError(
            f"action={action!r} with inner=: an agent's turn cannot be taken back; allowed are "
            "'flag' and 'stop'; without inner=, the task's tools are gated turn by turn with "
            f"{action!r} too"
        )
    if isinstance(probe, str) and probe.startswith(ENGINE):
        cut = _number_for_engine(probe, action, threshold, inner)
        return _in_engine(Gate(probe, action, cut, replacement))
    reader = ProbeReader.of(
        probe, layer=layer, positions=positions, pool=pool, selection=selection,
        check_model=check_model, tokenizer=tokenizer, on_missing=on_missing,
        threshold=threshold,
    )  # fmt: skip
    compares = action != "best" or threshold is not None or reader.threshold is not None
    cut = acting_value(reader, threshold) if compares else None
    gate = Gate(reader.probe.name, action, cut, replacement, prefer)
    run = as_inner(inner)
    if run is not None:
        return gated(run, reader, gate)
    more: dict[str, Any] = {} if temperature is None else {"temperature": temperature}

    async def judged(state: TaskState, generate: Generate, turn: int) -> TaskState:
        if action == "best":
            answers = (_generate(state, generate, reader, cut, **more) for _ in range(tries + 1))
            tried = await together(*answers)
        else:
            tried = [await _generate(state, generate, reader, cut)]
        while action in ("resample", "steer") and tried[-1].record.is_above and len(tried) <= tries:
            added = None if vector is None else _stronger(vector, len(tried))
            tried.append(await _generate(state, generate, reader, cut, added, **more))
        known = [{} if cut is None else rates(reader, cut, None, one.n_tokens) for one in tried]
        return _finish(gate, state, tried, turn, **(known[-1] if all(known) else {}))

    return _turn_by_turn(judged)


def _check(
    action: str, tries: int, steer: VectorLike | Mapping[str, Any] | None, prefer: str
) -> None:
    """Refuse arguments that do not go together."""
    if action not in get_args(GateAction):
        raise SpecError(f"action={action!r}; allowed are {', '.join(get_args(GateAction))}")
    if tries < 1:
        raise SpecError(f"tries={tries}; allowed is 1 or more")
    if prefer not in ("low", "high") or (prefer == "high" and action != "best"):
        raise SpecError(
            f"prefer={prefer!r} with action={action!r}; allowed are 'low' and, for 'best', 'high'"
        )
    if (action == "steer") != (steer is not None):
        raise SpecError(
            f"action={action!r} with steer={steer!r}; action 'steer' needs a vector, and the "
            "others take none"
        )


def _number_for_engine(
    probe: str, action: GateAction, threshold: float | str | None, inner: Solver | Agent | None
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
    return _Tried(made, record, None if reading is None else len(reading.rows.positions))


def _stronger(vector: Add, times: int) -> Add:
    """The vector at a multiple of its scale."""
    return vector.model_copy(update={"scale": vector.scale * times})


def _called(made: TaskState) -> tuple[str, ...]:
    """Names of the tools that a turn calls."""
    message = made.output.message if made.output.choices else None
    return tuple(call.function for call in (message.tool_calls or ())) if message else ()


def _finish(
    gate: Gate, state: TaskState, tried: list[_Tried], turn: int, **facts: Any
) -> TaskState:
    """Make what stands the state's answer."""
    decision = gate.decide(state, [one.record for one in tried], turn, **facts)
    adopt(state, tried[decision.chosen].state)
    return withhold(state, gate.replacement) if decision.outcome == "stopped" else state


def _in_engine(gate: Gate) -> Solver:
    """The gate whose probe runs in the server."""
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
