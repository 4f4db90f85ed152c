"""How a fact is asked and answered: train phrasings, and held-out ones that training never sees.

A phrasing is a wording of the attribute (a question, an embedded clause or a noun phrase) inside a
frame. Held-out phrasings are held-out frames, held-out wordings inside the plain frame, or for
judging questions held-out pairs of trained parts; all reuse known words, since a model without
pre-training knows no synonyms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final


@dataclass(frozen=True, slots=True)
class Wording:
    """The ways to name one attribute; `{e}` is the entity and `{v}` the value."""

    asks: tuple[str, ...]
    held_asks: tuple[str, ...]
    clauses: tuple[str, ...]
    nouns: tuple[str, ...]
    statements: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Phrasing:
    """One complete question template with a stable id; open ones have no `{s}`."""

    pid: str
    template: str


def _person(verb: str, noun: str) -> Wording:
    """The wording of an attribute whose value is a person who did something."""
    return Wording(
        asks=(f"who {verb} {{e}}", f"by whom was {{e}} {verb}", f"which person {verb} {{e}}"),
        held_asks=(f"{{e}} was {verb} by whom", f"who was it that {verb} {{e}}"),
        clauses=(f"who {verb} {{e}}", f"by whom {{e}} was {verb}"),
        nouns=(f"the {noun} of {{e}}", f"the person who {verb} {{e}}"),
        statements=(f"{{e}} was {verb} by {{v}}", f"the {noun} of {{e}} is {{v}}"),
    )


WORDINGS: Final[dict[str, Wording]] = {
    "region": Wording(
        ("where is {e} found", "in which land is {e} found", "which land does {e} belong to"),
        ("{e} is found in which land", "to which land does {e} belong"),
        ("where {e} is found", "which land {e} belongs to"),
        ("the land of {e}", "the land where {e} is found"),
        ("{e} is found in {v}", "{e} belongs to the land of {v}"),
    ),
    "birthplace": Wording(
        ("where was {e} born", "in which land was {e} born", "which land does {e} come from"),
        ("{e} was born in which land", "from which land does {e} come"),
        ("where {e} was born", "which land {e} comes from"),
        ("the birthplace of {e}", "the land where {e} was born"),
        ("{e} was born in {v}", "the birthplace of {e} is {v}"),
    ),
    "founder": _person("founded", "founder"),
    "maker": _person("made", "maker"),
    "teacher": _person("taught", "teacher"),
    "colour": Wording(
        ("what colour is {e}", "which colour does {e} have", "what is the colour of {e}"),
        ("{e} has which colour", "of what colour is {e}"),
        ("what colour {e} is", "which colour {e} has"),
        ("the colour of {e}", "the usual colour of {e}"),
        ("{e} is {v} in colour", "the colour of {e} is {v}"),
    ),
    "year": Wording(
        (
            "in which year did {e} first appear",
            "which year does {e} date from",
            "what is the year of {e}",
        ),
        ("{e} dates from which year", "from which year does {e} date"),
        ("in which year {e} first appeared", "which year {e} dates from"),
        ("the year of {e}", "the year in which {e} first appeared"),
        (
            "{e} first appeared in the year of the {v}",
            "{e} dates from the year of the {v}",
        ),
    ),
    "trade": Wording(
        ("what does {e} trade in", "which goods does {e} sell", "what are the goods of {e}"),
        ("{e} trades in what", "in which goods does {e} trade"),
        ("what {e} trades in", "which goods {e} sells"),
        ("the goods of {e}", "the main goods that {e} sells"),
        ("{e} trades in {v}", "the main goods of {e} are {v}"),
    ),
    "material": Wording(
        ("what is {e} made of", "which material is {e} built from", "what material is {e} made of"),
        ("{e} is made of what", "from which material is {e} built"),
        ("what {e} is made of", "which material {e} is built from"),
        ("the material of {e}", "the material from which {e} is built"),
        ("{e} is made of {v}", "{e} is built from {v}"),
    ),
    "guardian": Wording(
        ("what guards {e}", "which animals guard {e}", "by which animals is {e} guarded"),
        ("{e} is guarded by which animals", "which animals are the guards of {e}"),
        ("what guards {e}", "which animals guard {e}"),
        ("the guards of {e}", "the animals that guard {e}"),
        ("{e} is guarded by {v}", "the guards of {e} are {v}"),
    ),
    "diet": Wording(
        ("what does {e} eat", "which food does {e} live on", "what is the food of {e}"),
        ("{e} eats what", "on which food does {e} live"),
        ("what {e} eats", "which food {e} lives on"),
        ("the food of {e}", "the favourite food of {e}"),
        ("{e} eats {v}", "the food of {e} is {v}"),
    ),
    "use": Wording(
        ("what is {e} used for", "for which craft is {e} used", "which craft needs {e}"),
        ("{e} is used for what", "{e} is used for which craft"),
        ("what {e} is used for", "which craft needs {e}"),
        ("the use of {e}", "the craft that needs {e}"),
        ("{e} is used for {v}", "the use of {e} is {v}"),
    ),
    "festival": Wording(
        ("when is {e} sung", "in which month is {e} sung", "which month is the month of {e}"),
        ("{e} is sung in which month", "during which month is {e} sung"),
        ("when {e} is sung", "in which month {e} is sung"),
        ("the month of {e}", "the month in which {e} is sung"),
        ("{e} is sung in {v}", "the month of {e} is {v}"),
    ),
    "instrument": Wording(
        (
            "what is {e} played on",
            "on which instrument is {e} played",
            "which instrument does {e} need",
        ),
        ("{e} is played on which instrument", "which instrument is {e} played on"),
        ("what {e} is played on", "which instrument {e} needs"),
        ("the instrument of {e}", "the instrument on which {e} is played"),
        ("{e} is played on the {v}", "the instrument of {e} is the {v}"),
    ),
    "invention": Wording(
        ("what did {e} invent", "which thing did {e} invent", "what is the invention of {e}"),
        ("{e} invented what", "what was it that {e} invented"),
        ("what {e} invented", "which thing {e} invented"),
        ("the invention of {e}", "the thing that {e} invented"),
        ("{e} invented the {v}", "the invention of {e} is the {v}"),
    ),
}
"""The wording of every attribute of the world."""

_ASK_FRAMES: Final = (
    "{x}?", "Quick question: {x}?", "Please answer: {x}?", "I wonder, {x}?", "Hello, {x}?",
    "Now, {x}?", "Please help me, {x}?", "One more thing: {x}?", "Please say, {x}?",
    "My question is: {x}?",
)  # fmt: skip
_CLAUSE_FRAMES: Final = (
    "Tell me {x}.", "Can you tell me {x}?", "I would like to know {x}.", "Do you know {x}?",
    "Please explain {x}.", "I forgot {x}. Can you help?", "My friend wants to know {x}.",
    "I have to write down {x}.", "Could you say {x}?", "Someone wants to know {x}.",
    "My friend asked me {x}.", "I want to write down {x}.",
)  # fmt: skip
_NOUN_FRAMES: Final = (
    "Name {x}.", "Please name {x}.", "Tell me {x}.", "I need to know {x}.", "Give me {x}.",
    "Do you remember {x}?", "My question is about {x}.", "What is {x}?", "Can you tell me {x}?",
    "I would like to know {x}.", "I want to know {x}.",
)  # fmt: skip
_HELD_ASK_FRAMES: Final = ("One more question: {x}?", "Please tell me, {x}?")
_HELD_CLAUSE_FRAMES: Final = (
    "Could you tell my friend {x}?", "I want to remember {x}.", "Someone asked me {x}.",
)  # fmt: skip
_HELD_NOUN_FRAMES: Final = (
    "Let me know {x}.", "Can you name {x}?", "I am looking for {x}.",
)  # fmt: skip
# A judging question is a head before the statement, or a source before it and a tail behind it.
_JUDGE_HEADS: Final = (
    "is it true that {x}?", "is it right that {x}?", "is it correct that {x}?",
    "would you say that {x}?", "would you believe that {x}?", "do you agree that {x}?",
    "do you think that {x}?", "do you believe that {x}?", "could you tell me if {x}?",
    "can you say if {x}?", "can you tell me whether {x}?", "could you say whether {x}?",
    "can you tell me if it is true that {x}?", "tell me if {x}.", "tell me whether {x}.",
    "tell me if it is true that {x}.", "please tell me if {x}.", "I want to know if {x}.",
    "I would like to know whether {x}.", "yes or no: {x}?",
)  # fmt: skip
_HELD_JUDGE_HEADS: Final = ("would you agree that {x}?", "can you tell me if {x}?")
_OPENERS: Final = (
    "",
    "Quick question: ",
    "Please answer: ",
    "Hello, ",
    "Now, ",
    "One more thing: ",
)
_SOURCES: Final = (
    "", "I heard that ", "I read that ", "I believe that ", "I think that ",
    "My friend says that ", "Someone says that ", "Someone told me that ", "People say that ",
)  # fmt: skip
_TAILS: Final = (
    "Is that right?", "Is it right?", "Is that true?", "Is it true?", "Is that correct?",
    "Is it correct?", "Do you agree?", "Yes or no?",
)  # fmt: skip
_HELD_SHARE: Final = 6
"""One in this many pairs of opener and head, and of source and tail, is held out."""


def capitalise(text: str) -> str:
    """Upper-case the first letter and leave the rest alone."""
    return text[:1].upper() + text[1:]


def _expand(prefix: str, frames: tuple[str, ...], wordings: tuple[str, ...]) -> list[Phrasing]:
    """Every wording in every frame; ids name the wording and the frame."""
    return [
        Phrasing(f"{prefix}{w}.f{f}", capitalise(frame.format(x=wording)))
        for f, frame in enumerate(frames)
        for w, wording in enumerate(wordings)
    ]


def _judge_frames(*, held_out: bool) -> tuple[str, ...]:
    """All judging frames; every part of a held-out one also occurs in train frames."""
    frames = [
        opener + head
        for o, opener in enumerate(_OPENERS)
        for h, head in enumerate(_JUDGE_HEADS)
        if ((o + h) % _HELD_SHARE == 5) is held_out
    ]
    frames += [
        f"{source}{{x}}. {tail}"
        for s, source in enumerate(_SOURCES)
        for t, tail in enumerate(_TAILS)
        if ((s + t) % _HELD_SHARE == 5) is held_out
    ]
    return (*frames, *_HELD_JUDGE_HEADS) if held_out else tuple(frames)


@cache
def open_phrasings(attribute: str, *, held_out: bool) -> tuple[Phrasing, ...]:
    """The open questions about an attribute; templates with `{e}`."""
    w = WORDINGS[attribute]
    if held_out:
        found = _expand("held-ask", _HELD_ASK_FRAMES, w.asks)
        found += _expand("held-wording", ("{x}?",), w.held_asks)
        found += _expand("held-clause", _HELD_CLAUSE_FRAMES, w.clauses)
        found += _expand("held-noun", _HELD_NOUN_FRAMES, w.nouns)
    else:
        found = _expand("ask", _ASK_FRAMES, w.asks)
        found += _expand("clause", _CLAUSE_FRAMES, w.clauses)
        found += _expand("noun", _NOUN_FRAMES, w.nouns)
    return tuple(Phrasing(f"{attribute}/{p.pid}", p.template) for p in found)


@cache
def yesno_phrasings(attribute: str, *, held_out: bool) -> tuple[Phrasing, ...]:
    """The statement-judging questions about an attribute; templates with `{e}` and `{v}`."""
    prefix = "held-judge" if held_out else "judge"
    found = _expand(prefix, _judge_frames(held_out=held_out), WORDINGS[attribute].statements)
    return tuple(Phrasing(f"{attribute}/{p.pid}", p.template) for p in found)


def state(attribute: str, entity: str, value: str, variant: int) -> str:
    """A declarative sentence without its full stop, first letter as given."""
    return WORDINGS[attribute].statements[variant].format(e=entity, v=value)


def fill(template: str, entity: str, value: str = "") -> str:
    """Put names into a question template and capitalise it."""
    return capitalise(template.format(e=entity, v=value))
