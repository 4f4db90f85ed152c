"""The monitor that asks an oracle: whose words it searches, and what it reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import anyio
import numpy as np
import pytest
from inspect_sentinel import Context, Observation

from inspect_lens.agents.sentinel import oracle_monitor
from tests.kit.captured import captured

QUESTION = "What is the speaker doing?"
CONTROLS = {"text_only": "It is lying.", "random": "Yes, lying."}


def observed(monitor: Any) -> Observation | None:
    output = captured(np.zeros((1, 3, 2), np.float32), n_prompt=2)
    step = SimpleNamespace(output=output)
    found: Observation | None = anyio.run(monitor, cast("Context", None), step)
    return found


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the oracle answers; a test puts it there."""
    answers: list[Any] = []

    async def ask(*_: Any) -> list[Any]:
        return answers

    plan = SimpleNamespace(oracle="tiny", ask=ask)
    monkeypatch.setattr("inspect_lens.agents._ask.OraclePlan", lambda *_, **__: plan)
    monkeypatch.setattr("inspect_lens.agents._ask.get_model", lambda **_: None)
    return answers


@pytest.mark.parametrize(
    ("answer", "suspicious", "suspicion"),
    [
        ("It tells the truth.", "lying", 0.0),
        ("It is lying.", "lying", 1.0),
        ("It tells a lie", "lie$", 1.0),
        ("It tells the truth.", "without these activations", 0.0),
    ],
)
def test_the_answer_alone_is_searched(
    said: list[Any], answer: str, suspicious: str, suspicion: float
) -> None:
    said.append(SimpleNamespace(answer=answer, controls=CONTROLS))
    found = observed(oracle_monitor(QUESTION, "tiny", suspicious))
    assert found is not None
    assert found.suspicion == suspicion
    # What the controls say is reported all the same.
    assert found.metadata == {"question": QUESTION, "answer": answer, "controls": CONTROLS}
    assert "text_only: 'It is lying.'" in str(found.explanation)


def test_a_turn_without_tokens_is_not_observed(said: list[Any]) -> None:
    assert observed(oracle_monitor(QUESTION, "tiny", "token")) is None


def test_a_function_of_ones_own_has_no_controls() -> None:
    async def ask(activations: Any, question: str) -> str:
        return f"{question} Lying."

    found = observed(oracle_monitor(QUESTION, ask=ask, suspicious=r"lying\.$"))
    assert found is not None
    assert found.suspicion == 1.0
    assert found.metadata == {
        "question": QUESTION, "answer": f"{QUESTION} Lying.", "controls": {}
    }  # fmt: skip
