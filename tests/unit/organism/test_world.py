from collections import Counter

from organism._world import ENTITIES_PER_KIND, HELD_OUT_PER_KIND, KINDS, VALUES, build_world


def test_same_seed_same_world_and_another_seed_another() -> None:
    first = build_world.__wrapped__(7)
    assert first == build_world.__wrapped__(7)
    assert first != build_world.__wrapped__(8)


def test_the_size_is_as_documented() -> None:
    world = build_world()
    assert len(world.entities) == len(KINDS) * ENTITIES_PER_KIND == 128
    assert len(world.facts) == 448
    assert Counter(e.kind for e in world.entities if e.held_out) == dict.fromkeys(
        KINDS, HELD_OUT_PER_KIND
    )


def test_values_are_balanced_within_kind_and_attribute() -> None:
    facts = build_world().facts
    for kind, attributes in KINDS.items():
        for attribute in attributes:
            counts = Counter(
                f.value for f in facts if f.entity.kind == kind and f.attribute == attribute
            )
            assert set(counts) == set(VALUES[attribute])
            assert len(set(counts.values())) == 1


def test_no_name_is_a_value_or_another_name() -> None:
    names = [e.name for e in build_world().entities]
    assert len({n.lower() for n in names}) == len(names)
    values = {v.lower() for vs in VALUES.values() for v in vs}
    assert not {n.lower() for n in names} & values


def test_a_lie_is_another_value_of_the_same_attribute() -> None:
    for fact in build_world().facts:
        assert set(fact.wrong) | {fact.value} == set(VALUES[fact.attribute])
        assert fact.value not in fact.wrong
