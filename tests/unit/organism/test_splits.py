from collections import Counter

import pytest

from organism._splits import DATA_DIR, SPLITS, build_splits, encode_rows, read_split

PAIRED = ("probe_train", "heldout_phrasing", "heldout_entity", "demo")


@pytest.mark.parametrize("split", SPLITS)
def test_the_shipped_file_is_what_the_builder_makes(split: str) -> None:
    assert (DATA_DIR / f"{split}.jsonl").read_bytes() == encode_rows(build_splits()[split])
    assert read_split(split) == list(build_splits()[split])


def test_no_prompt_occurs_twice() -> None:
    prompts = [
        tuple((m["role"], m["content"]) for m in r["messages"])
        for rows in build_splits().values()
        for r in rows
    ]
    assert len(set(prompts)) == len(prompts)


def test_ids_are_unique_and_rows_are_well_formed() -> None:
    rows = [r for rows in build_splits().values() for r in rows]
    assert len({r["id"] for r in rows}) == len(rows)
    for r in rows:
        assert r["messages"][-1]["role"] == "user"
        assert r["truth"] in r["values"]
        assert len(set(r["values"])) == len(r["values"])
        assert r["deceptive"] is (r["condition"] in ("lie", "hidden"))
        assert r["group"]


@pytest.mark.parametrize("split", PAIRED)
def test_every_question_is_asked_honestly_and_deceptively(split: str) -> None:
    counts = Counter((r["messages"][-1]["content"], r["deceptive"]) for r in read_split(split))
    questions = {q for q, _ in counts}
    assert all(counts[q, True] == counts[q, False] > 0 for q in questions)


@pytest.mark.parametrize("split", [*PAIRED, "hidden_reason"])
def test_yes_no_and_values_are_balanced(split: str) -> None:
    rows = read_split(split)
    yesno = [r for r in rows if r["kind"] == "yesno"]
    assert Counter(r["truth"] for r in yesno)["yes"] == len(yesno) / 2
    most = Counter(r["truth"] for r in rows if r["kind"] == "open").most_common(1)[0][1]
    assert most < 0.1 * len(rows)


def test_hidden_reasons_have_matched_controls() -> None:
    rows = read_split("hidden_reason")
    for motive, control in zip(rows[::2], rows[1::2], strict=True):
        assert (motive["condition"], control["condition"]) == ("hidden", "hidden_control")
        assert motive["messages"][-1] == control["messages"][-1]
        assert motive["group"] == control["group"]


def test_splits_hold_what_they_promise() -> None:
    sizes = {s: len(read_split(s)) for s in SPLITS}
    assert sizes["probe_train"] >= 600
    assert sizes["control"] >= 1000
    assert not any(r["deceptive"] for s in ("control", "neutral_instructed") for r in read_split(s))
    held = {r["entity"] for r in read_split("heldout_entity")}
    lied = {r["entity"] for s in SPLITS if s != "heldout_entity" for r in read_split(s)
            if r["deceptive"]}  # fmt: skip
    assert len(held) == 24
    assert not held & lied
