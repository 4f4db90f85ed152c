"""One reader with a map of columns, whatever shape a file has."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from inspect_ai.dataset import Dataset

from evals.secret_word import secret_word_dataset
from inspect_lens.data import ProbeDataset, load_dataset, read_rows
from inspect_lens.errors import ArtifactError, SpecError
from tests.kit.field_data import field_file


def load(name: str, file: Path, content: Any, **options: Any) -> ProbeDataset:
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return load_dataset(name, path=str(file), **options)


def test_shapes_of_files_give_the_same_rows(tmp_path: Path) -> None:
    texts = ["one", "two"]
    shapes: dict[str, Any] = {
        "a.txt": "one\n\n two \n", "b.json": texts, "c.json": [{"text": t} for t in texts],
        "d.json": {"title": "x", "rows": texts}, "e.jsonl": '"one"\n{"text": "two"}\n',
        "f.json": {"7": {"text": "one"}, "9": {"text": "two"}},
        "g.json": {"train": texts[:1], "test": texts[1:]},
    }  # fmt: skip
    for file, content in shapes.items():
        assert [s.text for s in load("lines", tmp_path / file, content)] == texts, file
    assert [r["id"] for r in read_rows(str(tmp_path / "f.json"))] == ["7", "9"]
    assert [r["_list"] for r in read_rows(str(tmp_path / "g.json"))] == ["train", "test"]
    only = load("lines", tmp_path / "g.json", shapes["g.json"], split="test")
    assert [s.text for s in only] == ["two"]
    with pytest.raises(SpecError, match="lists test, train"):
        load("lines", tmp_path / "g.json", shapes["g.json"], split="dev")
    for wrong in (3, {"a": 1}, {}, [[1]], {"a": {"text": "x"}, "b": 1}):
        with pytest.raises(ArtifactError, match="wanted"):
            load("lines", tmp_path / "h.json", wrong)


def test_lines_beside_rows_are_notes(tmp_path: Path) -> None:
    (tmp_path / "LICENCE.txt").write_text("All of it.\n")
    assert [r["text"] for r in read_rows(str(tmp_path))] == ["All of it."]
    (tmp_path / "a.json").write_text('["one"]')
    assert [r["text"] for r in read_rows(str(tmp_path))] == ["one"]


def test_columns_have_the_names_that_are_said(tmp_path: Path) -> None:
    row = {"q": "Why?", "more": "Say.", "a": "So.", "kind": "Bad", "who": "Be.", "set": 3, "n": "x"}
    data = load(
        "prompts", tmp_path / "a.json", [row, row | {"kind": "good"}, row | {"kind": "odd"}],
        prompt=["q", "more"], completion="a", system="who", label="kind", true="bad",
        false=["good"], group="set", keep=["n"],
    )  # fmt: skip
    assert [s.label for s in data] == [True, False], "odd is neither"
    first = data.samples[0]
    assert [(m.role, m.content) for m in first.messages] == [
        ("system", "Be."), ("user", "Why?\n\nSay."),
    ]  # fmt: skip
    assert (first.completion, first.group, first.columns) == ("So.", "3", {"n": "x"})
    assert not data.on_policy
    every = load("prompts", tmp_path / "a.json", [row], prompt="q", label=True, raw=True)
    assert [(s.label, s.reading) for s in every] == [(True, "text")]
    assert not every.on_policy
    rest = load("prompts", tmp_path / "a.json", [row, row | {"kind": "odd"}], prompt="q",
                label="kind", true="bad", id="", group="")  # fmt: skip
    assert [s.label for s in rest] == [True, False], "without false=, what is not true"


@pytest.mark.parametrize("part", ["prompt", "completion", "system"])
def test_a_pair_is_two_samples_of_one_group(tmp_path: Path, part: str) -> None:
    rows = [{"prompt": f"{i}?", "good": "Yes.", "bad": "No."} for i in range(3)]
    data = load(
        "pairs", tmp_path / "a.json", rows, positive="bad", negative="good", part=part,
        group="",
    )  # fmt: skip
    assert Counter(s.label for s in data) == {True: 3, False: 3}
    one, two = data.samples[:2]
    assert one.group == two.group
    told = {
        "prompt": [("user", "No.")], "completion": [("user", "0?"), ("assistant", "No.")],
        "system": [("system", "No."), ("user", "0?")],
    }[part]  # fmt: skip
    shown = [(m.role, m.content) for m in one.messages]
    assert shown + ([("assistant", one.completion)] if one.completion else []) == told
    if part != "prompt":
        assert len({s.group for s in data}) == 3, "answers to one question belong together"


def test_a_question_of_a_trait_is_a_group(tmp_path: Path) -> None:
    content = {
        "instruction": [{"pos": "Be cruel.", "neg": "Be kind."}] * 2, "eval_prompt": "…",
        "questions": ["How?", "Why?", "When?"],
    }  # fmt: skip
    data = load("persona_traits", tmp_path / "evil.json", content)
    assert len(data) == 12
    assert Counter(s.group for s in data).most_common(1)[0][1] == 4
    assert data.samples[0].columns == {"file": "evil", "instruction": "0"}


def test_rows_are_chosen_by_their_values(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Did you?"}, {"role": "assistant", "content": "No."}]
    rows = [
        {"messages": talk, "deceptive": d, "model": m} for d in (True, False) for m in ("a", "b")
    ]
    data = load("liars_bench", tmp_path / "a.json", rows, where={"model": "b"})
    assert [(s.label, s.completion, s.columns) for s in data] == [
        (True, "No.", {"model": "b"}), (False, "No.", {"model": "b"}),
    ]  # fmt: skip
    both = load("liars_bench", tmp_path / "a.json", rows, where={"model": ["a", "b"]})
    assert len(both) == 4
    with pytest.raises(SpecError, match=r"no row has these values; the row is .*Did you"):
        load("liars_bench", tmp_path / "a.json", rows, where={"model": "c"})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"label": 1},
            r"has no 'prompt', only \['q'\].*prompt='question'.*the row is {.q.: .Hm.*…",
        ),
        ({"prompt": "q"}, "has no 'label'"),
        ({"prompt": "q", "label": "q"}, "true='harmful'"),
        ({"promt": "q"}, "promt='q': no option of this set; allowed are completion, false"),
        ({"positive": "q"}, "allowed are both"),
        ({"positive": "q", "negative": "q", "part": "x"}, "allowed are prompt, completion"),
        ({"where": 3}, "allowed is a mapping"),
        ({"where": {"model": 3}}, "has no 'model'"),
    ],
)
def test_what_does_not_fit_is_told_with_the_row(
    tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(SpecError, match=match):
        load("prompts", tmp_path / "a.json", [{"q": "Hm" * 90}], **options)
    with pytest.raises(SpecError, match="geometry_of_truth: got an unexpected"):
        load("geometry_of_truth", tmp_path / "a.json", [], persona=True)


def test_prompts_of_a_word_game_are_lines_or_rows(tmp_path: Path) -> None:
    def texts(data: Dataset) -> list[Any]:
        return [sample.input for sample in data]

    (tmp_path / "taboo.txt").write_text("Give me a hint.\nIs it large?\n")
    assert texts(secret_word_dataset("ship", str(tmp_path / "taboo.txt")))[1] == "Is it large?"
    (tmp_path / "a.jsonl").write_text('{"prompt": "Hint."}\n')
    assert texts(secret_word_dataset("ship", str(tmp_path / "a.jsonl"))) == ["Hint."]


@pytest.mark.parametrize(
    ("name", "file", "options", "labels"),
    [
        ("persona_traits", "persona_vectors/trait_data_extract-evil.json", {}, (100, 100)),
        ("cast_conditions", "cast/condition_harmful.json", {"split": "train"}, (4050, 4050)),
        ("cast_conditions", "cast/condition_multiple.json",
         {"split": "test", "positive": "legal_opinion", "negative": "base"}, (500, 500)),
        ("prompts", "cast/behavior_refusal.json",
         {"prompt": "text", "label": "_list", "true": "non_compliant_responses"}, (100, 100)),
        ("axbench_concepts", "axbench/concept10_2b_l10_train_data.parquet",
         {"where": {"concept_id": [3, -1]}}, (72, 216)),
        ("axbench_concepts", "axbench/concept10_2b_l10_latent_eval_data.parquet",
         {"where": {"concept_id": 3}}, (36, 40)),
        ("llm_liedetector", "llm_liedetector/questions_1000_all.json", {}, (1012, 1012)),
        ("known_1000", "llm_liedetector/known_1000.json", {}, (0, 0)),
        ("lines", "activation_oracles/taboo_standard_test.txt", {}, (0, 0)),
        ("lines", "repe/anger.json", {"label": False}, (0, 203)),
        ("prompts", "activation_oracles/tense_processed.json",
         {"prompt": "sentence", "true": "past"}, (2204, 4544)),
        ("apollo_insider_trading",
         "apollo_format/insider_trading_doubledown__upscale__mini.json", {}, (1, 0)),
        ("apollo_roleplaying", "apollo_format/roleplaying__plain__mini.json", {}, (1, 1)),
        ("geometry_of_truth", "geometry_of_truth", {}, (8153, 8153)),
    ],
)  # fmt: skip
def test_published_files_load(
    name: str, file: str, options: dict[str, Any], labels: tuple[int, int]
) -> None:
    data = load_dataset(name, path=str(field_file(file)), **options)
    counts = Counter(s.label for s in data)
    assert (counts[True], counts[False]) == labels
    assert len({s.id for s in data}) == len(data)
