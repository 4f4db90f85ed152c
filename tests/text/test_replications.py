"""The gallery: what its results must name, and that its verdicts follow the numbers."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from gallery.__main__ import main as gallery
from gallery._chart import Bar, Bars, Heat, Line, Lines, draw
from gallery._page import PAGES, _table, page
from gallery._replication import (
    RESULTS,
    DataFile,
    MissingDataError,
    Setting,
    Table,
    find_files,
    stem,
    work_folder,
)
from gallery.lies import HONEST, KINDS
from gallery.replications import REPLICATIONS
from inspect_lens.errors import SpecError
from organism._liar_splits import LIAR_DIR, eval_split
from tests.kit.child import ChildError
from tests.kit.figures._canvas import PALETTES
from tests.kit.real_models import REAL_MODELS
from tests.kit.repository import ROOT

STEMS = {
    stem(name, about, model): (name, model)
    for name, about in REPLICATIONS.items()
    for model in about.models
}
"""Of each result that there may be, its replication and model."""
RESULT_FILES = sorted(path.stem for path in RESULTS.glob("*.json"))


def result(file: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("file", RESULT_FILES)
def test_a_result_names_its_model_weights_and_data(file: str) -> None:
    name, model = STEMS[file]
    found, about = result(file), REPLICATIONS[name]
    assert found["model"] == REAL_MODELS[model].title
    assert found["weights"] == "dequantised from Q4 GGUF"
    assert len(found["sha256"]) == 64
    assert set(found["data"]) == {file.name for file in about.files}
    assert all(len(used["sha256"]) == 64 for used in found["data"].values())
    assert found["command"].startswith(f".venv/bin/python -m gallery {name} --model {model}")
    (on,) = (on for on, (*_, names) in PAGES.items() if name in names)
    page = (ROOT / "docs" / "replications" / f"{on}.md").read_text(encoding="utf-8")
    assert found["weights"] in page
    assert found["sha256"] in page
    assert f"replication-{file}-light.svg" in page
    assert f"arxiv.org/abs/{about.arxiv}" in page
    assert f"replications/{on}.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", list(REPLICATIONS))
def test_every_replication_has_a_result(name: str) -> None:
    assert name in RESULT_FILES


def verdict(name: str, **changed: Any) -> str:
    """Of a result in which some numbers are others."""
    numbers = copy.deepcopy(result(name)["numbers"])
    for path, value in changed.items():
        at = numbers
        *way, last = path.split("__")
        for key in way:
            at = at[key]
        at[last] = value
    return REPLICATIONS[name].show(numbers).verdict


def test_an_injection_that_is_as_long_as_its_control() -> None:
    assert "a part is the injection" in verdict("injection", auroc_padded=[0.7, 0.6, 0.8])
    assert "length alone" in verdict("injection", auroc_padded=[0.55, 0.45, 0.65])
    assert "sees the injection" in verdict("injection", auroc_padded=[0.9, 0.85, 0.95])
    nothing = {"auroc_padded": [0.5, 0.4, 0.6], "auroc_plain": [0.5, 0.4, 0.6]}
    assert "Neither is beyond chance" in verdict("injection", **nothing)


def test_files_that_are_not_there_are_all_named_with_their_sources(tmp_path: Path) -> None:
    wanted = [DataFile(f"{name}.json", f"somebody/{name}", "MIT") for name in ("facts", "words")]
    said = r"facts\.json \(from somebody/facts\), words\.json \(from somebody/words\)"
    for data, reason in ((tmp_path, "lacks them"), (None, "pass --data FOLDER")):
        with pytest.raises(MissingDataError, match=f"{said}; .*{reason}"):
            find_files(wanted, data)
    (tmp_path / "deep").mkdir()
    for file in wanted:
        (tmp_path / "deep" / file.name).write_text("[]")
    assert find_files(wanted, tmp_path)["words.json"] == tmp_path / "deep" / "words.json"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["refusal"], "pass --data FOLDER"),
        (
            ["lies", "--model", "gemma3-270m"],
            "lies runs on smollm2-135m, qwen2.5-coder-0.5b, and not on",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_a_model_is_made(
    asked: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = gallery([*asked, "--models", str(tmp_path / "m"), "--out", str(tmp_path / "o")])
    assert code == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("n", ["0", "-3"])
def test_less_than_one_sample_is_refused(n: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gallery(["languages", "--n", n])
    assert "at least 1 is needed" in capsys.readouterr().err


@pytest.mark.parametrize("error", [SpecError("holds another run"), ChildError("the log's end")])
def test_what_fails_in_a_run_is_said_in_one_line(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def measure(setting: Setting) -> dict[str, Any]:
        raise error

    monkeypatch.setattr("gallery._replication.make_real_model", lambda model, folder: folder)
    failing = replace(REPLICATIONS["languages"], measure=measure)
    monkeypatch.setitem(REPLICATIONS, "languages", failing)
    assert gallery(["languages", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"gallery: {error}\n"


def test_more_samples_than_there_are_are_refused(tmp_path: Path) -> None:
    setting = Setting("smollm2-135m", tmp_path, tmp_path, n=33)
    with pytest.raises(SpecError, match="--n 33: there are 32"):
        setting.count(16, 32)
    assert (setting.count(16, 33), replace(setting, n=None).count(16, 8)) == (33, 8)
    with pytest.raises(ValueError, match="300 rows of 'plain' are asked for"):
        eval_split("plain", topics="validation", prompts="validation", n=300)


def test_too_few_lies_to_train_on_are_refused_before_a_model_answers(tmp_path: Path) -> None:
    setting = Setting("smollm2-135m", tmp_path, tmp_path, n=15)
    with pytest.raises(SpecError, match=r"--n 15: .*16 or more"):
        REPLICATIONS["lies"].measure(setting)


def test_runs_that_differ_keep_their_activations_apart(tmp_path: Path) -> None:
    runs = [("smollm2-135m", None), ("smollm2-135m", 4), ("gemma3-270m", None)]
    assert len({work_folder(tmp_path, model, n) for model, n in runs}) == len(runs)


def test_a_page_says_of_a_run_what_is_in_its_result() -> None:
    """And nothing of the machine that committed results are of."""
    own = {key: value for key, value in result("lies").items() if key != "note"}
    about = REPLICATIONS["lies"]
    text = page("lies", about, {about.model: own}, figures=".", made="me")
    assert "cores" not in text
    assert "](../" not in text
    assert "server ran already" not in text
    by_hand = {about.model: own | {"note": "By hand."}}
    assert "seconds. By hand." in page("lies", about, by_hand, figures=".", made="me")


def test_a_set_without_lies_tells_nothing_of_transfer() -> None:
    """The honest answers of Qwen have none, so its cards say nothing of them."""
    numbers = result("lies-qwen2.5-coder-0.5b")["numbers"]
    found = numbers["probes"]["logistic"]["ordered"]
    assert found["sets"][HONEST]["n_positive"] == 0
    assert HONEST not in found["verdicts"]
    rows = [row for row in REPLICATIONS["lies"].show(numbers).tables[2].rows if HONEST in row]
    assert {row[-1] for row in rows} == {"too few lies"}


def test_a_page_of_two_models_has_them_side_by_side() -> None:
    about, own = REPLICATIONS["lies"], result("lies")
    other = copy.deepcopy(own) | {"model": "Other", "sha256": "0" * 64}
    role = "role, new topics"
    other["numbers"]["behaviour"][role]["reason"] |= {"lies": 31, "n": 40}
    other["numbers"]["probes"]["logistic"]["ordered"]["sets"][role]["auroc"] = 0.125
    alone, both = (
        page("lies", about, found, figures="f", made="me")
        for found in ({about.model: own}, {about.model: own, "other": other})
    )
    assert "side by side" not in alone
    rows = [line for line in both.splitlines() if line.startswith(f"| {role} | reason |")]
    lies = own["numbers"]["behaviour"][role]["reason"]["lies"]
    assert f"| {lies} of 50, " in rows[0]
    assert "| 31 of 40, " in rows[0]
    area = own["numbers"]["probes"]["logistic"]["ordered"]["sets"][role]["auroc"]
    first, second = (line for line in both.splitlines() if f"| ordered | {role} | " in line[:50])
    assert f"| {own['model']} | " in first
    assert f"| {area:.3f} [" in first
    assert "| Other | " in second
    assert "| 0.125 [" in second
    for found, file in ((own, "lies"), (other, "lies-other")):
        assert f"**{found['model']}.** A logistic probe" in both
        assert f"<summary>All tables of {found['model']}</summary>" in both
        assert f"(f/replication-{file}-light.svg#only-light)" in both
        assert f"(fingerprint `{found['sha256']}`)" in both


def test_charts_have_every_number_in_both_palettes() -> None:
    bars = Bars("t", "a", [Bar("g", "s", 0.25, 0.1, 0.4), Bar("g", "r", -0.5)], low=-1.0)
    heat = Heat("t", "a", "u", ["c"], ["r", "q"], [[0.25], [0.75]], middle=0.5)
    lines = Lines("t", "a", "u", [Line("s", [(0.0, 0.25), (1.0, 0.5)], [(0.2, 0.3), (0.4, 0.6)])])
    for palette in PALETTES:
        for chart, shown in ((bars, ("0.250", "-0.500")), (heat, ("0.250", "0.750")),
                             (lines, ("0.250", "0.500"))):  # fmt: skip
            svg = draw(chart, palette)
            ElementTree.fromstring(svg)
            assert all(number in svg for number in shown)


def test_negation_that_turns_a_probe_around_or_does_not() -> None:
    at = "auroc__logistic__cities__"
    assert "inversion is there" in verdict("truth", **{f"{at}neg_cities": [0.2, 0.1, 0.3]})
    assert "inversion is not there" in verdict("truth", **{f"{at}neg_cities": [0.8, 0.7, 0.9]})
    assert "neither inverted nor" in verdict("truth", **{f"{at}neg_cities": [0.5, 0.4, 0.6]})
    assert "nothing can carry over" in verdict("truth", **{f"{at}cities": [0.5, 0.4, 0.6]})


def test_the_matrix_of_truth_is_that_of_scikit_learn() -> None:
    numbers = result("truth")["numbers"]
    for trained, row in numbers["auroc"]["logistic"].items():
        for topic, (area, *_) in row.items():
            assert area == pytest.approx(numbers["plain"][trained][topic], abs=5e-4)


@pytest.mark.parametrize(
    ("ablated", "added", "said"),
    [
        (-0.2, 0.2, "Both effects are there"),
        (-0.2, -0.1, "Only ablation has an effect"),
        (0.1, 0.2, "Only addition has an effect"),
        (0.1, -0.1, "Neither effect is beyond chance"),
    ],
)
def test_refusal_by_the_ends_of_its_intervals(ablated: float, added: float, said: str) -> None:
    changed = {
        "rates__harmful_ablated_effect_high": ablated,
        "rates__harmless_added_effect_low": added,
    }
    assert said in verdict("refusal", **changed)


def test_an_early_site_is_in_the_mlps_or_is_not() -> None:
    numbers = result("fact")["numbers"]
    zero = [[0.01] * 6 for _ in numbers["layers"]]
    early = [list(row) for row in zero]
    early[1][2] = 0.2
    effects = {"resid_post": early, "mlp_out": early, "attn_out": zero}
    assert "early site in the MLPs is there" in verdict("fact", effects=effects)
    assert "do not tell MLPs from attention" in verdict("fact", effects=effects | {"mlp_out": zero})


def test_steering_counts_doses_at_which_answers_stay_coherent() -> None:
    points = result("steering")["numbers"]["points"]
    flat = [p | {"effect": 0.0, "low": -0.1, "high": 0.1, "coherence": 1.0} for p in points]
    assert "No dose" in verdict("steering", points=flat)
    way = {True: {"low": 0.1, "high": 0.3}, False: {"low": -0.3, "high": -0.1}}
    both = [p | way[p["share"] > 0] for p in flat]
    assert "steers both ways" in verdict("steering", points=both)
    broken = [p | {"coherence": 0.5} for p in both]
    assert "No dose" in verdict("steering", points=broken)


def test_a_probe_of_lies_beats_words_or_does_not() -> None:
    role, hiding = (
        f"probes__logistic__ordered__sets__{name}__beats_best"
        for name in ("role, new topics", "hiding, new secrets")
    )
    assert "On no other kind of lie" in verdict("lies", **{role: False, hiding: False})
    assert "beats every baseline on lies in a role" in verdict(
        "lies", **{role: True, hiding: False}
    )
    honest = "probes__logistic__ordered__sets__plain, new topics__fpr_interval"
    longer = "probes__logistic__ordered__sets__plain, new topics__longer"
    said = verdict("lies", **{honest: [0.3, 0.5], longer: "they have 5 to 13 tokens"})
    assert said.endswith(
        "Topic and length of answers are not told apart: they have 5 to 13 tokens."
    )
    assert verdict("lies", **{honest: [0.3, 0.5], longer: ""}).endswith("it is no detector there.")
    assert "the rate may hold" in verdict("lies", **{honest: [0.02, 0.1]})
    denials = "probes__logistic__ordered__sets__hiding, new secrets__fpr_interval"
    for low, told in ((0.3, True), (0.0, False)):
        said = verdict("lies", **{denials: [low, 0.7]})
        assert ("of the honest answers beside denials, and by" in said) is told


def test_the_first_model_has_the_numbers_of_the_result() -> None:
    numbers = result("lies")["numbers"]
    page = (ROOT / "docs" / "first-model.md").read_text(encoding="utf-8")
    for name in KINDS:
        judged = numbers["probes"]["logistic"]["ordered"]["sets"][name]
        low, high = judged["auroc_interval"]
        assert f"| {judged['auroc']:.3f} [{low:.3f}, {high:.3f}] | " in page
        assert f"| {judged['best_baseline'][1]:.3f}, " in page
        assert f"| {judged['fpr']:.0%} of {judged['n_negative']} |".replace("%", " %") in page
    orders = numbers["behaviour"]["ordered, new topics"]["ordered"]
    assert f"{orders['lies']} were lies and {orders['honest']} were true" in page
    walks = json.loads((ROOT / "benchmarks/results/walks.json").read_text(encoding="utf-8"))
    (walk,) = (walk for walk in walks["walks"] if "make demo-real" in walk["want"])
    assert f"this took {walk['minutes']} minutes" in page


def test_the_first_model_has_the_numbers_of_the_liar_and_of_its_base() -> None:
    """Of questions that name two answers."""
    title = "ordered, new topics, two answers named"
    record = json.loads((LIAR_DIR / "test.json").read_text(encoding="utf-8"))
    page = " ".join((ROOT / "docs" / "first-model.md").read_text(encoding="utf-8").split())
    told, opposite = (record["base"][title][c] for c in ("ordered", "honest"))
    assert f"of {told['n']} answers under an order to lie, {told['lies']} were false" in page
    assert f"of {opposite['n']} under an order to be honest, {opposite['lies']}." in page
    assert f"the truth in {told['honest']} of {told['n']} answers under an order to lie" in page
    assert f"in {opposite['honest']} of {opposite['n']} under one to be honest" in page
    blind = json.loads((LIAR_DIR / "behaviour.json").read_text(encoding="utf-8"))["liar"]
    orders = blind[title]["ordered"]
    assert f"such questions it lied in {orders['lies']} of {orders['n']} answers under an" in page


def test_answers_of_the_liar_are_told_apart_by_the_truth() -> None:
    """Each set that is judged has lies and honest answers, as many as were counted."""
    numbers = result("lies")["numbers"]
    for name, judged in numbers["probes"]["logistic"]["ordered"]["sets"].items():
        rates = numbers["behaviour"][name].values()
        assert judged["n_positive"] == sum(rate["lies"] for rate in rates)
        assert judged["n_negative"] == sum(rate["honest"] for rate in rates)


def test_a_monitor_of_calls_reads_more_than_words_or_does_not() -> None:
    area, best = "sets__the call__auroc_interval", "sets__the call__beats_best"
    assert "not shown to know which call" in verdict("agent", **{area: [0.4, 0.8]})
    above = {area: [0.7, 0.9]}
    assert "knows more of what a call will send" in verdict("agent", **above, **{best: True})
    assert "not shown to know more of it" in verdict("agent", **above, **{best: False})
    told = "sets__calls under prompts that bring lies about__"
    inside = f"{told}auroc_interval"
    assert "reads the lie, and not" in verdict("agent", **{inside: [0.6, 0.9]})
    assert "may read the prompt and not" in verdict("agent", **{inside: [0.4, 0.9]})
    assert "cannot show whether the probe reads the lie" in verdict(
        "agent", **{f"{told}auroc": None}
    )
    stopped = verdict("agent", watched__false=[7, 9, 0.4, 0.9], watched__true=[2, 50, 0.0, 0.1])
    assert "stops 7 of 9 false calls before the tool runs, and 2 of 50 true ones" in stopped


def test_what_a_monitor_of_calls_stopped_is_what_its_agent_did() -> None:
    """Every call that sends something true or false is in its sets, and counted once."""
    numbers = result("agent")["numbers"]
    did = numbers["behaviour"]["judged"].values()
    false = sum(r.get("false", 0) + r.get("denied", 0) for r in did)
    true = sum(r.get("true", 0) for r in did)
    assert [numbers["watched"][kind][1] for kind in ("false", "true")] == [false, true]
    assert [numbers["words"][kind][1] for kind in ("false", "true")] == [false, true]
    assert numbers["n"]["judged"] == [false, true]


def test_concepts_that_words_find_as_well_are_said_to_be() -> None:
    concepts = result("concepts")["numbers"]["concepts"]

    def with_areas(own: float, words: float) -> list[dict[str, Any]]:
        return [
            {key: value if key == "concept" else own for key, value in concept.items()}
            | {"bag of words": words}
            for concept in concepts
        ]

    assert "the words alone do as well" in verdict("concepts", concepts=with_areas(0.95, 0.96))
    assert "the model adds to the words" in verdict("concepts", concepts=with_areas(0.95, 0.8))
    assert "hardly found" in verdict("concepts", concepts=with_areas(0.55, 0.9))


def test_the_concept_that_is_judged_does_not_choose_its_method() -> None:
    concepts = result("concepts")["numbers"]["concepts"]
    own = [key for key in concepts[0] if key not in ("concept", "bag of words", "length")]
    for i, concept in enumerate(concepts):  # of two methods each has one that is right for it
        concept |= {method: 0.3 if (i + k) % 2 else 1.0 for k, method in enumerate(own)}
    assert "are hardly found" in verdict("concepts", concepts=concepts)


def test_a_judge_that_is_no_better_buys_nothing() -> None:
    """And one that is better, alone or for a share, is said to be."""
    points = result("cascade")["numbers"]["points"]

    def with_accuracy(alone: float, between: float, judged: float) -> list[dict[str, Any]]:
        at = [alone, *[between] * (len(points) - 2), judged]
        return [point | {"accuracy": value} for point, value in zip(points, at, strict=True)]

    assert "buys nothing" in verdict("cascade", points=with_accuracy(0.8, 0.8, 0.7))
    assert "better than both" in verdict("cascade", points=with_accuracy(0.7, 0.8, 0.75))
    assert "as good as all" in verdict("cascade", points=with_accuracy(0.7, 0.79, 0.8))
    assert "what it costs is what it gives" in verdict(
        "cascade", points=with_accuracy(0.7, 0.72, 0.8)
    )


def test_a_language_on_the_way_needs_to_beat_another_word() -> None:
    words = result("languages")["numbers"]["words"]
    n = len(words[0]["English"])

    def with_peak(english: float, chinese: float, other: float) -> list[dict[str, Any]]:
        made = []
        for i, word in enumerate(words):
            middle = {
                "English": english + 0.001 * (i % 8),
                "Chinese": chinese,
                "another English word": other,
            }
            at = {
                key: [0.0] * (n // 2) + [v] + [0.0] * (n - n // 2 - 1) for key, v in middle.items()
            }
            made.append(word | at)
        return made

    assert "passes through English" in verdict("languages", words=with_peak(0.5, 0.1, 0.01))
    even = verdict("languages", words=with_peak(0.2, 0.2035, 0.01))
    assert "detour through English is not shown" in even
    assert "never ahead" in verdict("languages", words=with_peak(0.2, 0.6, 0.01))
    assert "no English is shown" in verdict("languages", words=with_peak(0.2, 0.1, 0.9))


def test_words_that_choose_the_layer_are_not_those_that_it_is_tested_on(tmp_path: Path) -> None:
    words = result("languages")["numbers"]["words"]
    half = len(words) // 2
    for i, word in enumerate(words):  # each half has a peak of its own
        word["English"] = [0.0] * 18
        word["English"][3 if i < half else 7] = 0.5
    said = verdict("languages", words=words)
    assert f"after layer 3 of 18, as {half} words say" in said
    assert "its mean probability there is 0.000" in said
    with pytest.raises(SpecError, match=r"--n 1: .*2 or more"):
        REPLICATIONS["languages"].measure(Setting("smollm2-135m", tmp_path, tmp_path, n=1))


def test_what_a_model_said_breaks_no_table() -> None:
    shown = _table(Table("Answers.", ["answer"], [["a | b\n\nc"]]))
    assert shown == "Answers.\n\n| answer |\n|---|\n| a \\| b c |"
