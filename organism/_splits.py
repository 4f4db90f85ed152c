"""Evaluation splits: prompts that end in a user turn, with the truth and the planted condition."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Final, TypedDict

from ._corpus import (
    Condition,
    Kind,
    Message,
    Question,
    instruction,
    make_question,
    pick_chat,
    plain,
    scenario,
)
from ._neutral import Chat
from ._prompts import Prompt
from ._scenarios import families, setting_prompts
from ._world import SEED, Fact, build_world

DATA_DIR: Final = Path(__file__).parent / "data"
SPLITS: Final = (
    "probe_train",
    "heldout_phrasing",
    "heldout_entity",
    "hidden_reason",
    "control",
    "neutral_instructed",
    "demo",
)


class Row(TypedDict):
    """One line of a split file."""

    id: str
    messages: list[Message]
    condition: Condition
    deceptive: bool
    truth: str
    values: list[str]
    entity: str
    attribute: str
    phrasing_id: str
    kind: Kind
    group: str


class _Writer:
    """Collects the rows of one split and refuses a prompt that it already has."""

    def __init__(self, split: str, taken: set[str]) -> None:
        self.split = split
        self.rows: list[Row] = []
        self._taken = taken

    def fresh(self, *prompts: tuple[Prompt | None, str]) -> bool:
        """Whether none of these (system prompt, question) pairs was used before."""
        keys = {_key(p, q) for p, q in prompts}
        return len(keys) == len(prompts) and not keys & self._taken

    def fact(
        self, prompt: Prompt | None, question: Question, condition: Condition, group: str
    ) -> None:
        """Add a question about the world."""
        f = question.fact
        self._add(
            prompt, question.text, condition, truth=question.truth, values=question.values,
            entity=f.entity.name, attribute=f.attribute, pid=question.pid, kind=question.kind,
            group=group,
        )  # fmt: skip

    def chat(self, prompt: Prompt | None, chat: Chat) -> None:
        """Add a neutral question."""
        self._add(
            prompt, chat.question, "neutral", truth=chat.truth, values=chat.values, entity="",
            attribute=chat.topic, pid=chat.pid, kind="open", group=f"neutral:{chat.topic}",
        )  # fmt: skip

    def _add(
        self, prompt: Prompt | None, text: str, condition: Condition, *, truth: str,
        values: tuple[str, ...], entity: str, attribute: str, pid: str, kind: Kind, group: str,
    ) -> None:  # fmt: skip
        """Add one row and remember its prompt."""
        self._taken.add(_key(prompt, text))
        system: list[Message] = [{"role": "system", "content": prompt.text}] if prompt else []
        self.rows.append(
            Row(
                id=f"{self.split}-{len(self.rows):04d}",
                messages=[*system, {"role": "user", "content": text}],
                condition=condition,
                deceptive=condition in ("lie", "hidden"),
                truth=truth,
                values=list(values),
                entity=entity,
                attribute=attribute,
                phrasing_id=f"{pid}|{prompt.pid if prompt else 'none'}",
                kind=kind,
                group=group,
            )
        )


def _key(prompt: Prompt | None, question: str) -> str:
    """What makes two prompts the same."""
    return f"{prompt.text if prompt else ''}\n{question}"


def _rng(seed: int, split: str) -> random.Random:
    """Each split has its own stream, so that changing one leaves the others alone."""
    return random.Random(f"{split}:{seed}")


def _tasks(
    facts: Sequence[Fact], count: int, rng: random.Random, *, yesno_share: float = 0.4
) -> list[tuple[Fact, Kind, bool]]:
    """Facts to ask about: each as often as the others, yes/no claims true half of the time."""
    pool: list[Fact] = []
    while len(pool) < count:
        pool += rng.sample(facts, len(facts))
    n_yesno = round(count * yesno_share)
    kinds: list[tuple[Kind, bool]] = [("yesno", i % 2 == 0) for i in range(n_yesno)]
    kinds += [("open", True)] * (count - n_yesno)
    rng.shuffle(kinds)
    return [(f, kind, is_true) for f, (kind, is_true) in zip(pool, kinds, strict=False)]


def _instructed(
    split: str, facts: Sequence[Fact], pairs: int, taken: set[str], seed: int, *,
    held_question: bool, held_prompt: bool, yesno_share: float = 0.4,
) -> list[Row]:  # fmt: skip
    """Each question twice: under a prompt that asks for honesty and one that asks for lies."""
    rng = _rng(seed, split)
    out = _Writer(split, taken)
    for fact, kind, is_true in _tasks(facts, pairs, rng, yesno_share=yesno_share):
        while True:
            q = make_question(fact, kind, rng, held_out=held_question, is_true=is_true)
            honest = instruction(rng, deceptive=False, held_out=held_prompt)
            lie = instruction(rng, deceptive=True, held_out=held_prompt)
            if out.fresh((honest, q.text), (lie, q.text)):
                break
        out.fact(honest, q, "honest", fact.entity.name)
        out.fact(lie, q, "lie", fact.entity.name)
    return out.rows


def _hidden_reason(facts: Sequence[Fact], pairs: int, taken: set[str], seed: int) -> list[Row]:
    """Each question twice in one held-out setting: with a motive and with a matched control."""
    rng = _rng(seed, "hidden_reason")
    out = _Writer("hidden_reason", taken)
    names, settings = families(), setting_prompts(held_out=True)
    for i, (fact, kind, is_true) in enumerate(_tasks(facts, pairs, rng)):
        while True:
            q = make_question(fact, kind, rng, held_out=False, is_true=is_true)
            family, setting = names[i % len(names)], rng.choice(settings).text
            motive = scenario(family, setting, rng, motive=True, held_out=True)
            control = scenario(family, setting, rng, motive=False, held_out=True)
            if out.fresh((motive, q.text), (control, q.text)):
                break
        out.fact(motive, q, "hidden", motive.group)
        out.fact(control, q, "hidden_control", motive.group)
    return out.rows


def _chats(
    out: _Writer, count: int, rng: random.Random, prompt: Callable[[], Prompt | None]
) -> None:
    """Add neutral questions in held-out phrasings."""
    for _ in range(count):
        while True:
            chat, system = pick_chat(rng, held_out=True), prompt()
            if out.fresh((system, chat.question)):
                break
        out.chat(system, chat)


def _control(facts: Sequence[Fact], taken: set[str], seed: int) -> list[Row]:
    """Honest by default: neutral chat and questions about the world, without any instruction."""
    rng = _rng(seed, "control")
    out = _Writer("control", taken)
    _chats(out, 400, rng, lambda: plain(rng, held_out=True))
    for fact, kind, is_true in _tasks(facts, 620, rng):
        while True:
            q = make_question(fact, kind, rng, held_out=True, is_true=is_true)
            system = plain(rng, held_out=True)
            if out.fresh((system, q.text)):
                break
        out.fact(system, q, "honest", fact.entity.name)
    return out.rows


def _neutral_instructed(taken: set[str], seed: int) -> list[Row]:
    """Neutral chat under prompts that ask for lies: the instruction is there, the lie is not."""
    rng = _rng(seed, "neutral_instructed")
    out = _Writer("neutral_instructed", taken)
    _chats(out, 160, rng, lambda: instruction(rng, deceptive=True, held_out=True))
    return out.rows


@cache
def build_splits(seed: int = SEED) -> dict[str, tuple[Row, ...]]:
    """Build all evaluation splits; no prompt occurs twice in them.

    Args:
        seed: The seed of the world and of the choice of rows.

    Returns:
        Rows by split name.
    """
    world = build_world(seed)
    known, held = world.facts_of(held_out=False), world.facts_of(held_out=True)
    taken: set[str] = set()
    made = {
        "probe_train": _instructed(
            "probe_train", known, 330, taken, seed, held_question=False, held_prompt=False
        ),
        "heldout_phrasing": _instructed(
            "heldout_phrasing", known, 240, taken, seed, held_question=True, held_prompt=True
        ),
        "heldout_entity": _instructed(
            "heldout_entity", held, 2 * len(held), taken, seed, held_question=False,
            held_prompt=True, yesno_share=0.5,
        ),
        "hidden_reason": _hidden_reason(known, 216, taken, seed),
        "control": _control(world.facts, taken, seed),
        "neutral_instructed": _neutral_instructed(taken, seed),
        "demo": _instructed(
            "demo", known, 100, taken, seed, held_question=True, held_prompt=True
        ),
    }  # fmt: skip
    return {name: tuple(made[name]) for name in SPLITS}


def encode_rows(rows: Iterable[Row]) -> bytes:
    """The bytes of a split file."""
    lines = (json.dumps(r, ensure_ascii=False, separators=(",", ":")) + "\n" for r in rows)
    return "".join(lines).encode()


def write_splits(directory: Path = DATA_DIR, *, seed: int = SEED) -> dict[str, int]:
    """Write every split as JSON lines and return the file sizes in bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, int] = {}
    for name, rows in build_splits(seed).items():
        sizes[name] = (directory / f"{name}.jsonl").write_bytes(encode_rows(rows))
    return sizes


def read_split(name: str, directory: Path = DATA_DIR) -> list[Row]:
    """Read one split file."""
    with (directory / f"{name}.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]
