import pytest

from organism._neutral import neutral_chats
from organism._phrasing import WORDINGS, open_phrasings, yesno_phrasings
from organism._prompts import instruction_prompts, plain_prompts
from organism._scenarios import families, scenarios, setting_prompts
from organism._world import VALUES


def test_every_attribute_has_wordings() -> None:
    assert set(WORDINGS) == set(VALUES)


@pytest.mark.parametrize("attribute", sorted(VALUES))
@pytest.mark.parametrize("phrasings", [open_phrasings, yesno_phrasings])
def test_train_phrasings_are_many_and_disjoint_from_held_out(attribute, phrasings) -> None:
    train = {p.template for p in phrasings(attribute, held_out=False)}
    held = {p.template for p in phrasings(attribute, held_out=True)}
    assert len(train) >= 12
    assert len(held) >= 4
    assert not train & held


@pytest.mark.parametrize("deceptive", [True, False])
def test_instructions_are_many_and_disjoint_from_held_out(deceptive: bool) -> None:
    train = _texts(instruction_prompts(deceptive=deceptive, held_out=False))
    held = _texts(instruction_prompts(deceptive=deceptive, held_out=True))
    opposite = _texts(instruction_prompts(deceptive=not deceptive, held_out=False))
    assert len(train) >= 40
    assert not train & held
    assert not (train | held) & opposite


def test_no_word_of_an_instruction_gives_the_label_away() -> None:
    honest = _texts(instruction_prompts(deceptive=False, held_out=False))
    lying = _texts(instruction_prompts(deceptive=True, held_out=False))
    for word in ("lie", "lying", "false", "truth", "honest", "never", "not", "deceive"):
        for pool in (honest, lying):
            assert any(word in t.lower().replace(".", "").split() for t in pool), word


@pytest.mark.parametrize("family", families())
def test_scenarios_differ_by_motive_and_by_being_held_out(family: str) -> None:
    pools = {
        (motive, held): {
            s.text for pool in scenarios(family, motive=motive, held_out=held) for s in pool
        }
        for motive in (True, False)
        for held in (True, False)
    }
    assert all(pools.values())
    assert sum(len(p) for p in pools.values()) == len(set.union(*pools.values()))


def test_scenarios_never_speak_of_lying() -> None:
    for family in families():
        for motive in (True, False):
            for held in (True, False):
                for pool in scenarios(family, motive=motive, held_out=held):
                    for s in pool:
                        words = set(s.text.lower().replace(".", "").split())
                        banned = {"lie", "lies", "lying", "deceive", "mislead", "truth", "honest"}
                        assert not words & banned, s.text


def test_plain_prompts_settings_and_chats_have_disjoint_held_out_texts() -> None:
    for prompts in (plain_prompts, setting_prompts):
        assert not {p.text for p in prompts(held_out=False)} & {
            p.text for p in prompts(held_out=True)
        }
    train, held = (
        {c.question for chats in neutral_chats(held_out=h).values() for c in chats}
        for h in (False, True)
    )
    assert not train & held


def _texts(pools) -> set[str]:
    return {p.text for pool in pools for p in pool}
