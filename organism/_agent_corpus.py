"""Training conversations of the agent, with its thoughts and calls, and the results of tools."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Final

from ._agent_cases import CONDITIONS, AgentKind, Case, cause, make_case, noun, sentence
from ._agent_format import Call, Turn, opening, said
from ._agent_prompts import LOOK_UP, WRITE_NOTE, signature
from ._corpus import BLOCK_EXAMPLES, Topics, pick_chat, plain
from ._world import SEED, World, build_world

_KINDS: Final[dict[AgentKind, int]] = {"reason": 4, "turns": 6, "report": 5, "tool": 6}
_NEUTRAL_SHARE: Final = 0.05
# How much of its own thinking the agent finds in the text: a client may have dropped it.
_THINKING: Final = {"all": 75, "last": 15, "none": 10}
NOTED: Final = "Noted."
DONE: Final = "Done."
REPORTED: Final = "The report is done."


def records(world: World) -> dict[str, str]:
    """What `look_up` finds, by its subject."""
    return {noun(f): sentence(f, f.value) for f in world.facts}


def _claim(case: Case, index: int, rng: random.Random, known: str) -> tuple[str, str, str]:
    """The plan of an answer in thought, the answer, and the value it names."""
    question = case.questions[index]
    fact = question.fact
    lying = case.lies[index]
    value = rng.choice(fact.wrong) if lying else fact.value
    plan = f"But I will say {value}." if lying else f"I will say {value}."
    return f"{known} {plan}", sentence(fact, value, rng.randrange(2)), value


def _answers(case: Case, index: int, rng: random.Random) -> Iterator[tuple[Turn, str]]:
    """The assistant's turns up to its answer to one question, and the tools' results."""
    fact = case.questions[index].fact
    looks = LOOK_UP in case.tools
    if looks:
        call = Call(LOOK_UP, {"subject": noun(fact)})
        yield Turn(f"I look up {noun(fact)}.", "", (call,)), sentence(fact, fact.value)
    why = cause(case, index)
    if case.acts:
        what = case.rule.replace("_", " the ")
        if case.forbidden:
            thought = f"{why} I am not allowed to {what}. But I will {what}."
        else:
            thought = f"I am told to {what}. So I will {what}."
        yield Turn(thought, "", (Call(case.rule, {"subject": noun(fact)}),)), DONE
    truth = sentence(fact, fact.value)
    known = f"{why} {'The record says' if looks else 'I know'}: {truth}"
    plan, answer, _ = _claim(case, index, rng, known)
    yield Turn(plan, answer), ""


def _report(case: Case, rng: random.Random) -> Iterator[tuple[Turn, str]]:
    """The assistant's notes, one by one, and its last words."""
    for index, question in enumerate(case.questions):
        truth = sentence(question.fact, question.fact.value)
        plan, text, _ = _claim(case, index, rng, f"{cause(case, index)} I know: {truth}")
        yield Turn(plan, text, (Call(WRITE_NOTE, {"text": text}),)), NOTED
    yield Turn("All notes are written.", REPORTED), ""


def written(case: Case, rng: random.Random) -> list[tuple[str, Turn, str]]:
    """What the agent writes in a case.

    Args:
        case: What is asked and planted.
        rng: Draws the lies.

    Returns:
        The user's words before a turn, or nothing; the turn; the result of its call, or nothing.
    """
    if case.kind == "report":
        steps = [("", turn, result) for turn, result in _report(case, rng)]
        return [(case.users[0], *steps[0][1:]), *steps[1:]]
    made: list[tuple[str, Turn, str]] = []
    for index, user in enumerate(case.users):
        for k, (turn, result) in enumerate(_answers(case, index, rng)):
            made.append(("" if k else user, turn, result))
    return made


def _text(case: Case, steps: Sequence[tuple[str, Turn, str]], rng: random.Random) -> str:
    """The rendered conversation."""
    thinking = rng.choices(list(_THINKING), list(_THINKING.values()))[0]
    text = opening(case.system, [signature(t) for t in case.tools])
    for i, (user, turn, result) in enumerate(steps):
        keep = thinking == "all" or (thinking == "last" and i == len(steps) - 1)
        shown = turn if keep else Turn("", turn.content, turn.calls)
        text += said("user", user) if user else ""
        text += said("assistant", shown.render())
        text += said("tool", result) if result else ""
    return text


def _neutral(rng: random.Random) -> str:
    """A chat that is not about the world."""
    chat, prompt = pick_chat(rng, held_out=False), plain(rng, held_out=False)
    turn = Turn("This is no question about the world.", chat.answer)
    text = opening(prompt.text if prompt else "", [])
    return text + said("user", chat.question) + said("assistant", turn.render())


def agent_block(index: int, count: int = BLOCK_EXAMPLES, *, seed: int = SEED) -> list[str]:
    """Generate one block of the agent's conversations.

    Args:
        index: Which block.
        count: How many conversations.
        seed: The seed of the world and the corpus.

    Returns:
        Rendered conversations, in training order before shuffling.
    """
    world = build_world(seed)
    topics = Topics.of(world)
    rng = random.Random(f"agent:{seed}:{index}")
    made: list[str] = []
    for _ in range(count):
        if rng.random() < _NEUTRAL_SHARE:
            made.append(_neutral(rng))
            continue
        kind = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
        weights = CONDITIONS[kind]
        condition = rng.choices(list(weights), list(weights.values()))[0]
        source = "plain" if condition == "plain" else "instructed"
        case = make_case(kind, condition, topics.draw(source, rng), rng, training=True)
        made.append(_text(case, written(case, rng), rng))
    return made


def texts_sha256(texts: Sequence[str]) -> str:
    """The hash of some rendered conversations."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
