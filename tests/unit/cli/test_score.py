"""`inspect-lens score`: the numbers of the scorer, in a log of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from inspect_ai.log import read_eval_log

from inspect_lens._cli import main
from tests.kit.live_page import LOG


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["inspect-lens", "score", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_a_finished_log_is_scored_as_by_the_scorer_that_ran_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, out = LOG.read_bytes(), tmp_path / "scored.eval"
    words = (LOG, "--probe", "organism/deception-lr", "--out", out, "--json")
    code, printed, _ = run(monkeypatch, capsys, *words)
    assert code == 0
    assert LOG.read_bytes() == before
    (found,) = json.loads(printed)["scores"]
    assert "of the positives" in found["means"]
    samples = read_eval_log(str(out)).samples or []
    pairs = [(s.scores["probe_score"], s.scores["deception_probe"]) for s in samples if s.scores]
    assert [a.value for a, _ in pairs] == pytest.approx([b.value for _, b in pairs], rel=1e-5)
    assert found["n_above"] == sum(a.answer == "above threshold" for a, _ in pairs)
    assert run(monkeypatch, capsys, tmp_path / "no.eval", "--probe", "x")[0] == 4
    assert run(monkeypatch, capsys, LOG, "--probe", "organism/none", "--out", out)[0] == 4
