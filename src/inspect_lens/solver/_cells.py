"""Cells of a sweep: one prompt under several edits at once, each a generation of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from inspect_ai.log import transcript
from inspect_ai.model import get_model
from inspect_ai.scorer import Scorer, value_to_float
from inspect_ai.solver import Generate, TaskState
from inspect_ai.util import span

from inspect_lens.errors import SpecError
from inspect_lens.model import lens_scope
from inspect_lens.model.request._inherited import steering_around
from inspect_lens.reading import CellKind, CellScores, SteeringCell, SteeringCells
from inspect_lens.spec import EditBase, SteeringVector

from ._attempt import adopt, gather

__all__ = ["BASELINE", "CellDone", "CellPlan", "SweepRun", "refuse_steered"]


class CellPlan(NamedTuple):
    """One generation that a sweep is going to make."""

    kind: CellKind
    vector: str | None
    layer: int | None
    scale: float
    steer: SteeringVector | None = None
    edits: Sequence[EditBase] = ()
    note: str = ""
    """What the span says beside vector, layer and scale."""

    @property
    def where(self) -> str:
        """For the name of the span."""
        if self.kind == "baseline":
            return "unsteered"
        layer = "" if self.layer is None else f", layer {self.layer}"
        return f"{self.vector}{layer}, scale {self.scale:g}{self.note}"


BASELINE = CellPlan("baseline", None, None, 0.0)
"""The answer that nothing changes."""


class CellDone(NamedTuple):
    """What became of a plan."""

    cell: SteeringCell
    value: float | None
    state: TaskState


class SweepRun(NamedTuple):
    """The cells of one sample."""

    asker: str
    """Name of the solver."""
    state: TaskState
    generate: Generate
    scorer: Scorer | None
    """Scores each cell where it is generated, if there is one."""
    capture: Any = None

    async def cells(self, plans: Sequence[CellPlan]) -> list[CellDone]:
        """Generate all of them at the same time.

        Args:
            plans: the cells.

        Returns:
            What became of each, in order.
        """

        def run(plan: CellPlan) -> Any:
            return lambda: self.cell(plan)

        return await gather([run(plan) for plan in plans])

    async def cell(self, plan: CellPlan) -> CellDone:
        """One generation, in a span of its own."""
        async with span(f"{plan.kind}: {plan.where}", type="steering_cell"):
            edits = list(plan.edits) or None
            with lens_scope(steer=plan.steer, edits=edits, capture=self.capture):
                made = await self.generate(deepcopy(self.state))
            cell = SteeringCell(
                vector=plan.vector,
                layer=plan.layer,
                scale=plan.scale,
                kind=plan.kind,
                completion=made.output.completion,
                message_id=made.output.message.id if made.output.choices else None,
            )
            value = None if self.scorer is None else await _value(self.scorer, made)
            if self.scorer is not None:
                transcript().info({"value": value}, source=f"inspect_lens/{self.asker}")
        return CellDone(cell, value, made)

    def keep(self, done: Sequence[CellDone]) -> TaskState:
        """Write the cells into the sample's store; the first one's answer stands.

        Args:
            done: all cells, the baseline first.

        Returns:
            The state of the sample.
        """
        self.state.store_as(SteeringCells).cells = [d.cell for d in done]
        if self.scorer is not None:
            self.state.store_as(CellScores).values = [d.value for d in done]
        return adopt(self.state, done[0].state)


def refuse_steered(asker: str, what: str, instead: str) -> None:
    """Refuse to call an answer unsteered that would be steered.

    Args:
        asker: solver, for the message.
        what: is asked for, up to the words "an unsteered answer".
        instead: what steers on top.

    Raises:
        SpecError: the config of the task or of the model, or a scope around, steers or edits.
    """
    if (around := steering_around(get_model())) is not None:
        raise SpecError(
            f"{asker}: {what} an unsteered answer, and {around}; take that out, or, to steer on "
            f"top of it, use {instead}"
        )


async def _value(scorer: Scorer, state: TaskState) -> float | None:
    score = await scorer(state, state.target)
    if score is None:
        return None
    value = float(value_to_float()(score.value))
    return value if math.isfinite(value) else None
