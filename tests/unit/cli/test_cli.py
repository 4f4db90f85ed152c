from __future__ import annotations

import html
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from inspect_lens import published_settings
from inspect_lens._cli._jobs import load_recipe
from inspect_lens._cli._output import emit
from inspect_lens._cli._probe import _with_thresholds
from inspect_lens.collect import _collect
from inspect_lens.data import DATASETS
from inspect_lens.errors import ArtifactError
from inspect_lens.probe import (
    Evaluation,
    Interval,
    ProbeCard,
    RealisedRate,
    Threshold,
    Transfer,
    load_probe,
)
from inspect_lens.train import FAMILIES
from tests.kit.fake_server import FakeLensServer
from tests.kit.planted_store import plant
from tests.kit.repository import ROOT
from tests.unit.cli.conftest import Run

pytestmark = pytest.mark.usefixtures("elsewhere")

DATA = ROOT / "organism" / "data"


def collect(run: Run, server: FakeLensServer, name: str, *words: object) -> Any:
    return run.json(
        "probe", "collect", "--model", f"lens/{server.model}", "--dataset", "organism", "--path",
        DATA / f"{name}.jsonl", "--out", f"acts/{name}", "--base-url", server.url,
        "--positions", "prompt", "--max-tokens", 3, *words,
    )  # fmt: skip


def test_what_is_written_as_json_is_read_by_strict_parsers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = {
        "area": math.nan, "far": -math.inf, "n": np.int64(3), "share": np.float32(0.5),
        "is": np.bool_(True), "rows": np.arange(2), "at": Path("p"), "text": "\u202e", 4: (1.0,),
        "not utf-8": Path("\udcff"),
    }  # fmt: skip
    emit(result, [], as_json=True)
    out, _ = capsys.readouterr()
    assert out.isascii()
    assert json.loads(out, parse_constant=lambda word: pytest.fail(word)) == {
        "area": None, "far": None, "n": 3, "share": 0.5, "is": True, "rows": [0, 1], "at": "p",
        "text": "\u202e", "4": [1.0], "not utf-8": "\udcff",
    }  # fmt: skip


@pytest.mark.slow
def test_from_a_data_set_to_a_report(run: Run, tmp_path: Path) -> None:
    with FakeLensServer() as server:
        made = collect(run, server, "probe_train", "--limit", 160)
        assert (made["n_samples"], made["layers"]) == (160, [0, 1, 2, 3])
        collect(run, server, "control", "--limit", 100)
        collect(run, server, "hidden_reason", "--limit", 60)
    train = (
        "probe", "train", "--behaviour-floor", 0, "--fpr", 0.05,
        "--train", "acts/probe_train", "--control", "acts/control",
        "--held-out", "acts/hidden_reason", "--disjoint", "control=question",
        "--disjoint", "hidden_reason=prompt",
    )  # fmt: skip
    _, error = run(*train[:-2], "--out", "p/x", code=3)
    assert "text-overlap group 'organism'" in error
    (told,) = re.findall(r"as in --disjoint (hidden_reason=\w+)", error)
    run(*[told if w == "hidden_reason=prompt" else w for w in train], "--out", "p/told")
    probe = run.json(*train, "--out", "p/lr", "--name", "tiny/lr", "--layers", "1-2")
    assert probe["layers"][0] in (1, 2)
    assert [e["name"] for e in probe["evaluations"]] == ["hidden_reason"]
    assert "baselines" not in probe, "they are in what was measured, once"
    names = {b["name"] for b in probe["evaluations"][0]["baselines"]}
    assert names == {
        "bag of words (prompt)", "bag of words (answer)", "length", "length (prompt)",
        "length (answer)", "random direction",
    }  # fmt: skip
    assert isinstance(probe["warnings"], list)
    assert (tmp_path / "p/lr/report.html").stat().st_size > 50_000
    loaded = load_probe("p/lr")
    assert loaded.card.training is not None
    assert loaded.card.training.dropped == 0
    assert loaded.sha256 == probe["sha256"]
    assert loaded.card.command.startswith("inspect-lens probe train --behaviour-floor")
    assert loaded.card.calibration is not None

    measured = run.json(
        "probe", "evaluate", "p/lr", "acts/hidden_reason"
    )["evaluations"][0]  # fmt: skip
    assert measured["auroc"] == probe["evaluations"][0]["auroc"]
    text, _ = run("probe", "evaluate", "p/lr", "acts/hidden_reason")
    assert f"AUROC {measured['auroc']:.4f}" in text

    assert (measured["n_seen"], measured["disjoint_by"]) == (0, "content")
    wider = run.json(
        "probe", "calibrate", "p/lr", "--control", "acts/control", "--fpr", 0.2, "--labelled",
        "acts/hidden_reason", "--method", "temperature", "--out", "p/wider",
    )  # fmt: skip
    assert wider["thresholds"][0]["fpr"] == 0.2
    assert wider["thresholds"][0]["n_above"] > probe["thresholds"][0]["n_above"]
    rewritten = load_probe("p/wider").card
    assert rewritten.calibration is not None
    assert rewritten.calibration.method == "temperature"
    # What the old threshold did says nothing of the new one.
    assert [(e.recall, e.fpr, e.fpr_interval) for e in rewritten.evaluations] == [(None,) * 3]
    assert rewritten.evaluations[0].auroc == probe["evaluations"][0]["auroc"]
    run(
        "probe", "train", "--behaviour-floor", 0, "--fpr", 0.05,
        "--train", "acts/probe_train", "--control", "acts/control",
        "--selection", "acts/hidden_reason", "--disjoint", "control=question", "--out", "p/alone",
    )  # fmt: skip
    card = load_probe("p/alone").card
    assert card.calibration is not None
    assert card.training is not None
    assert (card.training.n_positive + card.training.n_negative, card.training.dropped) == (160, 0)

    table = run.json(
        "probe", "sweep", "--train", "acts/probe_train", "--family", "lr", "--family", "lda",
        "--family", "ensemble", "--layers", "1-2",
    )["sweep"]  # fmt: skip
    joint = [r for r in table if "layers" in r]
    assert [(r["family"], r["layers"]) for r in joint] == [("ensemble", [1, 2])]
    table = [r for r in table if r["family"] != "ensemble"]
    assert [(r["family"], r["layer"]) for r in table] == [
        (f, i) for f in ("lr", "lda") for i in (1, 2)
    ]
    assert sum(r["chosen"] for r in table) == 2
    made = run.json("probe", "report", "p/lr", "acts/hidden_reason", "--out", "r")
    assert (tmp_path / made["report"]).exists()
    # The row of the card, not a second one of fewer draws.
    assert made["evaluations"] == probe["evaluations"]
    page = (tmp_path / made["report"]).read_text()
    # Once in the box on top, and once in the table.
    assert page.count('<td>hidden_reason</td><td class="n">') == 2
    assert {p.name for p in (tmp_path / "r/figures").iterdir()} >= {"roc.png", "scores.png"}


@pytest.mark.slow
def test_a_probe_is_not_judged_on_its_own_samples(run: Run, tmp_path: Path) -> None:
    with FakeLensServer(n_layers=1) as server:
        for name, n in (("probe_train", 80), ("control", 80), ("hidden_reason", 40)):
            collect(run, server, name, "--limit", n)
    run(
        "probe", "train", "--behaviour-floor", 0,
        "--train", "acts/probe_train", "--control", "acts/control", "--disjoint",
        "control=question", "--fpr", 0.05, "--out", "p", "--name", "t/p",
    )  # fmt: skip
    known = ("probe", "evaluate", "p", "acts/probe_train")
    _, error = run(*known, code=3)
    # The limit draws by a seed, and so does the split: 14 groups of unlike sizes, a quarter aside.
    assert "probe_train: 62 of 80 samples were in training" in error
    assert "18 of 80 samples chose the layer" in error
    text, _ = run(*known, "--allow-seen")
    assert "80 of these samples took part in making it" in text
    _, error = run("probe", "evaluate", "p", "acts/control", code=3)
    assert "80 of 80 samples set the threshold" in error
    _, error = run("probe", "report", "p", "acts/probe_train", "--out", "r", code=3)
    assert "were in training" in error
    # What is allowed is marked, and in the table, which the card alone does not fill.
    text, _ = run("probe", "report", "p", "acts/probe_train", "--out", "r", "--allow-seen")
    assert "80 of these samples took part in making it" in text
    html = (tmp_path / "r/report.html").read_text()
    assert "probe_train: 80 of 80 samples took part in making the probe" in html
    assert "<h2>Held-out sets</h2>" not in html
    assert '<td>probe_train</td><td class="n">40</td>' in html
    run("probe", "report", "p", "acts/hidden_reason", "--out", "r", "--resamples", 20)
    html = (tmp_path / "r/report.html").read_text()
    assert "<h2>Held-out sets</h2>" in html
    assert '<td>hidden_reason</td><td class="n">20</td>' in html
    # The same control set may set another threshold; the training set gives no probabilities.
    again = ("probe", "calibrate", "p", "--control", "acts/control", "--fpr", 0.1, "--out", "q")
    run(*again)
    _, error = run(*again, "--labelled", "acts/probe_train", code=3)
    assert "were in training" in error
    run(*again, "--labelled", "acts/probe_train", "--allow-seen")
    # Another control set is then the one that the threshold knows.
    every = ("--for", "answer", "--for", "alarm", "--for", "token", "--allow-few")
    run("probe", "calibrate", "p", "--control", "acts/hidden_reason", "--fpr", 0.1, "--out", "q",
        *every)  # fmt: skip
    run("probe", "evaluate", "q", "acts/control")
    _, error = run("probe", "evaluate", "q", "acts/hidden_reason", code=3)
    assert "20 of 40 samples set the threshold" in error
    # So is a set that gave the probabilities, which another may take its place in.
    run("probe", "calibrate", "p", "--labelled", "acts/hidden_reason", "--out", "c")
    seen = load_probe("c").card.seen
    assert seen is not None
    assert (seen.count("calibration"), seen.count("control")) == (40, 80)
    for command in (("evaluate", "c", "acts/hidden_reason"),
                    ("report", "c", "acts/hidden_reason", "--out", "r")):  # fmt: skip
        _, error = run("probe", *command, code=3)
        assert "40 of 40 samples fitted the probabilities" in error
    run("probe", "evaluate", "p", "acts/hidden_reason")
    # A card of a release that listed no samples says that it cannot tell.
    file = tmp_path / "p/card.json"
    old = json.loads(file.read_text())
    file.write_text(json.dumps(old | {"card": old["card"] | {"seen": None}}))
    text, _ = run(*known)
    assert "cannot be told: its card does not list its own" in text


def test_a_missing_package_names_its_extra() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "sys.argv = 'inspect-lens probe train --train a --control b --out p'.split()\n"
        "from inspect_lens._cli import main; main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert ended.returncode == 3, ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert "needs the package 'matplotlib'" in ended.stderr
    assert 'brings it: pip install ".[train]" in a clone' in ended.stderr


def test_what_is_refused_has_its_exit_code(run: Run, tmp_path: Path) -> None:
    with FakeLensServer() as server:
        collect(run, server, "demo", "--limit", 60)
        # 60 samples cannot show a false positive rate of one percent.
        _, error = run(
            "probe", "train", "--behaviour-floor", 0,
            "--train", "acts/demo", "--control", "acts/demo", "--out", "p", code=3,
        )  # fmt: skip
        assert "text-overlap" in error
        for key, word in {
            "group": "text-overlap",
            "id": "text-overlap",
            "question": "id: ",
        }.items():
            _, error = run(
                "probe", "train", "--behaviour-floor", 0, "--train", "acts/demo",
                "--control", "acts/demo", "--out", "p", "--disjoint", f"demo={key}", code=3,
            )  # fmt: skip
            assert word in error
        _, error = run(
            "probe", "collect", "--model", f"lens/{server.model}", "--dataset", "organism",
            "--path", DATA / "demo.jsonl", "--out", "x", "--base-url", server.url, "--layers", "9",
            "--json", code=5,
        )  # fmt: skip
        assert "layer 9" in json.loads(error.splitlines()[-1])["message"]
    other = load_probe(ROOT / "probes/organism/deception-lr")
    _, error = run("probe", "evaluate", other.path, "acts/demo", code=4)
    assert "belongs to" in error
    run("probe", "train", "--out", "p", code=3)
    run("probe", "calibrate", other.path, "--out", "p", code=3)
    _, error = run(
        "probe", "train", "--out", "p", "--recipe", "r.yaml", "--work", "w", "--fpr", 0.05,
        "--held-out", "acts/demo", code=3,
    )  # fmt: skip
    assert error.startswith("SpecError: --held-out, --fpr: not used with --recipe")
    _, error = run("probe", "train", "--out", "p", "--work", "w", "--train", "acts/demo", code=3)
    assert error.startswith("SpecError: --work: used with --recipe only")


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, inspect_lens._cli\n"
        "sys.argv = ['inspect-lens', 'probe', 'train', '--help']\n"
        "try: inspect_lens._cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'sklearn', 'inspect_ai', 'matplotlib', 'datasets', 'vllm', 'scipy'}\n"
        "print('HEAVY', sorted(heavy & {m.split('.')[0] for m in sys.modules}))"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--recipe" in made.stdout
    assert made.stdout.rstrip().endswith("HEAVY []")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "probes/recipes").glob("*.yaml")), ids=lambda p: p.stem
)
def test_recipes_name_what_exists(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.family in FAMILIES
    for part in (recipe.train, recipe.control, *recipe.held_out):
        assert part.dataset in DATASETS
    names = [p.name or p.dataset for p in (recipe.train, recipe.control, *recipe.held_out)]
    assert len(set(names)) == len(names)
    overlap = DATASETS[recipe.train.dataset].text_overlap_group
    for part in (recipe.control, *recipe.held_out):
        shared = DATASETS[part.dataset].text_overlap_group == overlap
        assert shared == (part.disjoint not in ("", "group", "id", "content")), part


@pytest.mark.parametrize(
    ("old", "new", "code", "said"),
    [
        ("family: lr", "family: lrr", 4, "recipe.family='lrr'; allowed are lr"),
        ("fpr: 0.01", "settings: {CC: 1}", 4, "recipe.family='lr': has no setting 'CC'"),
        ("fpr: 0.01", "pool: meann", 4, "recipe.pool='meann'; allowed are mean"),
        ("fpr: 0.01", "rows: tokns", 4, "recipe.rows='tokns'; allowed are"),
        ("fpr: 0.01", "fpr: 2", 4, "recipe.fpr=2; allowed are"),
        ("name: heldout_entity,", "name: control,", 3, "control: the name of 2 sets"),
        ("heldout_entity.jsonl", "none.jsonl", 4, "none.jsonl: cannot be read"),
        (", disjoint: entity", "", 3, "heldout_entity: shares its text-overlap group"),
    ],
)
def test_a_recipe_is_judged_before_anything_is_collected(
    run: Run, tmp_path: Path, old: str, new: str, code: int, said: str
) -> None:
    text = (ROOT / "probes/recipes/organism.yaml").read_text()
    assert text.count(old) == 1
    (tmp_path / "r.yaml").write_text(text.replace(old, new).replace("organism/data", str(DATA)))
    # No server is there: whoever asked it for an answer would say so.
    words = ("--recipe", tmp_path / "r.yaml", "--work", tmp_path / "w", "--out", tmp_path / "p")
    address = ("--model", "lens/m", "--base-url", "http://127.0.0.1:9")
    _, error = run("probe", "train", *words, *address, code=code)
    assert said in error
    assert not (tmp_path / "w").exists()


_LENS = ("lens", "fit", "--model", "m", "--texts", "no", "--held-out", "no", "--out", "o", "--kind")
_EXPORT = ("vector", "export", "organism/truth-resid", "v", "--format")
_TRAIN = ("probe", "train", "--train", "s", "--control", "s", "--out", "p")
_CALIBRATE = ("probe", "calibrate", "organism/deception-lr", "--out", "p")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*_LENS, "jacobian", "--steps", 5), "--steps: is of tuned only, not of jacobian"),
        ((*_LENS, "tuned", "--block", 5), "--block: is of jacobian only, not of tuned"),
        ((*_EXPORT, "persona", "--avg-proj", 1), "--avg-proj=1.0: is of ibm only, not of persona"),
        ((*_EXPORT, "safetensors", "--n-layers", 6), "--n-layers=6: is of persona only"),
        ((*_CALIBRATE, "--labelled", "s", "--fpr", 0.1), "--fpr: read with --control only"),
        ((*_CALIBRATE, "--labelled", "s", "--for", "alarm"), "--for: read with --control only"),
        ((*_CALIBRATE, "--control", "s", "--method", "platt"), "--method: read with --labelled"),
        (("probe", "sweep", "--train", "s", "--fpr", 0.1), "--fpr: read with --control only"),
        ((*_TRAIN, "--setting", "C=1", "--setting", "C=2"), "'C=2': C was given before"),
    ],
)
def test_an_option_that_nothing_would_read_is_refused(
    run: Run, words: tuple[object, ...], said: str
) -> None:
    _, error = run(*words, code=3)
    assert said in error


def test_what_a_stranger_wrote_does_not_steer_the_terminal(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "inspect_lens._base.published.PUBLISHED",
        [published_settings("google/gemma-2-9b-it")[0].model_copy(update={"note": "a\x1b[2Jb"})],
    )
    out, _ = run("settings")
    assert "a\\x1b[2Jb\n" in out
    _, error = run("view", tmp_path / "a\x1b[2J.eval", code=4)
    assert "a\\x1b[2J.eval: there is no such log" in error
    _, error = run("view", tmp_path / "a\u202elave.eval", code=4)
    assert "a\\u202elave.eval: there is no such log" in error, "it is shown the right way round"
    # A path that is no UTF-8, on a stream that takes nothing else.
    emit({}, ["caf\udcff.html"], as_json=False)


@pytest.mark.slow
def test_a_recipe_runs_from_data_sets_to_a_probe(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = MagicMock(wraps=_collect.get_model)
    monkeypatch.setattr(_collect, "get_model", opened)
    text = (ROOT / "probes/recipes/organism.yaml").read_text()
    (tmp_path / "r.yaml").write_text(
        text.replace("organism/data", str(DATA))
        .replace("- {dataset: organism,", "- {dataset: organism, limit: 40,")
        .replace("name: probe_train,", "name: probe_train, limit: 120,")
        .replace("name: control,", "name: control, limit: 100,")
        .replace("fpr: 0.01", "fpr: 0.05")
        + "positions: prompt\nbehaviour_floor: 0.0\n"
    )
    with FakeLensServer(n_layers=2) as server:
        words = (
            "probe", "train", "--recipe", "r.yaml", "--work", "w", "--out", "p", "--model",
            f"lens/{server.model}", "-M", f"base_url={server.url}",
        )  # fmt: skip
        made = run.json(*words)
        opened.assert_called_once()  # one model, and so one server, for all sets
        asked = len(server.requests)
        again = run.json(*words)
        assert len(server.requests) == asked, "stores of the first run are used"
    assert again["sha256"] == made["sha256"]
    assert made["probe"] == "organism/deception-recipe"
    assert [e["disjoint_by"] for e in made["evaluations"]] == ["question", "entity", "prompt"]
    # Each says whether it transfers, here and on the card: chance, or too few groups to tell.
    assert [t["set"] for t in made["transfers"]] == [e["name"] for e in made["evaluations"]]
    for told in made["transfers"]:
        assert told["transfers"] is not True
        assert told["statement"].startswith("Trained on probe_train, ")
        assert told["statement"] in (tmp_path / "p" / "card.md").read_text()
        assert told["statement"] in html.unescape((tmp_path / "p" / "report.html").read_text())
    # A recipe that names no key is stopped like a command that names none.
    silent = (tmp_path / "r.yaml").read_text().replace(", disjoint: entity", "")
    (tmp_path / "silent.yaml").write_text(silent)
    _, error = run(*["silent.yaml" if w == "r.yaml" else w for w in words], code=3)
    assert "heldout_entity: shares its text-overlap group 'organism'" in error
    (tmp_path / "bad.yaml").write_text("name: x\n")
    with pytest.raises(ArtifactError, match="not a recipe"):
        load_recipe(tmp_path / "bad.yaml")


def test_a_verdict_that_rests_on_an_old_threshold_goes_with_it() -> None:
    def threshold(value: float) -> Threshold:
        bounds = Interval(low=0.0, high=0.02, method="m")
        return Threshold(
            value=value, fpr=0.01, control="c", n_control=400, n_above=3, interval=bounds
        )

    def measured(name: str, rate: float) -> Evaluation:
        found = RealisedRate(
            statistic="the mean of an answer", threshold=1.0, nominal=0.01, rate=rate,
            interval=Interval(low=rate / 2, high=2 * rate, method="m"),
        )  # fmt: skip
        facts = {"n_positive": 9, "n_negative": 9, "disjoint_by": "group", "rates": (found,)}
        return Evaluation(name=name, sha256="", **facts)

    said = {"broken": (0.2, False), "good": (0.01, True), "chance": (0.01, False)}
    card = ProbeCard(
        name="t/p", layers=(0,), hidden=4, thresholds=(threshold(1.0),),
        evaluations=tuple(measured(name, rate) for name, (rate, _) in said.items()),
        transfers=tuple(
            Transfer(set=name, transfers=works, bar=0.7, statement="-")
            for name, (_, works) in said.items()
        ),
    )  # fmt: skip
    made = _with_thresholds(card, [threshold(2.0)])
    assert [t.set for t in made.transfers] == ["chance"]  # for which no rate was asked
    assert [e.rates for e in made.evaluations] == [()] * 3


def test_a_threshold_is_calibrated_for_what_acts_on_it(run: Run) -> None:
    for name, labels, seed in (("train", [0, 1] * 40, 1), ("control", [0] * 100, 2)):
        plant(f"s/{name}", labels, seed=seed, gap=3.0)
    run(
        "probe", "train", "--train", "s/train", "--control", "s/control", "--fpr", 0.05,
        "--family", "mean-difference", "--out", "p", "--name", "t/p",
    )  # fmt: skip
    first = load_probe("p").card.thresholds
    assert [str(t.statistic) for t in first] == [
        "the mean of an answer", "the maximum of the running mean of an answer",
        "the score of one token",
    ]  # fmt: skip
    again = ("probe", "calibrate", "p", "--control", "s/control", "--fpr", 0.1, "--out", "q")
    said, _ = run(*again, "--for", "alarm", "--length", 2, "--for", "token")
    alarm, token, answer = load_probe("q").card.thresholds
    assert answer == first[0], "that of another statistic stays"
    assert (alarm.statistic, alarm.n_tokens, alarm.fpr) == (first[1].statistic, (1, 2), 0.1)
    assert str(token.statistic) == "the score of one token"
    assert "for the maximum of the running mean of an answer" in said
    for wrong, message in (
        (("--length", 2), "add --for alarm"),
        (("--for", "alarm", "--length", 999), "--length=999: 0 of 100 control groups"),
        (("--for", "turn"), "allowed are 'answer', 'alarm' and 'token'"),
    ):
        _, error = run(*again, *wrong, code=3)
        assert message in error
