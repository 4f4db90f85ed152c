"""`inspect-lens view`: output, exit codes, whole files."""

from __future__ import annotations

import json
from pathlib import Path

from tests.kit.page import read_page
from tests.kit.planted_log import TOKENIZER, plant_log, planted_probe
from tests.unit.cli.conftest import Run


def test_the_command_writes_a_page_and_says_what_it_holds(run: Run, tmp_path: Path) -> None:
    planted = plant_log(tmp_path / "logs", planted_probe(tmp_path), n=3)
    log, page = planted.log.location, tmp_path / "page.html"
    options = ("--tokenizer", TOKENIZER, "--out", page, "--limit", 2)
    out, err = run("view", log, *options, "--json")
    made = json.loads(out)
    assert err == ""
    assert made["n_samples"] == len(read_page(page).blocks) == 2
    assert made["path"] == str(page)
    assert made["nbytes"] == page.stat().st_size
    assert made["series"][0] == "t/p"

    out, _ = run("view", log, *options)
    assert out.startswith(f"{page}: 2 samples, 2 calls, ")

    before = page.read_bytes()
    _, err = run("view", log, *options, "--probe", "t/none", code=4)
    assert "not found" in err
    assert page.read_bytes() == before, "a page that fails leaves the old one"
    assert not list(tmp_path.glob(".*.tmp"))
    held = Path(log).read_bytes()
    _, err = run("view", log, "--out", log, code=3)
    assert f"--out={log}: a page ends in .html" in err
    assert Path(log).read_bytes() == held
    _, err = run("view", tmp_path / "no.eval", "--json", code=4)
    assert json.loads(err)["error"] == "ArtifactError"
