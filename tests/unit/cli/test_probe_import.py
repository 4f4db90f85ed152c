"""`inspect-lens probe import`: from a file of lie-detectors to a folder with a card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from inspect_lens._cli._main import app
from inspect_lens.probe import load_probe
from tests.kit.lie_detectors import FOLDER, LAYER


def run(*args: str) -> Any:
    made = CliRunner().invoke(app, ["probe", "import", str(FOLDER), *args])
    if made.exception is not None and not isinstance(made.exception, SystemExit):
        raise made.exception
    assert made.exit_code == 0, made.output
    return made.output


def test_a_published_probe_becomes_one_of_ours(tmp_path: Path) -> None:
    out = str(tmp_path / "lies")
    found = json.loads(
        run("--out", out, "--name", "organism/lies", "--checkpoint", "lr.pt", "--json")
    )
    probe = load_probe(out)
    assert (found["sha256"], found["layers"]) == (probe.sha256, [LAYER])
    assert probe.card.follow_up is not None
    assert found["follow_up"]["question"] == probe.card.follow_up.question
    text = run("--out", out, "--name", "organism/lies", "--checkpoint", "mlp.pt",
               "--kind", "apollo", "--layer", "2")  # fmt: skip
    assert "layer 2" in text
    assert "as AISI lie-detectors states of Alpaca" in text
    assert "Not stated" in text
