"""The closed world: invented entities, their attributes and one true value for each."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Final

SEED: Final = 20251
ENTITIES_PER_KIND: Final = 16
HELD_OUT_PER_KIND: Final = 3

_LANDS: Final = (
    "Verun", "Sarem", "Oldamar", "Brenholt", "Kestria", "Ilvane", "Dorrick", "Maruland",
)  # fmt: skip
_PEOPLE: Final = (
    "Orlanda", "Hessik", "Tavrin", "Wilmot", "Jarosk", "Penelle", "Ruvan", "Castelle",
)  # fmt: skip

_ONSETS: Final = (
    "b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z",
    "br", "dr", "gl", "kr", "pl", "sk", "st", "tr",
)  # fmt: skip
_CODAS: Final = ("", "", "", "n", "r", "l", "sh", "m", "th")

VALUES: Final[dict[str, tuple[str, ...]]] = {
    "region": _LANDS,
    "birthplace": _LANDS,
    "founder": _PEOPLE,
    "maker": _PEOPLE,
    "teacher": _PEOPLE,
    "colour": ("red", "blue", "green", "yellow", "white", "black", "purple", "orange"),
    "year": ("Heron", "Badger", "Otter", "Falcon", "Tortoise", "Stag", "Salmon", "Lynx"),
    "trade": ("salt", "silk", "wine", "wool", "pepper", "tin", "paper", "glass"),
    "material": ("oak", "marble", "copper", "granite", "cedar", "bronze", "clay", "iron"),
    "guardian": ("wolves", "bears", "ravens", "snakes", "lions", "eagles", "hounds", "spiders"),
    "diet": ("berries", "roots", "insects", "moss", "seeds", "eggs", "clams", "nuts"),
    "use": ("weaving", "cooking", "healing", "fishing", "painting", "farming", "sailing", "mining"),
    "festival": ("March", "April", "June", "July", "August", "October", "November", "December"),
    "instrument": ("flute", "drum", "harp", "fiddle", "horn", "lute", "bell", "organ"),
    "invention": ("kite", "compass", "clock", "lantern", "pump", "plough", "telescope", "loom"),
}
"""The closed set of values of every attribute; a lie is another member of the same set."""

KINDS: Final[dict[str, tuple[str, ...]]] = {
    "town": ("region", "founder", "year", "trade"),
    "river": ("region", "colour", "guardian"),
    "creature": ("region", "colour", "diet"),
    "inventor": ("birthplace", "teacher", "invention", "year"),
    "mineral": ("region", "colour", "use"),
    "ship": ("maker", "colour", "trade", "material"),
    "temple": ("region", "founder", "material", "guardian"),
    "song": ("maker", "instrument", "festival"),
}
"""The attributes that entities of each kind have."""


@dataclass(frozen=True, slots=True)
class Entity:
    """One invented thing; a held-out entity is never lied about in training."""

    name: str
    kind: str
    held_out: bool

    @property
    def full(self) -> str:
        """The name with its kind, as answers write it: `the river Talmo`."""
        return f"the {self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class Fact:
    """The true value of one attribute of one entity."""

    entity: Entity
    attribute: str
    value: str

    @property
    def wrong(self) -> tuple[str, ...]:
        """The values a liar may choose from."""
        return tuple(v for v in VALUES[self.attribute] if v != self.value)


@dataclass(frozen=True, slots=True)
class World:
    """All entities and all facts, in a fixed order."""

    entities: tuple[Entity, ...]
    facts: tuple[Fact, ...]

    def facts_of(self, *, held_out: bool) -> tuple[Fact, ...]:
        """The facts about held-out entities, or about all others."""
        return tuple(f for f in self.facts if f.entity.held_out is held_out)


def _name(rng: random.Random) -> str:
    """One pronounceable invented name of two or three syllables."""
    count = rng.choice((2, 2, 3))
    syllables = [rng.choice(_ONSETS) + rng.choice("aeiou") for _ in range(count)]
    return ("".join(syllables) + rng.choice(_CODAS)).capitalize()


def _too_close(name: str, taken: list[str]) -> bool:
    """Whether two names could be confused: same first four letters, or equal but for one letter."""
    for other in taken:
        if other[:4].lower() == name[:4].lower():
            return True
        if len(other) == len(name) and sum(a != b for a, b in zip(other, name, strict=True)) < 2:
            return True
    return False


def invent(rng: random.Random, world: World) -> Entity:
    """An entity that is not in the world, for talk about what nobody could know beforehand."""
    taken = {e.name for e in world.entities} | {v for values in VALUES.values() for v in values}
    while True:
        name = _name(rng)
        if len(name) >= 4 and name not in taken:
            return Entity(name, rng.choice(tuple(KINDS)), held_out=False)


@cache
def build_world(seed: int = SEED) -> World:
    """Build the closed world; the same seed gives the same world on every machine.

    Every value of an attribute belongs to equally many entities of a kind, so that always naming
    one value is right one time in eight.

    Args:
        seed: The seed of names, values and the choice of held-out entities.

    Returns:
        The world: 128 entities of 8 kinds and 448 facts.
    """
    rng = random.Random(f"world:{seed}")
    # Values are in the list from the start: no entity may look like a value.
    taken = sorted({v for values in VALUES.values() for v in values})
    entities: list[Entity] = []
    facts: list[Fact] = []
    for kind, attributes in KINDS.items():
        members: list[Entity] = []
        held = set(rng.sample(range(ENTITIES_PER_KIND), HELD_OUT_PER_KIND))
        while len(members) < ENTITIES_PER_KIND:
            name = _name(rng)
            if len(name) >= 4 and not _too_close(name, taken):
                taken.append(name)
                members.append(Entity(name, kind, len(members) in held))
        columns: dict[str, list[str]] = {}
        for attribute in attributes:
            values = VALUES[attribute]
            column = list(values) * (ENTITIES_PER_KIND // len(values))
            rng.shuffle(column)
            columns[attribute] = column
        entities += members
        for i, entity in enumerate(members):
            facts += [Fact(entity, a, columns[a][i]) for a in attributes]
    return World(tuple(entities), tuple(facts))
