"""`probe_resample`: the best of several answers, by a probe."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens.errors import SpecError
from inspect_lens.probe import AnyProbe
from inspect_lens.reading import ProbeReader
from inspect_lens.spec import Positions

from ._attempt import adopt, gather
from ._decisions import GateDecision, record_decision
from ._gate import ReadBy, turn_by_turn

__all__ = ["probe_resample"]


@solver
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
        layer: one of the probe's layers; all of them, averaged, by default.
        positions: tokens to read; those of the card by default.
        pool: how token scores become one: `mean`, `last`, `max`, `top_k_mean:5`,
            `rolling_mean_max:10`, `sentence_mean_max`; the card's by default.
        selection: tokens among these positions by what they are: `answer`, `reasoning`,
            `tool_calls`, `assistant`, `prompt`, `last:K` or `regex:PATTERN`; the card's by default,
            "" for all.
        temperature: of the answers; without one, greedy decoding repeats itself.
        check_model: refuse a model whose fingerprint is not that of the card.

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
