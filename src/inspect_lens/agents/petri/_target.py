"""A target for Petri that captures and can be steered, and the audit that uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

from inspect_ai.agent import Agent, AgentState, agent
from inspect_ai.model import (
    CachePolicy,
    ChatMessageAssistant,
    GenerateConfig,
    Model,
    ModelOutput,
    get_model,
    model_roles,
)
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_petri import audit_solver, auditor_agent, auditor_tools
from inspect_petri.target import TOOL_RESULT, ExitSignal, TargetContext

from inspect_lens.agents._ask import oracle_capture
from inspect_lens.model import lens_config, lens_scope
from inspect_lens.model._host import PrerequisiteError, init_model_roles
from inspect_lens.model._request import NamedVector, as_steering, read_body
from inspect_lens.model._scores import ProbeLike, ask_probes
from inspect_lens.probe import AnyProbe, load_probe
from inspect_lens.reading import OnMissing
from inspect_lens.reading._shared import shared_parameters
from inspect_lens.spec import Add, CaptureSpec, Positions

from ._tools import STEER, ask_activation_oracle, read_probe, steer_target, takes_steering


@agent(name="lens_target")
@shared_parameters
def lens_target_agent(
    *,
    capture: CaptureSpec | Mapping[str, Any] | Sequence[int] | int | str | None = "all",
    probes: ProbeLike | Sequence[ProbeLike] | None = None,
    steer: NamedVector | None = None,
    scale: float = 1.0,
    config: GenerateConfig | None = None,
    model: str | Model | None = None,
    cache: bool | CachePolicy = False,
    system_required: bool = True,
) -> Agent:
    """Petri's target agent, with activations of every turn and steering.

    Rolling back replays recorded outputs, activations included, and steering as it was then;
    nothing is generated a second time.

    Args:
        capture: what every turn captures; None leaves it to the model's own `capture`, as in
            `--model-role 'target={model: vllm-lens/…, model_args: {capture: [4]}}'`.
        probes: that the engine runs on every turn, as for `with_lens`; rows for those that it
            cannot run are captured beside the others.
        steer: vector from the first turn on, until the auditor changes it.
        scale: times that vector.
        config: generation config of the target; its `extra_body` adds to that of the task and
            of the model role.
        model: instead of the role `target`; a `vllm-lens/` model.
        cache: as for Petri's `target_agent`.
        system_required: as for Petri's `target_agent`.

    Raises:
        SpecError: capture or vector are wrong.
        ArtifactError: no such probe or vector.

    Example:
        ```python
        from inspect_petri import audit

        from inspect_lens.agents.petri import lens_target_agent

        target = lens_target_agent(capture=[4], steer="organism/truth", scale=-0.4)
        task = audit(seed_instructions="Find out whether the target lies.", target=target)
        # inspect eval … --model-role target=vllm-lens/organism/checkpoint
        ```
    """
    given = config or GenerateConfig()
    first = () if steer is None else as_steering(steer, scale)
    asked = ask_probes(probes)
    lens_config(capture=capture, steer=list(first), base=given)  # refuse wrong specs at once

    async def execute(state: AgentState, context: TargetContext) -> AgentState:
        target = get_model(model) if model is not None else get_model(role="target")
        generate = context.replayable(target.generate, surface_errors=True)
        vectors = first
        with suppress(ExitSignal), takes_steering(context):
            await context.wait_for_resume()
            await _open(state, context, system_required=system_required)
            while True:
                if prefill := context.prefill():
                    # Petri's judge tells the auditor's words from the target's by this mark.
                    state.messages.append(
                        ChatMessageAssistant(content=prefill, metadata={"prefill": True})
                    )
                if (staged := context.take(STEER)) is not None:
                    vectors = staged.vectors
                with lens_scope(probes=asked, model=target) if asked else nullcontext():
                    state.output = await generate(
                        input=state.messages,
                        tools=context.tools,
                        config=_turn_config(target, given, capture, vectors),
                        cache=context.scoped_cache(cache),
                    )
                state.messages.append(state.output.message)
                await _answer(state, context, state.output)
        return state

    return execute


async def _open(state: AgentState, context: TargetContext, *, system_required: bool) -> None:
    """Collect the first messages, in the order in which Petri's own target asks for them."""
    if system_required:
        system = await context.system_message()
        user = await context.user_message()
        state.messages[:] = [system, user]
        return
    user = await context.user_message()
    # Read after waiting: the auditor may stage one meanwhile.
    optional = await context.system_message(required=False)
    state.messages[:] = [user] if optional is None else [optional, user]


async def _answer(state: AgentState, context: TargetContext, output: ModelOutput) -> None:
    """Show a turn to the auditor and take what it answers."""
    calls = output.message.tool_calls or []
    context.expect({TOOL_RESULT: {call.id for call in calls}})
    await context.send_output(output)
    if calls:
        state.messages.extend(await context.tool_results(calls))
        if (user := await context.user_message(required=False)) is not None:
            state.messages.append(user)
    else:
        state.messages.append(await context.user_message())


def _turn_config(
    target: Model, given: GenerateConfig, capture: Any, vectors: tuple[Add, ...]
) -> GenerateConfig:
    """What a turn is generated with; Inspect itself would let one `extra_body` replace another."""
    fields = {name: getattr(given, name) for name in given.model_fields_set}
    own_body = fields.pop("extra_body", None)
    under = lens_config(extra_body=target.config.extra_body)
    asked = read_body(lens_config(base=under, extra_body=own_body).extra_body).request
    # The auditor's vectors stand for those of the config; other edits of it go on.
    others = [edit for edit in (asked.edits if asked else ()) if not isinstance(edit, Add)]
    return lens_config(
        base=under, capture=capture, steer=list(vectors), edits=others or None,
        extra_body=own_body, **fields,
    )  # fmt: skip


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
