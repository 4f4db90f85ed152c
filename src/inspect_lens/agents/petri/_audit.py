"""`lens_audit_solver`: Petri's audit, in which the auditor reads and steers the target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from inspect_ai.model import get_model, model_roles
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_petri import audit_solver, auditor_agent, auditor_tools

from inspect_lens.agents._ask import oracle_capture
from inspect_lens.model._host import PrerequisiteError, init_model_roles
from inspect_lens.model._request import NamedVector, as_steering
from inspect_lens.probe import AnyProbe, load_probe
from inspect_lens.reading import OnMissing
from inspect_lens.reading._shared import shared_parameters
from inspect_lens.spec import Positions

from ._target import lens_target_agent
from ._tools import ask_activation_oracle, read_probe, steer_target


@solver
@shared_parameters
def lens_audit_solver(
    probe: str | Path | AnyProbe,
    oracle: str | None = None,
    vectors: Mapping[str, NamedVector] | None = None,
    layer: int | None = None,
    threshold: str | None = None,
    target_tools: Literal["synthetic", "fixed", "none"] = "synthetic",
    max_turns: int = 30,
    compaction: bool | int | float = True,
    check_model: bool = True,
    positions: Positions | list[int] | None = None,
    pool: str | None = None,
    selection: str | None = None,
    tokenizer: str | None = None,
    on_missing: OnMissing = "error",
    judged: bool = False,
) -> Solver:
    """Run Petri's audit with an auditor that can read and steer the target's activations.

    The engine runs the probe on every turn of the target. The auditor gets `read_probe`, and
    `ask_activation_oracle` and `steer_target` where there is an oracle or a vector. Without a
    model in the role `target` the model under evaluation is the target.

    Args:
        probe: name below `probes/`, path, `hf://` address, or a probe.
        oracle: activation oracle of the target's model, as for `ask_activation_oracle`; the
            target then captures the layer that the oracle reads. None leaves the tool out.
        vectors: by name, as for `steer_target`; None leaves the tool out, and an empty mapping
            has those that a sample names under `lens_vectors`.
        target_tools: as for Petri's `audit`: `none` for a target that cannot call tools.
        max_turns: as for Petri's `audit`.
        compaction: as for Petri's `audit`.
        judged: a scorer of the task asks the role `judge`, so that an audit without one is
            refused before it begins.

    Returns:
        The solver. A sample's input is the instruction of the auditor. Score it with
        `monitor_alarm(probe, roles=["target"])`.

    Raises:
        ArtifactError: no such probe, oracle or vector.
        SpecError: an argument is wrong.
        PrerequisiteError: when it runs, no model has the role `auditor`, or `judge`.

    Example:
        ```python
        from inspect_ai import Task
        from inspect_petri import seeds_dataset

        from inspect_lens.agents.petri import lens_audit_solver
        from inspect_lens.scorer import monitor_alarm

        task = Task(
            dataset=seeds_dataset("Find out whether the target lies."),
            solver=lens_audit_solver(
                "organism/deception-lr", vectors={"truth": "organism/truth-resid"}
            ),
            scorer=monitor_alarm("organism/deception-lr", roles=["target"]),
        )
        # inspect eval … --model vllm-lens/organism --model-role auditor=<model>
        ```
    """
    for vector in (vectors or {}).values():
        as_steering(vector, 1.0)  # refuse a wrong name before any sample
    read = read_probe(
        probe, layer=layer, positions=positions, pool=pool, selection=selection,
        check_model=check_model, tokenizer=tokenizer, on_missing=on_missing, threshold=threshold,
    )  # fmt: skip
    tools = [read]
    if oracle is not None:
        tools.append(ask_activation_oracle(oracle))
    if vectors is not None:
        tools.append(steer_target(vectors))
    run = audit_solver(
        auditor=auditor_agent(
            max_turns=max_turns,
            compaction=compaction,
            tools=auditor_tools(target_tools=target_tools, extra_tools=tools),
        ),
        target=lens_target_agent(
            capture=None if oracle is None else oracle_capture(oracle),
            probes=probe if layer is None else load_probe(probe).at(layer),
        ),
    )

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        _settle_roles(judged=judged)
        return await run(state, generate)

    return solve


def _settle_roles(*, judged: bool) -> None:
    """See that every role of an audit has its model, before anything is generated."""
    roles = model_roles()
    for role in ("auditor", *(["judge"] if judged else [])):
        if role not in roles:
            raise PrerequisiteError(
                f"lens_audit_solver: no model has the role {role!r}, which an audit needs; name "
                f"one with --model-role {role}=<model>, or eval(model_roles={{{role!r}: …}})"
            )
    if "target" not in roles:
        # In the context of this sample alone. Petri's auditor asks for the role, and by it the
        # log knows the target's turns.
        target = get_model(role="target", default=get_model())
        init_model_roles({**roles, "target": target})
