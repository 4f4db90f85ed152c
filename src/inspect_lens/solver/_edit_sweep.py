"""`edit_sweep`: one prompt under several variants of edits at once, beside control edits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from inspect_ai.scorer import Scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver
from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, field_validator

from inspect_lens.errors import SpecError
from inspect_lens.spec import EditBase, parse_edits

from ._attempt import refuse_tools
from ._cells import BASELINE, CellPlan, SweepRun, refuse_steered

__all__ = ["EditVariant", "edit_sweep"]

Edits = EditBase | Mapping[str, Any] | Sequence[EditBase | Mapping[str, Any]]
"""One edit or several, each an object or its JSON form with `op`."""


class EditVariant(BaseModel):
    """One way in which a prompt is answered: edits under a name.

    Example:
        ```python
        import numpy as np

        from inspect_lens.solver import EditVariant
        from inspect_lens.spec import Ablate

        rng = np.random.default_rng(0)
        variants = [
            EditVariant(
                name="ablated",
                edits=Ablate(direction=rng.standard_normal(256), layers=range(6)),
                control=control,
            )
            for control in (False, True)
        ]
        assert [variant.control for variant in variants] == [False, True]
        ```
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: str = Field(min_length=1)
    """What was done. A control has the name of the variant that it stands beside."""
    edits: tuple[SerializeAsAny[EditBase], ...] = Field(min_length=1)
    """In the order in which they act."""
    dose: float = Field(default=1.0, allow_inf_nan=False)
    """How much of it, where variants of one name differ in that: a strength, or a value."""
    control: bool = False
    """Whether it is something of the same kind that should do nothing, such as a random
    direction. Controls of one variant are averaged."""

    @field_validator("edits", mode="before")
    @classmethod
    def _edits(cls, value: Any) -> Any:
        return parse_edits(value)


@solver
def edit_sweep(
    variants: Mapping[str, Edits] | Sequence[EditVariant | Mapping[str, Any]],
    scorer: Scorer | None = None,
    capture: dict[str, Any] | list[int] | None = None,
) -> Solver:
    """Answer each prompt once unedited and once per variant, all at the same time.

    A variant is anything that edits can do: a direction ablated everywhere, a head switched off, a
    vector added behind a gate. Every answer is a request of its own. The answers are in the
    sample's store as cells (`inspect_lens.reading.SteeringCells`), where the scorers
    `edit_effects` and `dose_response` find them, also in a finished log. What stands as the
    sample's answer is the unedited one.

    Args:
        variants: edits by name; or `EditVariant`s or their fields, which may also be controls, and
            differ in their dose.
        scorer: scores each answer where it is generated; `edit_effects` then needs none.
        capture: layers, or the fields of a `CaptureSpec`, to capture in every cell.

    Returns:
        The solver. The log holds a reference with hashes for each edit; tensors are written once
        beside it.

    Raises:
        SpecError: no variants, an edit that is wrong, variants of one name and dose, or a control
            of none; when it runs, tools are set, whose side effects every variant would repeat; or
            the task's config, the model's or a scope around steers or edits already.
        UnsupportedError: when it runs, the model has no lens.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.scorer import includes

        from evals.organism_deception import organism_dataset
        from inspect_lens.scorer import edit_effects
        from inspect_lens.solver import EditVariant, edit_sweep
        from inspect_lens.spec import Ablate
        from inspect_lens.vector import load_vector

        truth = load_vector("organism/truth")
        variants = [
            EditVariant(
                name="ablated",
                edits=Ablate(direction=one.raw(4), layers=range(6), site="attn_out"),
                control=one is not truth,
            )
            for one in (truth, truth.random_control(0))
        ]
        task = Task(
            dataset=organism_dataset("demo")[:2],
            solver=edit_sweep(variants),
            scorer=edit_effects(includes()),
        )
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=14)
        found = log.results.scores[0].metrics
        assert {"unedited", "ablated", "ablated_effect", "ablated_random_effect"} <= set(found)
        ```
    """
    made = _variants(variants)
    # Controls behind all others, so that the log reads in this order.
    plans = [BASELINE] + [
        CellPlan("random" if one.control else "vector", one.name, None, one.dose, edits=one.edits)
        for one in sorted(made, key=lambda one: one.control)
    ]

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        refuse_steered(
            "edit_sweep", "its variants are compared with", "with_edits in a task for each"
        )
        refuse_tools(
            state,
            "edit_sweep",
            "put use_tools behind the sweep, or use with_edits with inner=react(), in a task for "
            "each variant",
        )
        run = SweepRun("edit_sweep", state, generate, scorer, capture)
        return run.keep(await run.cells(plans))

    return solve


def _variants(
    given: Mapping[str, Edits] | Sequence[EditVariant | Mapping[str, Any]],
) -> list[EditVariant]:
    """What was given, checked against each other."""
    rows: list[Any] = list(given) if not isinstance(given, Mapping) else [
        {"name": name, "edits": edits} for name, edits in given.items()
    ]  # fmt: skip
    try:
        made = [r if isinstance(r, EditVariant) else EditVariant.model_validate(r) for r in rows]
    except SpecError:
        raise
    except ValueError as error:
        raise SpecError(
            f"variants: {error}; allowed are edits by name, or EditVariant(name=…, edits=…)"
        ) from None
    own = Counter((one.name, one.dose) for one in made if not one.control)
    if not own:
        raise SpecError("variants: none that is not a control; allowed is one at least")
    if twice := [at for at, n in own.items() if n > 1]:
        raise SpecError(
            f"variants: name and dose {twice[0]} are there twice; answers are told apart by these, "
            "so give another name or dose, or control=True"
        )
    if lost := [(one.name, one.dose) for one in made if (one.name, one.dose) not in own]:
        raise SpecError(
            f"variants: control {lost[0]} has no variant to stand beside; allowed are name and "
            f"dose of one: {sorted(own)}"
        )
    return made
