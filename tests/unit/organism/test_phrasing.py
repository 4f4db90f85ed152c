import pytest

from organism._prompts import instruction_prompts
from organism._scenarios import families, scenarios


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


def _texts(pools) -> set[str]:
    return {p.text for pool in pools for p in pool}
