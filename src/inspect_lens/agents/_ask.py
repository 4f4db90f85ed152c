"""Asking an activation oracle: the one protocol that tools and monitors need of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from inspect_ai.model import get_model

from inspect_lens.errors import SpecError
from inspect_lens.model import Activations
from inspect_lens.oracle._ask import OraclePlan
from inspect_lens.oracle._send import choose_layers
from inspect_lens.spec import CaptureSpec

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
) -> Callable[[Activations, str], Awaitable[Said]]:
    """What answers questions: the caller's own function, or an oracle."""
    if (ask is None) == (oracle is None):
        raise SpecError(
            f"ask={ask!r}, oracle={oracle!r}; give one of them: the name of an activation oracle, "
            "or a function that is awaited with activations and a question"
        )
    # Refuse a wrong name or layer at once.
    plan = None if oracle is None else OraclePlan("What is it?", oracle, layers=layers)

    async def answered(activations: Activations, question: str) -> Said:
        if plan is None:
            assert ask is not None
            return Said(await ask(activations, question))
        model = get_model() if role is None else get_model(role=role)
        asked = OraclePlan(question, plan.oracle, layers=layers)
        answers = await asked.ask(activations, model)
        return Said(answers[0].answer, answers[0].controls) if answers else Said(None)

    return answered


def oracle_capture(
    oracle: str, *, layers: int | float | Sequence[int] | None = None
) -> CaptureSpec:
    """What a call has to capture, so that an oracle can be asked about it."""
    plan = OraclePlan("What is it?", oracle, layers=layers)
    chosen = choose_layers(plan.oracle.config, layers, None)
    return CaptureSpec(layers=chosen, positions=plan.positions)
