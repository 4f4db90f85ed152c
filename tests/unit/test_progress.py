"""What a long task says while it runs, where nobody looks at a terminal."""

from __future__ import annotations

import pytest

from inspect_lens._base import progress


def test_a_log_file_gets_a_line_now_and_then_with_an_estimate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with progress.progress_bar("fitting a tuned lens", total=40, done=0, show=True) as step:
        for _ in range(40):
            clock[0] += 12.0
            step()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "fitting a tuned lens: 3 of 40, about 7 min left"
    assert lines[-1] == "fitting a tuned lens: 39 of 40, about 12 s left"
    assert len(lines) == 13


def test_the_first_of_a_batch_give_no_estimate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with progress.progress_bar("pairs", total=200, done=0, show=True, at_once=64) as step:
        for seconds in (60.0, *[0.0] * 63, 31.0):
            clock[0] += seconds
            step()
    assert capsys.readouterr().err.splitlines() == [
        "pairs: 1 of 200",
        "pairs: 65 of 200, about 3 min left",
    ]


@pytest.mark.parametrize("show", [True, False])
def test_what_is_done_soon_writes_nothing(show: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress_bar("patch", total=3, done=0, show=show) as step:
        for _ in range(3):
            step()
    assert capsys.readouterr().err == ""
