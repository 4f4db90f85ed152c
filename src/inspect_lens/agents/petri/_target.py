"""A target for Petri that captures and can be steered; otherwise Petri's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from inspect_ai.agent import Agent, AgentState, agent
from inspect_ai.model import (
    CachePolicy,
    ChatMessageAssistant,
    GenerateConfig,
    Model,
    ModelOutput,
    get_model,
)
from inspect_petri.target import TOOL_RESULT, ExitSignal, TargetContext

from inspect_lens.model import lens_config, lens_scope
from inspect_lens.model._request import NamedVector, as_steering, parse_capture, read_body
from inspect_lens.model._scores import (
    Asked,
    ProbeLike,
    ask_probes,
    including,
    note_refused,
)
from inspect_lens.spec import Add, CaptureSpec

from ._tools import STEER


@agent(name="lens_target")
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

    Returns:
        The agent, for `audit(target=...)`.

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
    captured = (
        capture if asked.capture is None else including(parse_capture(capture), asked.capture)
    )
    lens_config(capture=captured, steer=list(first), base=given)  # refuse wrong specs at once

    async def execute(state: AgentState, context: TargetContext) -> AgentState:
        target = get_model(model) if model is not None else get_model(role="target")
        generate = context.replayable(target.generate, surface_errors=True)
        vectors = first
        note_refused(asked)
        try:
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
                with _watched(target, asked):
                    state.output = await generate(
                        input=state.messages,
                        tools=context.tools,
                        config=_turn_config(target, given, captured, vectors),
                        cache=context.scoped_cache(cache),
                    )
                state.messages.append(state.output.message)
                await _answer(state, context, state.output)
        except ExitSignal:
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


def _watched(target: Model, asked: Asked) -> AbstractContextManager[None]:
    """The scope in which the engine runs probes of a turn."""
    return lens_scope(probes=asked.uses, model=target) if asked.uses else nullcontext()


def _turn_config(
    target: Model,
    given: GenerateConfig,
    capture: Any,
    vectors: tuple[Add, ...],
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
