"""Which turns a scan reads, and which model may read them again."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
from inspect_ai.event import Event, InfoEvent, ModelEvent, SpanBeginEvent
from inspect_ai.model import GenerateConfig, get_model

from inspect_lens.agents.scout import Turns, read_turns, reading_model, summarise
from inspect_lens.errors import NotCapturedError
from inspect_lens.model._host import PrerequisiteError
from inspect_lens.reading import ProbeReader
from inspect_lens.reading import read_turns as read_calls
from tests.kit.mock_evals import call, planted_probe
from tests.kit.repository import ROOT
from tests.kit.scripted import calls

READER = ProbeReader.of(ROOT / "probes/organism/deception-lr")


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_BASE_URL", raising=False)


def test_one_process_may_start_a_server() -> None:
    assert reading_model("vllm-lens/org/model-a") is not None


def test_several_processes_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    with pytest.raises(PrerequisiteError, match="max_processes=1"):
        reading_model("vllm-lens/org/model-b")
    # Unless there is one for all of them.
    monkeypatch.setenv("VLLM_BASE_URL", "http://127.0.0.1:9/v1")
    assert reading_model("vllm-lens/org/model-c") is not None


def test_a_model_that_cannot_be_captured_is_refused_when_it_is_named() -> None:
    with pytest.raises(PrerequisiteError, match="cannot be captured"):
        reading_model("mockllm/model")


def test_a_scans_own_model_may_be_any(monkeypatch: pytest.MonkeyPatch) -> None:
    other: Any = get_model("mockllm/model")
    monkeypatch.setattr("inspect_lens.agents.scout.get_model", lambda *_: other)
    assert reading_model(None) is None


def test_nothing_read_is_no_value() -> None:
    assert "2 calls captured nothing" in str(
        summarise(Turns([], 2, 0), combine="max", reader=READER).explanation
    )
    assert summarise(Turns([], 0, 1), combine="max", reader=READER).value is None


@pytest.mark.anyio
async def test_tool_calls_that_captured_nothing_are_missing_and_not_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    again: Any = get_model("mockllm/model")
    monkeypatch.setattr("inspect_lens.agents.scout.reading_model", lambda *_: again)
    event = ModelEvent(
        model="mockllm/model", input=[], tools=[], tool_choice="auto", config=GenerateConfig(),
        output=calls(("send", {"text": "x"})),
    )  # fmt: skip
    strict = ProbeReader.of(planted_probe())
    with pytest.raises(NotCapturedError, match="tool calls alone"):
        await read_turns(strict, read_calls([event]), [event], model=None)
    found = await read_turns(
        ProbeReader.of(planted_probe(), on_missing="skip"), read_calls([event]), [event], model=None
    )
    assert (found.read, found.n_missing, found.n_without_tokens) == ([], 1, 0)


@pytest.mark.anyio
async def test_what_was_only_compared_is_no_turn() -> None:
    probe = planted_probe()
    cells = SpanBeginEvent(id="cell", parent_id=None, type="steering_cell", name="a cell")
    made = [call([value, value]) for value in (1.0, 9.0)]
    inside = [
        ModelEvent(
            span_id=span, model="mockllm/model", input=[], tools=[], tool_choice="auto",
            config=GenerateConfig(), output=output,
        )
        for span, output in zip((None, "cell"), made, strict=True)
    ]  # fmt: skip
    reader = ProbeReader.of(probe, source="captured", check_model=False)
    events: list[Event] = [inside[0], cells, inside[1]]
    found = await read_turns(reader, read_calls(events), events, model=None)
    assert [turn.reading.value for turn in found.read] == [1.0]
    stands = InfoEvent(source="inspect_lens/standing", data={"message_ids": [made[1].message.id]})
    events.append(stands)
    found = await read_turns(reader, read_calls(events), events, model=None)
    assert [turn.reading.value for turn in found.read] == [1.0, 9.0]
