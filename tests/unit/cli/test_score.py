"""`inspect-lens score`: the numbers of the scorer, in a log of their own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import fsspec
import pytest
from inspect_ai.log import read_eval_log, write_eval_log

from inspect_lens.probe import Probe, ProbeCard, auroc, load_probe
from tests.kit.live_page import LOG
from tests.unit.cli.conftest import Run


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The log of the documentation; scores are written beside it."""
    folder = LOG.with_suffix(".lens")
    shutil.copytree(folder, tmp_path / folder.name)
    return Path(shutil.copy(LOG, tmp_path))


def test_a_finished_log_is_scored_as_by_the_scorer_that_ran_with_it(
    run: Run, log: Path, tmp_path: Path
) -> None:
    before, out = log.read_bytes(), tmp_path / "scored.eval"
    made = run.json("score", log, "--probe", "organism/deception-lr", "--out", out)
    assert log.read_bytes() == before
    (found,) = made["scores"]
    assert "of the positives" in found["means"]
    samples = read_eval_log(str(out)).samples or []
    pairs = [(s.scores["probe_score"], s.scores["deception_probe"]) for s in samples if s.scores]
    assert [a.value for a, _ in pairs] == pytest.approx([b.value for _, b in pairs], rel=1e-5)
    assert found["n_above"] == sum(a.answer == "above threshold" for a, _ in pairs)
    run("score", log, "--probe", "organism/none", "--out", tmp_path / "none.eval", code=4)


def test_a_wrong_name_is_one_line_that_says_what_to_do(run: Run, log: Path, tmp_path: Path) -> None:
    scored = ("score", log, "--probe", "organism/deception-lr")
    pipe = tmp_path / "pipe.eval"
    os.mkfifo(pipe)
    fsspec.filesystem("memory").pipe("/there.eval", b"")
    empty = read_eval_log(str(log))
    empty.samples, empty.status, empty.eval.config.sample_id = [], "cancelled", ["nope"]
    write_eval_log(empty, str(tmp_path / "empty.eval"))
    broken = read_eval_log(str(log))
    broken.status = "cancelled"
    write_eval_log(broken, str(tmp_path / "broken.eval"))
    part = "its eval has the status 'cancelled'; allowed is a log that is whole: inspect eval-retry"
    nothing = "of 8 samples (sample_id=['nope'] was asked) has the status 'cancelled'"
    asked = [
        (("score", tmp_path / "no.eval", "--probe", "x"), 4, "no.eval: there is no such log"),
        (("view", tmp_path / "no.eval"), 4, "no.eval: there is no such log; check the path"),
        ((*scored, "--out", "scored.txt"), 3, "--out=scored.txt: a log ends in .eval or .json"),
        ((*scored, "--out", "no://x.eval"), 4, "--out=no://x.eval: cannot be written (ValueError"),
        ((*scored, "--out", "memory://there.eval"), 3, "memory://there.eval: is there already"),
        ((*scored, "--out", f"file://{log}"), 3, "is the log that is scored"),
        (("view", log, "--out", "s3://b/x.html"), 3, "--out=s3://b/x.html: is an address; allowed"),
        (("view", pipe), 4, "pipe.eval: cannot be read as a log (it is no regular file)"),
        (
            ("score", pipe, "--probe", "organism/deception-lr"),
            4,
            "pipe.eval: cannot be read as a log (it is no regular file)",
        ),
        (("view", tmp_path / "empty.eval"), 4, nothing),
        (("score", tmp_path / "empty.eval", "--probe", "organism/deception-lr"), 4, nothing),
        (("score", tmp_path / "broken.eval", "--probe", "organism/deception-lr"), 4, part),
        ((*scored, "--role", "judge"), 3, "no call of this sample has that role"),
        (("view", log, "--tokenizer", "/nowhere"), 4, "cannot be loaded (there is no such folder)"),
        (("chat", "--base-url", "x", "--layers", "x"), 3, "allowed are 'all', 'none' and numbers"),
        (("doctor", "--model", "owner/name"), 4, "hf download owner/name --local-dir FOLDER"),
    ]
    for words, code, said in asked:
        _, error = run(*words, code=code)
        assert error.count("\n") == 1
        assert said in error


def test_a_file_that_is_not_there_is_named(run: Run, tmp_path: Path) -> None:
    _, error = run(
        "lens", "fit", "--kind", "tuned", "--model", "x", "--out", tmp_path / "l",
        "--texts", "nothing.jsonl", "--held-out", "nothing.jsonl", code=4,
    )  # fmt: skip
    assert error == "ArtifactError: nothing.jsonl: no such file or directory; check the path\n"


def test_each_probe_has_its_own_numbers_also_beside_earlier_scores_of_the_name(
    run: Run, log: Path, tmp_path: Path
) -> None:
    first, second = str(tmp_path / "first.eval"), str(tmp_path / "second.eval")
    opposite = -load_probe("organism/deception-lr").direction()[0]
    card = ProbeCard(name="test/other", layers=(4,), hidden=len(opposite))
    path = Probe.from_direction(opposite, card=card).save(tmp_path / "other")
    words = ["--probe", "organism/deception-lr", "--probe", path]
    probes = ("organism/deception-lr", "test/other")
    said = []
    for source, more, out in (
        (str(log), ("--pool", "max"), first),
        (first, ("--pool", "mean"), second),
    ):
        said.append(run.json("score", source, *words, *more, "--out", out)["scores"])
    assert [[one["name"] for one in each] for each in said] == [
        [f"{probe} max" for probe in probes], [f"{probe} mean" for probe in probes]
    ]  # fmt: skip
    samples = read_eval_log(second).samples or []
    for one in (one for each in said for one in each):
        found = [(sample.scores or {})[one["scorer"]] for sample in samples]
        assert {(s.metadata or {})["name"] for s in found} == {one["name"]}
        assert {(s.metadata or {})["threshold"] for s in found} == {one["threshold"]}
        labels = [sample.metadata["label"] for sample in samples]
        assert one["metrics"]["auroc"] == auroc(labels, [float(s.value) for s in found])  # type: ignore[arg-type]


def test_a_folder_is_its_newest_log(run: Run, log: Path, tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    _, err = run("view", folder, code=3)
    assert err.endswith("logs has no .eval file; name the folder of your logs\n")
    (folder / "2026-01-02.eval").write_text("older")
    newest = Path(shutil.copy(log, folder / "2026-01-03.eval"))
    shutil.copytree(log.with_suffix(".lens"), folder / log.with_suffix(".lens").name)
    out, err = run("view", folder)
    assert out.startswith(f"{newest.with_suffix('.html')}: 8 samples, ")
    assert f"the newest log of {folder} is {newest}\n" in err
