"""Lines of a streamed sweep give back the sweep, and say where they were cut off."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from inspect_lens._base.http import json_bytes
from inspect_lens._patching.sweep import (
    EventLines,
    FloorFound,
    SweepSpec,
    events_of,
    gather,
    specs_of,
    sweep,
    to_body,
)
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.patch import PatchSweep, patch_sweep
from tests.kit.toy_runs import ToyRuns

SPEC = SweepSpec(
    clean="The river Talmo is in", corrupted="The river Velosh is in", answer=" Verun", foil=" Sar"
)


def lines_of(spec: SweepSpec) -> list[str]:
    made = EventLines()
    lines = [made.line(event) for event in sweep(ToyRuns(), spec)]
    return [json_bytes(line).decode() for line in (*lines, made.end())]


@pytest.mark.parametrize("foil", [" Sar", None])
def test_lines_are_the_sweep_to_the_bit(foil: str | None) -> None:
    spec = SweepSpec(clean=SPEC.clean, corrupted=SPEC.corrupted, answer=" Verun", foil=foil)
    found, wanted = gather(events_of(lines_of(spec))), gather(sweep(ToyRuns(), spec))
    assert found.to_json() == wanted.to_json()
    np.testing.assert_array_equal(found.logprob, wanted.logprob)


def test_cells_without_a_number_do_not_end_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    def logprobs(self: ToyRuns, runs: Sequence[Any], *args: Any) -> Iterator[Any]:
        yield from ((i, (math.nan, -math.inf)) for i in range(len(runs)))

    monkeypatch.setattr(ToyRuns, "logprobs", logprobs)
    found = gather(events_of(lines_of(SPEC)))
    assert np.isnan(found.logprob).all()
    assert found.foil_logprob is not None
    assert np.isneginf(found.foil_logprob).all()


def test_the_floor_comes_before_the_first_cell_and_only_rises() -> None:
    start, floor, *rest = sweep(ToyRuns(), SPEC)
    assert isinstance(start, PatchSweep)
    assert isinstance(floor, FloorFound)
    floors = [event.floor for event in (floor, *rest) if isinstance(event, FloorFound)]
    assert floors == sorted(floors)
    assert gather([start, floor, *rest]).floor == floors[-1]


def test_what_is_missing_is_an_error() -> None:
    lines = lines_of(SPEC)
    with pytest.raises(CaptureError, match="ended before the sweep did"):
        gather(events_of(lines[:-1]))
    with pytest.raises(SpecError, match="11 cells of 12 came"):
        gather(events_of([line for k, line in enumerate(lines) if k != 5]))
    error = json.dumps({"error": {"message": "the engine is gone", "code": 500}})
    with pytest.raises(CaptureError, match="could not end it: the engine is gone"):
        gather(events_of([*lines[:4], error]))
    with pytest.raises(CaptureError, match=r"not a JSON object: '\[1, 2\]'"):
        gather(events_of([*lines[:4], "[1, 2]"]))
    with pytest.raises(CaptureError, match="not JSON"):
        gather(events_of([*lines[:4], "<html>"]))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layers": range(2), "positions": np.array([-1]), "alpha": 1, "window": 1},
        {"source": "rows", "rows": np.full((3, 4, 6), np.float32(0.1)), "positions": [3, 4, 5, 6]},
        {"clean": [1, 2], "corrupted": np.array([1, 3]), "answer": 4, "foil": 5},
    ],
)
def test_a_body_says_what_the_arguments_say(changes: dict[str, Any]) -> None:
    fields = {name: getattr(SPEC, name) for name in SweepSpec.__dataclass_fields__} | changes
    model, (read,) = specs_of(json.loads(json.dumps(to_body(SweepSpec(**fields), "m"))))
    assert model == "m"
    for name, value in fields.items():
        if value is None:
            assert getattr(read, name) is None
        else:
            np.testing.assert_array_equal(getattr(read, name), np.asarray(value), err_msg=name)


def test_a_wrong_site_is_named_by_its_field_in_the_body() -> None:
    with pytest.raises(SpecError, match=r"^sites\[1\]='nowhere'; allowed are resid_pre"):
        specs_of(to_body(SPEC, "m") | {"sites": ["resid_post", "nowhere"]})


def test_only_a_server_runs_a_sweep_for_a_client() -> None:
    asked: dict[str, Any] = {"clean": "a", "corrupted": "b", "answer": " c"}
    with pytest.raises(SpecError, match="allowed are requests, server"):
        patch_sweep(None, **asked, over="nowhere")
    with pytest.raises(SpecError, match="needs a LensClient"):
        patch_sweep(ToyRuns(), **asked, over="server")
