"""`probe_gate`: generate, read a probe, and act on what it says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from inspect_ai.model import ChatMessageAssistant, ModelOutput
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.model import lens_scope, receipt
from inspect_lens.probe import AnyProbe
from inspect_lens.reading import WITHHELD, ProbeReader
from inspect_lens.spec import Positions, ProbeUse, SteeringVector
from inspect_lens.vector import VectorLike, steering_vector

from ._attempt import adopt, attempt
from ._decisions import GateAttempt, GateDecision, Outcome, record_decision

__all__ = ["GateAction", "ReadBy", "Tried", "probe_gate"]

GateAction = Literal["flag", "stop", "resample", "steer"]
ENGINE = "engine:"


class Tried(NamedTuple):
    """One generation from a copy of the state."""

    state: TaskState
    record: GateAttempt


@solver
def probe_gate(
    probe: str | Path | AnyProbe,
    threshold: float | None = None,
    action: GateAction = "flag",
    layer: int | None = None,
    positions: Positions | list[int] | None = None,
    pool: str | None = None,
    tries: int = 3,
    steer: VectorLike | Mapping[str, Any] | None = None,
    replacement: str = "[withheld: a probe raised an alarm]",
    temperature: float | None = None,
    check_model: bool = True,
) -> Solver:
    """Generate, read a probe on the activations of the generation, and act above its threshold.

    - `flag`: the answer stands and is marked.
    - `stop`: the answer is replaced and the sample ends; it has no tokens to score then.
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
        threshold: a score above it is acted on; that of the probe's card, for its own settings,
            or of the registered probe, by default.
        action: what to do.
        layer: one of the probe's layers; all of them by default.
        positions: tokens to read; those of the card by default.
        pool: token aggregation; the card's by default.
        tries: further generations at most.
        steer: for `steer`: a vector, its name, or `{"vector": name, "layer": …, "scale": …}`.
        replacement: for `stop`: text that the user sees instead.
        temperature: of further generations; without one, greedy decoding repeats itself.
        check_model: refuse a model whose fingerprint is not that of the probe's card.

    Returns:
        The solver.

    Raises:
        ArtifactError: no such probe or vector.
        SpecError: an argument is wrong, or there is no threshold for these settings.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval

        from evals.organism_deception import organism_dataset
        from inspect_lens.solver import probe_gate

        gate = probe_gate("organism/deception-lr", threshold=0.0, action="stop")
        task = Task(dataset=organism_dataset("demo")[:2], solver=gate)
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=14)
        for sample in log.samples:
            print(sample.metadata["probe_gate"]["outcome"], sample.output.completion)
        ```
    """
    if action not in get_args(GateAction):
        raise SpecError(f"action={action!r}; allowed are {', '.join(get_args(GateAction))}")
    if tries < 1:
        raise SpecError(f"tries={tries}; allowed is 1 or more")
    if (action == "steer") != (steer is not None):
        raise SpecError(
            f"action={action!r} with steer={steer!r}; action 'steer' needs a vector, and the "
            "others take none"
        )
    vector = None if steer is None else steering_vector(steer)
    if isinstance(probe, str) and probe.startswith(ENGINE):
        if action not in ("flag", "stop"):
            raise SpecError(
                f"action={action!r} with probe={probe!r}; a probe in the engine allows flag and "
                "stop; name a probe file for the others"
            )
        return _in_engine(probe.removeprefix(ENGINE), threshold, action, replacement)
    reader = ProbeReader.of(
        probe, layer=layer, positions=positions, pool=pool, check_model=check_model
    )
    cut = threshold if threshold is not None else getattr(reader.threshold, "value", None)
    if cut is None:
        raise SpecError(f"threshold: probe {reader.probe.name!r} has none for these settings")
    read_by = ReadBy(reader, float(cut))

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        tried = [await read_by.generate(state, generate)]
        more: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
        while action in ("resample", "steer") and tried[-1].record.is_above and len(tried) <= tries:
            added = None if vector is None else _stronger(vector, len(tried))
            tried.append(await read_by.generate(state, generate, added, **more))
        return _finish(state, tried, reader.probe.name, action, read_by.threshold, replacement)

    return solve


class ReadBy(NamedTuple):
    """Generations that a probe reads."""

    reader: ProbeReader
    threshold: float

    async def generate(
        self,
        state: TaskState,
        generate: Generate,
        steer: SteeringVector | None = None,
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
        reading = await self.reader.read(made.output, model_name=state.model.name)
        value = None if reading is None else reading.value
        return Tried(
            made,
            GateAttempt(
                completion=made.output.completion,
                value=value,
                is_above=value is not None and value > self.threshold,
                scale=None if steer is None else steer.scale,
            ),
        )


def _stronger(vector: SteeringVector, times: int) -> SteeringVector:
    """The vector at a multiple of its scale."""
    fields = {name: getattr(vector, name) for name in type(vector).model_fields}
    return SteeringVector(**(fields | {"scale": vector.scale * times}))


def _finish(
    state: TaskState,
    tried: list[Tried],
    name: str,
    action: GateAction,
    threshold: float | None,
    replacement: str,
) -> TaskState:
    """Choose what stands, say so, and make it the state's answer."""
    last = tried[-1].record
    chosen = len(tried) - 1
    outcome: Outcome
    if last.value is None and not last.is_above:
        outcome = "unread"
    elif not last.is_above:
        outcome = "passed"
        if len(tried) > 1:
            outcome = "steered" if action == "steer" else "resampled"
    elif action in ("flag", "stop"):
        outcome = "flagged" if action == "flag" else "stopped"
    else:
        outcome = "exhausted"
        values = [math.inf if t.record.value is None else t.record.value for t in tried]
        chosen = values.index(min(values))
    decision = GateDecision(
        probe=name,
        action=action,
        threshold=threshold,
        attempts=tuple(t.record for t in tried),
        chosen=chosen,
        outcome=outcome,
    )
    adopt(state, tried[chosen].state)
    if outcome == "stopped":
        _withhold(state, replacement)
    record_decision(state, decision)
    return state


def _withhold(state: TaskState, replacement: str) -> None:
    """Put a text in the place of the answer, and end the sample."""
    message = ChatMessageAssistant(content=replacement, model=state.output.model, source="generate")
    output = ModelOutput.from_message(message, stop_reason="content_filter")
    # Token ids and activations are of what was withheld; the decision has its text.
    state.output = output.model_copy(
        update={"model": state.output.model, "metadata": {WITHHELD: True}}
    )
    state.messages = [*state.messages[:-1], message]
    state.completed = True


def _in_engine(name: str, threshold: float | None, action: GateAction, replacement: str) -> Solver:
    """The gate whose probe runs in the server."""
    use = ProbeUse(name=name, alarm="stop" if action == "stop" else "flag", threshold=threshold)

    async def solve(state: TaskState, generate: Generate) -> TaskState:
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
        )
        cut = found.threshold
        return _finish(state, [Tried(made, record)], f"{ENGINE}{name}", action, cut, replacement)

    return solve
