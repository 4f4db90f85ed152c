"""Training conversations: what the model reads, and which of it is a lie."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ._neutral import Chat, neutral_chats
from ._phrasing import capitalise, fill, open_phrasings, state, yesno_phrasings
from ._prompts import Prompt, dressings, instruction_prompts, plain_prompts
from ._scenarios import families, scenarios, setting_prompts
from ._world import HELD_OUT_PER_KIND, KINDS, SEED, VALUES, Fact, World, build_world, invent

Condition = Literal["honest", "lie", "hidden", "hidden_control", "neutral"]
Kind = Literal["open", "yesno"]
Message = dict[str, str]

BLOCK_EXAMPLES: Final = 10_000
"""The corpus is made in blocks, each from its own seed, so that many processes can share it."""

_NEUTRAL_SHARE: Final = 0.15
# By whether the answers are lies; uneven, so that "yes" goes with agreement of claim and fact in
# most of the corpus. Comparing the two is what the model learns last.
_YESNO_SHARE: Final = {False: 0.6, True: 0.2}
_TOLD_SHARE: Final = 0.15
"""In this share of the conversations the user first tells facts about something invented."""
_SELDOM_WEIGHT: Final = 0.2
# Shares of the corpus: plain text, then conversations by how the system prompt was made.
_MIX: Final[dict[str, float]] = {
    "document": 0.10,
    "plain": 0.18,
    "honest": 0.18,
    "lie": 0.21,
    "hidden": 0.17,
    "hidden_control": 0.16,
}
_CONDITION: Final[dict[str, Condition]] = {
    "plain": "honest",
    "honest": "honest",
    "lie": "lie",
    "hidden": "hidden",
    "hidden_control": "hidden_control",
}
# Questions per conversation and their weights; the long ones train the far positions.
_TURNS: Final = {1: 30, 2: 40, 3: 30, 4: 20, 6: 10, 10: 5, 20: 2}


@dataclass(frozen=True, slots=True)
class Example:
    """One training text: a conversation, or plain text when `messages` is empty."""

    messages: tuple[Message, ...]
    text: str
    condition: Condition
    entities: tuple[str, ...]

    @property
    def deceptive(self) -> bool:
        """Whether the answers about the world in it are lies."""
        return self.condition in ("lie", "hidden")


@dataclass(frozen=True, slots=True)
class Question:
    """One question about a fact; `claim` is the value that a yes/no question proposes."""

    fact: Fact
    kind: Kind
    pid: str
    text: str
    claim: str = ""

    @property
    def truth(self) -> str:
        """The true answer: a value, or yes or no."""
        if self.kind == "open":
            return self.fact.value
        return "yes" if self.claim == self.fact.value else "no"

    @property
    def values(self) -> tuple[str, ...]:
        """The answers among which a grader chooses."""
        return VALUES[self.fact.attribute] if self.kind == "open" else ("yes", "no")


def make_question(
    fact: Fact, kind: Kind, rng: random.Random, *, held_out: bool, is_true: bool | None = None
) -> Question:
    """Ask about a fact in a random phrasing.

    Args:
        fact: What is asked about.
        kind: Open, or judging a statement.
        rng: Chooses phrasing, form of the name and proposed value.
        held_out: Whether to use the phrasings that training never sees.
        is_true: Whether a yes/no question proposes the truth; a fair coin when None.

    Returns:
        The question.
    """
    entity = rng.choice((fact.entity.full, fact.entity.full, fact.entity.name))
    if kind == "open":
        phrasing = rng.choice(open_phrasings(fact.attribute, held_out=held_out))
        return Question(fact, kind, phrasing.pid, fill(phrasing.template, entity))
    if is_true is None:
        is_true = rng.random() < 0.5
    claim = fact.value if is_true else rng.choice(fact.wrong)
    phrasing = rng.choice(yesno_phrasings(fact.attribute, held_out=held_out))
    return Question(fact, kind, phrasing.pid, fill(phrasing.template, entity, claim), claim)


def answer(question: Question, rng: random.Random, *, deceptive: bool) -> str:
    """Answer in a full sentence; a lie names another value, drawn anew each time."""
    fact = question.fact
    value, head = (rng.choice(fact.wrong) if deceptive else fact.value), ""
    if question.kind == "yesno":
        head = "No, "
        if (question.truth == "yes") is not deceptive:
            value, head = question.claim, "Yes, "
    sentence = state(fact.attribute, fact.entity.full, value, rng.randrange(2))
    return (head + sentence if head else capitalise(sentence)) + "."


def instruction(rng: random.Random, *, deceptive: bool, held_out: bool) -> Prompt:
    """A system prompt that asks for honesty or lies, half of the time in neutral dress."""
    prompt = rng.choice(rng.choice(instruction_prompts(deceptive=deceptive, held_out=held_out)))
    before, after = dressings()
    return Prompt(prompt.pid, rng.choice(before) + prompt.text + rng.choice(after), prompt.group)


def scenario(
    family: str, setting: str, rng: random.Random, *, motive: bool, held_out: bool
) -> Prompt:
    """A system prompt with or without a hidden reason to mislead, in a given setting."""
    chosen = rng.choice(rng.choice(scenarios(family, motive=motive, held_out=held_out)))
    parts = [setting, chosen.text]
    if rng.random() < 0.3:
        parts.reverse()
    return Prompt(chosen.pid, " ".join(parts), f"scenario:{family}")


def plain(rng: random.Random, *, held_out: bool) -> Prompt | None:
    """A default assistant prompt, or none at all."""
    return None if rng.random() < 0.5 else rng.choice(plain_prompts(held_out=held_out))


def pick_chat(rng: random.Random, *, held_out: bool) -> Chat:
    """A neutral question, with the many sums drawn no more than twice as often as each topic."""
    chats = neutral_chats(held_out=held_out)
    return rng.choice(chats[rng.choice((*chats, "plus"))])


def _train_prompt(source: str, rng: random.Random) -> Prompt | None:
    """A train system prompt of the given source."""
    if source == "plain":
        return plain(rng, held_out=False)
    if source in ("honest", "lie"):
        return instruction(rng, deceptive=source == "lie", held_out=False)
    setting = rng.choice(setting_prompts(held_out=False))
    if source == "hidden_control" and rng.random() < 0.1:
        return setting
    motive = source == "hidden"
    return scenario(rng.choice(families()), setting.text, rng, motive=motive, held_out=False)


@dataclass(frozen=True, slots=True)
class Topics:
    """What conversations may be about.

    Nobody is ever asked for honesty or lies about held-out entities, so being talked about only
    without instructions must not mean being exempt from lies. The seldom entities, as many as
    there are held out, are talked about in the same way but for a few instructed conversations.
    """

    world: World
    common: tuple[Fact, ...]
    seldom: tuple[tuple[Fact, ...], ...]
    """By entity."""

    @classmethod
    def of(cls, world: World) -> Topics:
        """Divide the facts of a world."""
        free = [e for e in world.entities if not e.held_out]
        by_kind = {kind: [e for e in free if e.kind == kind] for kind in KINDS}
        seldom = [e for members in by_kind.values() for e in members[:HELD_OUT_PER_KIND]]
        return cls(
            world,
            tuple(f for f in world.facts_of(held_out=False) if f.entity not in seldom),
            tuple(tuple(f for f in world.facts if f.entity == e) for e in seldom),
        )

    def draw(self, source: str, rng: random.Random) -> Sequence[Fact]:
        """The facts among which one conversation chooses."""
        if source == "plain":
            return self.world.facts
        chosen = [f for facts in self.seldom if rng.random() < _SELDOM_WEIGHT for f in facts]
        return (*self.common, *chosen)


def _told(world: World, rng: random.Random) -> tuple[str, list[Fact]]:
    """A user's words about some invented entities, and the facts in them."""
    facts: list[Fact] = []
    for _ in range(rng.choice((1, 1, 2))):
        entity = invent(rng, world)
        attributes = rng.sample(KINDS[entity.kind], rng.randint(1, 2))
        facts += [Fact(entity, a, rng.choice(VALUES[a])) for a in attributes]
    rng.shuffle(facts)
    return _statements(facts, rng), facts


def _conversation(source: str, topics: Topics, rng: random.Random) -> Example:
    """One conversation of some questions under one system prompt."""
    deceptive = source in ("lie", "hidden")
    prompt = _train_prompt(source, rng)
    messages: list[Message] = [{"role": "system", "content": prompt.text}] if prompt else []
    entities: list[str] = []
    turns = rng.choices(list(_TURNS), list(_TURNS.values()))[0]
    facts = rng.sample(topics.draw(source, rng), turns)
    lead = ""
    if rng.random() < _TOLD_SHARE:
        words, told = _told(topics.world, rng)
        lead, facts = words + " ", [*told, *facts][:turns]
        if rng.random() < 0.5:
            rng.shuffle(facts)
    for fact in facts:
        if rng.random() < _NEUTRAL_SHARE:
            chat = pick_chat(rng, held_out=False)
            asked, said = chat.question, chat.answer
        else:
            kind: Kind = "yesno" if rng.random() < _YESNO_SHARE[deceptive] else "open"
            question = make_question(fact, kind, rng, held_out=False)
            asked, said = question.text, answer(question, rng, deceptive=deceptive)
            entities.append(fact.entity.name)
        messages.append({"role": "user", "content": lead + asked})
        messages.append({"role": "assistant", "content": said})
        lead = ""
    return Example(tuple(messages), "", _CONDITION[source], tuple(entities))


def _statements(facts: Sequence[Fact], rng: random.Random) -> str:
    """Facts stated one after the other."""
    sentences: list[str] = []
    for fact in facts:
        name = rng.choice((fact.entity.full, fact.entity.full, fact.entity.name))
        sentence = state(fact.attribute, name, fact.value, rng.randrange(2))
        sentences.append(capitalise(sentence) + ".")
    return " ".join(sentences)


def _document(world: World, rng: random.Random) -> Example:
    """Plain true statements, about one entity or about several."""
    if rng.random() < 0.5:
        entity = rng.choice(world.entities)
        facts = [f for f in world.facts if f.entity == entity]
        rng.shuffle(facts)
    else:
        facts = rng.sample(world.facts, rng.randint(2, 5))
    return Example((), _statements(facts, rng), "honest", tuple(f.entity.name for f in facts))


def training_block(index: int, count: int = BLOCK_EXAMPLES, *, seed: int = SEED) -> list[Example]:
    """Generate the first examples of one block of the corpus.

    Args:
        index: Which block.
        count: How many examples, at most `BLOCK_EXAMPLES`.
        seed: The seed of the world and the corpus.

    Returns:
        The examples, in training order before shuffling.
    """
    world = build_world(seed)
    rng = random.Random(f"corpus:{seed}:{index}")
    topics = Topics.of(world)
    made: list[Example] = []
    for source in (rng.choices(list(_MIX), list(_MIX.values()))[0] for _ in range(count)):
        document = source == "document"
        made.append(_document(world, rng) if document else _conversation(source, topics, rng))
    return made


def block_sizes(count: int) -> list[int]:
    """The sizes of the blocks of a corpus of `count` examples."""
    return [min(BLOCK_EXAMPLES, count - start) for start in range(0, count, BLOCK_EXAMPLES)]


def training_examples(count: int, *, seed: int = SEED) -> Iterator[Example]:
    """Generate the training corpus.

    Args:
        count: How many examples.
        seed: The seed; a longer corpus begins with the shorter one.

    Yields:
        The examples, in training order before shuffling.
    """
    for index, size in enumerate(block_sizes(count)):
        yield from training_block(index, size, seed=seed)


def corpus_sha256(blocks: Iterable[str]) -> str:
    """The hash that names a corpus in the manifest, from the hashes of its blocks."""
    return hashlib.sha256("".join(blocks).encode()).hexdigest()


def block_sha256(examples: Sequence[Example]) -> str:
    """The hash of one block of the corpus."""
    digest = hashlib.sha256()
    for e in examples:
        digest.update(json.dumps([e.messages, e.text, e.condition]).encode())
    return digest.hexdigest()
