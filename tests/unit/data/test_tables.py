"""One reader with a map of columns, whatever shape a file has."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from inspect_ai.dataset import Dataset

from evals.secret_word import secret_word_dataset
from inspect_lens.data import ProbeDataset, _rows, load_dataset, read_rows
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
    }  # fmt: skip
    for file, content in shapes.items():
        assert [s.text for s in load("lines", tmp_path / file, content)] == texts, file
    assert [r["id"] for r in read_rows(str(tmp_path / "f.json"))] == ["7", "9"]
    assert [r["_list"] for r in read_rows(str(tmp_path / "d.json"))] == ["rows", "rows"]
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
    data = load("liars_bench", tmp_path / "a.json", rows, where={"model": "B"})
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
        (
            {"positive": "q", "negative": "q", "part": "x"},
            "part='x'; allowed are 'prompt', 'completion'",
        ),
        ({"where": 3}, "where=3; allowed is an object"),
        *(({name: value}, f"{name}=.*; ") for name, value in (
            ("prompt", 5), ("prompt", None), ("prompt", []), ("keep", 5), ("false", {}),
            ("positive", ["q"]), ("raw", "yes"), ("label", 2.5),
        )),
        ({"prompt": "q", "label": 1, "group": "grpp"}, "group='grpp': no row has 'grpp'; .*are q"),
        ({"prompt": "q", "label": 1, "completion": "a"}, "completion='a': no row has"),
        ({"prompt": "q", "label": 1, "keep": ["q", "x"]}, "no row has 'x'"),
        ({"prompt": "q", "label": 1, "part": "system"}, "is of pairs; name positive="),
        ({"prompt": "q", "label": "q", "false": "x"}, "false='x': needs true="),
        *(({"positive": "q", "negative": "q"} | extra, "is not read of pairs") for extra in (
            {"label": True}, {"true": "x"}, {"reply": True}, {"prompt": "q"}, {"completion": "q"},
            {"part": "system", "system": "q"}, {"part": "completion", "completion": "q"},
        )),
        ({"where": {"model": 3}}, "has no 'model'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_with_the_row(
    tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(SpecError, match=match):
        load("prompts", tmp_path / "a.json", [{"q": "Hm" * 90}], **options)
    with pytest.raises(SpecError, match="geometry_of_truth: got an unexpected"):
        load("geometry_of_truth", tmp_path / "a.json", [], persona=True)


ROW = {"prompt": "P", "label": 1}


def test_raw_reads_one_text(tmp_path: Path) -> None:
    for more in ({"system": "S"}, {"completion": "C"}, {"messages": [
        {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"},
    ]}):  # fmt: skip
        with pytest.raises(SpecError, match="raw=True reads one text"):
            load("prompts", tmp_path / "a.json", [ROW | more], raw=True)
    both = {"system": "S", "completion": "C"}
    (one,) = load("prompts", tmp_path / "a.json", [ROW | both], raw=True, system="", completion="")
    assert one.text == "P"


@pytest.mark.parametrize(
    ("values", "options", "labels"),
    [
        (["myth", "fact"], {"true": " Myth "}, [True, False]),
        ([1.0, 0.0, "1.0"], {"true": 1}, [True, False, True]),
        ([1, 0], {"true": True}, [True, False]),
        (["True", "false"], {"true": True, "false": 0}, [True, False]),
        ([5.5, 5, "x"], {"true": 5.5, "false": 5.0}, [True, False]),
        ([True, 0.0], {}, [True, False]),
    ],
)
def test_values_of_a_label_are_met_as_they_are_meant(
    tmp_path: Path, values: list[Any], options: dict[str, Any], labels: list[bool]
) -> None:
    rows = [{"prompt": f"{i}?", "label": value} for i, value in enumerate(values)]
    data = load("prompts", tmp_path / "a.json", rows, **options)
    assert [s.label for s in data] == labels


def test_a_value_that_no_label_has_is_refused(tmp_path: Path) -> None:
    rows = [{"prompt": f"{k}?", "kind": k} for k in ("myth", "fact")]
    for option in ({"true": "myths"}, {"true": "myth", "false": "facts"}):
        with pytest.raises(SpecError, match="no row has it; values of 'kind' are myth, fact"):
            load("prompts", tmp_path / "a.json", rows, label="kind", **option)
    concept = {"input": "a", "output": "b", "category": "negative"}
    (one,) = load("axbench_concepts", tmp_path / "a.json", [concept])
    assert one.label is False, "the set's own values may be absent, as in a control set"


def test_one_list_of_an_object_is_read_and_named(tmp_path: Path) -> None:
    lists = {"train": ["one"], "test": ["two"]}
    for split, text in ((None, "one"), ("train", "one"), ("test", "two")):
        data = load("lines", tmp_path / "a.json", lists, split=split)
        assert ([s.text for s in data], data.split) == ([text], split or "train")
    assert load("lines", tmp_path / "b.txt", "one\n").split == "all"
    assert load("lines", tmp_path / "c.json", {"rows": ["one"]}).split == "all"
    for content, split, match in (
        (lists, "dev", "lists train, test; name one"), (["one"], "test", "no lists; leave split="),
        ({"train": ["one"]}, "test", "the lists train; name one"),
        ({"sentence": ["He ran."], "tense": ["past"]}, None, "lists sentence, tense; name one"),
    ):  # fmt: skip
        with pytest.raises(SpecError, match=match):
            load("lines", tmp_path / "a.json", content, split=split)
    kinds = {"good": [{"prompt": "a"}], "bad": [{"prompt": "b"}]}
    data = load("prompts", tmp_path / "a.json", kinds, label="_list", true="bad")
    assert [s.label for s in data] == [False, True]
    with pytest.raises(SpecError, match="instructed_pairs: split='test'"):
        load_dataset("instructed_pairs", split="test")
    with pytest.raises(SpecError, match="limit=-1; allowed are integers of 1 or more"):
        load_dataset("instructed_pairs", limit=-1)


def test_questions_of_a_trait_stay_with_it(tmp_path: Path) -> None:
    for trait in ("evil", "kind"):
        content = {"instruction": [{"pos": f"Be {trait}.", "neg": "No."}], "questions": [trait]}
        (tmp_path / f"{trait}.json").write_text(json.dumps(content))
    data = load_dataset("persona_traits", path=str(tmp_path))
    assert [(s.columns["file"], s.messages[1].content) for s in data] == [
        (trait, trait) for trait in ("evil", "evil", "kind", "kind")
    ]  # fmt: skip


@pytest.mark.parametrize("empty", [None, "", " ", []])
def test_an_empty_cell_is_none(tmp_path: Path, empty: Any) -> None:
    row = ROW | dict.fromkeys(("messages", "completion", "system", "id", "group"), empty)
    (one,) = load("prompts", tmp_path / "a.json", [row])
    assert ([m.content for m in one.messages], one.completion) == (["P"], None)


def test_a_prompt_that_is_named_is_read(tmp_path: Path) -> None:
    row = {"q": "P", "label": 1, "messages": "M"}
    with pytest.raises(SpecError, match="prompt='q', and the row has 'messages' too"):
        load("prompts", tmp_path / "a.json", [row], prompt="q")
    (one,) = load("prompts", tmp_path / "a.json", [row], prompt="q", messages="")
    assert one.text == "P"


def test_a_pair_has_its_system_turn_and_its_name(tmp_path: Path) -> None:
    row = {"positive": "a", "negative": "b", "system": "S", "id": "x", "group": "g"}
    data = load("pairs", tmp_path / "a.json", [row])
    assert [s.id for s in data] == ["x-positive", "x-negative"]
    assert [[m.content for m in s.messages] for s in data] == [["S", "a"], ["S", "b"]]
    assert {s.group for s in data} == {"g"}


def test_pairs_that_share_a_text_are_of_one_group(tmp_path: Path) -> None:
    """Else a probe is judged on texts that it was trained on."""
    texts = [("a", "b"), ("c", "d"), ("e", "b"), ("d", "f"), ("e", "g"), ("h", "i")]
    data = load("pairs", tmp_path / "a.json", [{"positive": p, "negative": n} for p, n in texts])
    rows = [s.group for s in data if s.label]
    assert rows[0] == rows[2] == rows[4] != rows[1] == rows[3]
    assert len(set(rows)) == 3


@pytest.mark.parametrize(
    ("row", "match"),
    [
        *((ROW | {"messages": [{"role": role, "content": text}]}, match) for role, text, match in (
            ("developer", "x", "role='developer'; allowed are system"),
            ("user", None, "is no text"), ("user", [{"text": "x"}], "is no text"),
        )),
        (ROW | {"completion": ["x", "y"]}, "'completion' is no text"),
        (ROW | {"prompt": float("nan")}, "'prompt' is no text"),
        (ROW | {"prompt": True}, "'prompt' is no text"),
        (ROW | {"prompt": None}, "'prompt' is empty"),
        (ROW | {"prompt": "\ud800"}, "half of a character"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_refused(tmp_path: Path, row: Any, match: str) -> None:
    with pytest.raises(SpecError, match=match):
        load("prompts", tmp_path / "a.json", [row])


def test_endings_are_those_that_are_named(tmp_path: Path) -> None:
    assert len(load("prompts", tmp_path / "A.CSV", "prompt,label\nP,1\n")) == 1
    with pytest.raises(ArtifactError, match=r"no such ending: \.ndjson.*allowed are files \.csv"):
        load("prompts", tmp_path / "a.ndjson", json.dumps(ROW))
    with pytest.raises(ArtifactError, match="more cells than columns"):
        load("prompts", tmp_path / "a.csv", "prompt,label\nP,1,2\n")


def test_an_ending_is_judged_before_the_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(_rows, "read_regular", pytest.fail)
    with pytest.raises(ArtifactError, match=r"no such ending: \.safetensors"):
        load_dataset("prompts", path=str(tmp_path / "model.safetensors"))


def test_short_rows_that_are_filled_up_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_rows, "_CELLS", 1000)
    columns = ",".join(["prompt", "label", *(f"c{i}" for i in range(98))])
    few = columns + "\n" + "P,1\n" * 4
    assert len(load("prompts", tmp_path / "a.csv", few)) == 4
    many = columns + "\n" + "P,1\n" * 400
    with pytest.raises(ArtifactError, match="rows have more than"):
        load("prompts", tmp_path / "a.csv", many)


def test_options_that_nothing_reads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="bogus"):
        load_dataset("instructed_pairs", bogus=1)
    with pytest.raises(SpecError, match="revision='abc' with source='path'; allowed for the hub"):
        load("prompts", tmp_path / "a.json", [ROW], revision="abc")


def test_a_source_of_labels_that_no_card_knows_is_refused(tmp_path: Path) -> None:
    data = load("prompts", tmp_path / "a.json", [ROW])
    assert replace(data, label_source="judge").facts()["label_source"] == "judge"
    with pytest.raises(SpecError, match="label_source='me'; allowed are instruction, judge"):
        replace(data, label_source="me")


def test_a_table_that_unpacks_to_far_more_is_refused(tmp_path: Path) -> None:
    arrow: Any = importlib.import_module("pyarrow")
    table = arrow.table({"prompt": arrow.nulls(1 << 24, arrow.string())})
    importlib.import_module("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 1 << 20
    with pytest.raises(ArtifactError, match="declare more than"):
        next(iter(read_rows(str(tmp_path / "a.parquet"))))


def test_rows_may_have_nothing_where_others_are_chosen_by(tmp_path: Path) -> None:
    rows = [ROW | {"c": None}, ROW | {"c": "a"}]
    assert len(load("prompts", tmp_path / "a.json", rows, where={"c": "a"})) == 1


@pytest.mark.parametrize(
    ("name", "row", "options", "meaning"),
    [
        ("prompts", {"q": "a"}, {"prompt": "q", "label": False}, "none: every label is 0"),
        ("prompts", {"q": "a"}, {"prompt": "q", "label": None}, "what the model answers decides"),
        ("prompts", {"q": "a", "k": 1}, {"prompt": "q", "label": "k"}, "label 1 of `k`"),
        ("prompts", ROW, {"true": [1, 2]}, "the label is 1 or 2"),
        ("pairs", {"happy": "a", "sad": "b"}, {"positive": "happy", "negative": "sad"},
         "the text of the column `happy`"),
        ("prompts", ROW, {}, "label 1 of your file"),
    ],
)  # fmt: skip
def test_facts_say_what_the_options_made_of_a_label(
    tmp_path: Path, name: str, row: Any, options: dict[str, Any], meaning: str
) -> None:
    facts = load(name, tmp_path / "a.json", [row], **options).facts()
    assert (facts["label_meaning"], facts["options"]) == (meaning, options)


def test_prompts_of_a_word_game_are_lines_or_rows(tmp_path: Path) -> None:
    def texts(data: Dataset) -> list[Any]:
        return [sample.input for sample in data]

    (tmp_path / "taboo.txt").write_text("Give me a hint.\nIs it large?\n")
    assert texts(secret_word_dataset("ship", str(tmp_path / "taboo.txt")))[1] == "Is it large?"
    for name, content in (("a.txt", ""), ("a.csv", "a,b\n1\n"), ("a.csv", "prompt\n1,2\n")):
        (tmp_path / name).write_text(content)
        with pytest.raises((ValueError, ArtifactError), match=r"prompt|more cells"):
            secret_word_dataset("ship", str(tmp_path / name))
    (tmp_path / "a.jsonl").write_text('{"prompt": "Hint."}\n')
    assert texts(secret_word_dataset("ship", str(tmp_path / "a.jsonl"))) == ["Hint."]


@pytest.mark.parametrize(
    ("name", "file", "options", "labels"),
    [
        ("persona_traits", "persona_vectors/trait_data_extract-evil.json", {}, (100, 100)),
        ("cast_conditions", "cast/condition_harmful.json", {}, (4050, 4050)),
        ("cast_conditions", "cast/condition_harmful.json", {"split": "test"}, (450, 450)),
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
