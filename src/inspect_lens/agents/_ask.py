"""Asking an activation oracle: the one protocol that tools and monitors need of it."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from inspect_ai.model import get_model

from inspect_lens.errors import SpecError
from inspect_lens.model import Activations
from inspect_lens.spec import CaptureSpec

__all__ = ["Ask", "Said", "choose_ask", "choose_said", "oracle_capture"]

Ask = Callable[[Activations, str], Awaitable[str]]
"""Answers a question in words about the activations of one call."""


class Said(NamedTuple):
    """An answer, apart from those that the same question gets without the activations."""

    answer: str | None
    """None where the call has no token to ask about."""
    controls: Mapping[str, str] = {}
    """By control; none of a function of the caller's."""

    def text(self) -> str:
        """All of it for a reader: the answer first, the controls in a line below."""
        if self.answer is None:
            return "There is no token to ask about."
        if not self.controls:
            return self.answer
        controls = "; ".join(f"{name}: {said!r}" for name, said in self.controls.items())
        return f"{self.answer}\nWithout these activations it says: {controls}"


def choose_ask(
    ask: Ask | None,
    oracle: str | None,
    *,
    layers: int | float | Sequence[int] | None = None,
    role: str | None = None,
) -> Ask:
    """What answers questions for a reader: as `choose_said`, as one text."""
    said = choose_said(ask, oracle, layers=layers, role=role)
    if ask is not None:
        return ask

    async def answer(activations: Activations, question: str) -> str:
        return (await said(activations, question)).text()

    return answer


def choose_said(
    ask: Ask | None,
    oracle: str | None,
    *,
    layers: int | float | Sequence[int] | None = None,
    role: str | None = None,
) -> Callable[[Activations, str], Awaitable[Said]]:
    """What answers questions: the caller's own function, or an oracle of `inspect_lens.oracle`."""
    if (ask is None) == (oracle is None):
        raise SpecError(
            f"ask={ask!r}, oracle={oracle!r}; give one of them: the name of an activation oracle, "
            "or a function that is awaited with activations and a question"
        )
    if ask is not None:
        given = ask

        async def asked(activations: Activations, question: str) -> Said:
            return Said(await given(activations, question))

        return asked
    # By name: most who import this have no oracle.
    room = importlib.import_module("inspect_lens.oracle")
    loaded = room.load_oracle(oracle)
    room.plan_asking("What is it?", loaded, layers=layers)  # refuse a wrong layer at once

    async def answered(activations: Activations, question: str) -> Said:
        model = get_model() if role is None else get_model(role=role)
        answers: list[Any] = await room.ask_oracle(
            activations, question, loaded, model=model, layers=layers
        )
        return Said(answers[0].answer, answers[0].controls) if answers else Said(None)

    return answered


def oracle_capture(
    oracle: str, *, layers: int | float | Sequence[int] | None = None
) -> CaptureSpec:
    """What a call has to capture, so that an oracle can be asked about it."""
    room = importlib.import_module("inspect_lens.oracle")
    shown = importlib.import_module("inspect_lens.oracle._shown")
    plan = room.plan_asking("What is it?", oracle, layers=layers)
    chosen: tuple[int, ...] = shown.choose_layers(plan.oracle.config, layers, None)
    return CaptureSpec(layers=chosen, positions=plan.positions)
