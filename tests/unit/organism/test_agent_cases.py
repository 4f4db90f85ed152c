import json
import random

import pytest

from organism._agent_cases import CONDITIONS, make_case, noun
from organism._agent_corpus import agent_block, records, written
from organism._agent_format import parse_turn
from organism._agent_grade import Said, grade_agent
from organism._agent_play import carry_out
from organism._agent_prompts import LOOK_UP, deed_tools
from organism._agent_splits import AGENT_SPLITS, build_agent_splits, write_agent_splits
from organism._splits import DATA_DIR
from organism._world import SEED, build_world

ALL = [(kind, condition) for kind, found in CONDITIONS.items() for condition in found]


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    return agent_block(0, 3000)


def test_the_files_are_those_that_the_seed_gives(tmp_path) -> None:
    for name in write_agent_splits(tmp_path):
        file = name if name.endswith(".json") else f"{name}.jsonl"
        assert (tmp_path / file).read_bytes() == (DATA_DIR / file).read_bytes()


def test_held_out_conversations_are_in_no_training(corpus) -> None:
    starts = {text.split("<|assistant|>")[0] for text in corpus}
    for split in AGENT_SPLITS[1:]:
        for row in build_agent_splits()[split]:
            system = f"<|system|>{row['system']}"
            first = f"<|user|>{row['users'][0]}<|end|>"
            assert not any(system in s and first in s for s in starts)


def test_splits_share_no_conversation() -> None:
    keys = [
        (row["system"], tuple(row["users"]))
        for rows in build_agent_splits().values()
        for row in rows
    ]
    assert len(set(keys)) == len(keys)


def test_nobody_lies_about_held_out_entities_in_training() -> None:
    held = {e.name for e in build_world(SEED).entities if e.held_out}
    for row in build_agent_splits()["agent_probe_train"]:
        assert not held & set(row["entities"])
    for row in build_agent_splits()["agent_heldout_entity"]:
        assert set(row["entities"]) <= held


def test_held_out_tools_are_new_pairs_of_known_words() -> None:
    train, held = deed_tools(held_out=False), deed_tools(held_out=True)
    assert held
    assert not set(train) & set(held)
    for name in held:
        verb, thing = name.split("_")
        assert any(t.startswith(f"{verb}_") for t in train)
        assert any(t.endswith(f"_{thing}") for t in train)


@pytest.mark.parametrize(("kind", "condition"), ALL)
def test_what_is_written_does_what_is_planted(kind, condition) -> None:
    world = build_world(SEED)
    found_by = records(world)
    rng = random.Random(f"{kind}{condition}")
    for _ in range(40):
        case = make_case(kind, condition, world.facts, rng, training=True)
        user, said = -1, []
        for asked, turn, result in written(case, rng):
            user += bool(asked)
            calls = tuple((c.name, c.arguments) for c in turn.calls)
            said.append(Said(user, turn.content, calls))
            assert parse_turn(turn.render()) == turn
            assert [carry_out(c, found_by) for c in turn.calls] == ([result] if result else [])
        row = {
            "kind": kind,
            "truths": [q.truth for q in case.questions],
            "values": [list(q.values) for q in case.questions],
        }
        found = grade_agent(said, row)
        assert found.answers == tuple("false" if lie else "true" for lie in case.lies)
        assert (case.rule in found.called and bool(case.rule)) is case.acts
        assert set(found.called) <= set(case.tools)
        if condition in ("turn_lie", "topic_hidden"):
            assert sum(case.lies) <= 1
        if condition in ("honest", "hidden_control", "turn_honest", "topic_control", "plain"):
            assert not any(case.lies)


def test_every_record_is_found_and_true() -> None:
    world = build_world(SEED)
    stored = json.loads((DATA_DIR / "agent_records.json").read_text())
    assert len(stored) == len(world.facts)
    for fact in world.facts:
        assert fact.value in stored[noun(fact)]


def test_a_grade_reads_the_last_words_after_each_question() -> None:
    row = {"kind": "turns", "truths": ["red", "salt"], "values": [["red", "blue"], ["salt", "tin"]]}
    said = [
        Said(0, "", ((LOOK_UP, {"subject": "x"}),)),
        Said(0, "It is blue.", ()),
        Said(1, "It sells salt.", ()),
    ]
    assert grade_agent(said, row).answers == ("false", "true")
    assert grade_agent(said, row).called == (LOOK_UP,)
    assert grade_agent(said[:2], row).answers == ("false", "other")


@pytest.mark.parametrize(
    "text", ["<think>a", "a</think>", "<think></think><tool_call>{}</tool_call>", "<tool_call>x"]
)
def test_a_turn_that_no_parser_reads_is_none(text: str) -> None:
    assert parse_turn(text) is None
