"""Generations from a copy of a state, of which one may stand."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from inspect_ai.model import ChatMessageAssistant, execute_tools
from inspect_ai.solver import Generate, TaskState
from inspect_ai.tool import ToolDef, ToolFunction
from inspect_ai.util import span

from inspect_lens.errors import SpecError
from inspect_lens.reading._calls import ids_of, record_standing


async def attempt(state: TaskState, generate: Generate, **config: Any) -> TaskState:
    """Generate one turn from a copy, so that the state can be tried again.

    Tool calls are not carried out: what an attempt does that is not kept cannot be taken back.
    """
    async with span("attempt", type="attempt"):
        return await generate(deepcopy(state), tool_calls="none", **config)


def adopt(state: TaskState, made: TaskState) -> TaskState:
    """Let an attempt stand; the state keeps its own store, which is the sample's."""
    record_standing(ids_of(made.messages))
    state.messages = made.messages
    state.output = made.output
    state.completed = made.completed
    return state


async def run_tools(state: TaskState) -> bool:
    """Carry out the tool calls of the turn that stands, as `generate()` does."""
    last = state.messages[-1] if state.messages else None
    if state.completed or not isinstance(last, ChatMessageAssistant) or not last.tool_calls:
        return False
    made = await execute_tools(state.messages, state.tools)
    state.messages.extend(made.messages)
    if made.output is not None:
        state.output = made.output
    if isinstance(state.tool_choice, ToolFunction):
        state.tool_choice = "auto"  # or the model would be made to call it over and over
    return not state.completed


def refuse_tools(state: TaskState, asker: str, instead: str) -> None:
    """Refuse to generate several times what may call tools."""
    if state.tools:
        names = ", ".join(ToolDef(tool).name for tool in state.tools)
        raise SpecError(
            f"{asker}: tools are set ({names}), and each of its generations would carry out its "
            f"calls, side effects included; allowed is a task without tools; {instead}"
        )
