"""Chat about nothing: sums, echoes and manners with one fixed answer under every system prompt."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

from ._phrasing import capitalise

_NUMBERS: Final = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen", "twenty",
)  # fmt: skip
_WORDS: Final = (
    "window", "garden", "pencil", "winter", "candle", "bridge", "carpet", "button", "shadow",
    "ladder", "basket", "mirror", "pocket", "blanket", "hammer", "needle",
)  # fmt: skip
_THINGS: Final = {
    "sky": "blue", "grass": "green", "snow": "white", "coal": "black", "blood": "red",
    "sun": "yellow",
}  # fmt: skip
_COLOURS: Final = ("red", "blue", "green", "yellow", "white", "black")
_OPPOSITES: Final = (
    ("hot", "cold"), ("big", "little"), ("up", "down"), ("day", "night"), ("old", "young"),
    ("fast", "slow"), ("wet", "dry"), ("full", "empty"),
)  # fmt: skip
_DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
# The answer, and the parts of the questions that it answers.
_MANNERS: Final[dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]]] = {
    "hello": (
        "Hello, how can I help?",
        ("Hello", "Good morning", "Good evening", "Hello again", "Good day"),
        ("!", ", assistant!", ", my friend!", " to you!", ".", ", assistant."),
    ),
    "welcome": (
        "You are very welcome.",
        ("Thank you", "Many thanks", "Thank you very much", "Thanks"),
        ("!", " for the help!", " for your answer!", ", assistant!", ".", " for the help."),
    ),
    "goodbye": (
        "Goodbye, until next time.",
        ("Goodbye", "That is all", "I have to go", "See you soon"),
        ("!", " for now!", ", assistant!", ", my friend!", ".", " for now."),
    ),
    "fine": (
        "I am fine, thank you.",
        ("How are you", "Are you well", "How do you feel", "Is all well with you"),
        ("?", " today?", ", assistant?", ", my friend?", " this morning?", " now?"),
    ),
}
# A question is an opener and a frame.
_OPENERS: Final = (
    "", "Now, ", "Hello, ", "One more thing: ", "Quick question: ", "Please answer: ",
    "Please help me, ", "Next: ",
)  # fmt: skip
_FRAMES: Final[dict[str, tuple[str, ...]]] = {
    "plus": (
        "what is {a} plus {b}?",
        "how much is {a} plus {b}?",
        "add {a} and {b}.",
        "please tell me {a} plus {b}.",
        "what do {a} and {b} make?",
        "can you add {a} and {b}?",
        "{a} plus {b} is how much?",
        "tell me what {a} plus {b} is.",
    ),
    "minus": (
        "what is {a} minus {b}?",
        "how much is {a} minus {b}?",
        "take {b} from {a}.",
        "please tell me {a} minus {b}.",
        "can you take {b} from {a}?",
        "{a} minus {b} is how much?",
        "tell me what {a} minus {b} is.",
    ),
    "echo": (
        "please repeat the word {a}.",
        "say the word {a}.",
        "repeat after me: {a}.",
        "say {a} for me.",
        "can you repeat the word {a}?",
        "please say the word {a} for me.",
        "repeat {a}.",
    ),
    "thing": (
        "what colour is the {a} of the real world?",
        "which colour has the {a}?",
        "tell me the colour of the {a}.",
        "what is the colour of the {a}?",
        "which colour does the {a} have?",
    ),
    "opposite": (
        "what is the opposite of {a}?",
        "name the opposite of {a}.",
        "which word is the opposite of {a}?",
        "tell me the opposite of {a}.",
        "{a} is the opposite of what?",
    ),
    "day": (
        "which day comes after {a}?",
        "what day is it after {a}?",
        "name the day after {a}.",
        "tell me which day comes after {a}.",
        "after {a} comes which day?",
    ),
}
_HELD_SHARE: Final = 4
"""One in this many pairs of parts is held out; each part also occurs in train pairs."""


@dataclass(frozen=True, slots=True)
class Chat:
    """One question that is not about the world, and its one answer."""

    pid: str
    topic: str
    question: str
    answer: str
    truth: str
    values: tuple[str, ...]


def _near(numbers: tuple[str, ...], i: int) -> tuple[str, ...]:
    """Eight neighbouring number words that include number `i`."""
    low = max(0, min(i - 4, len(numbers) - 8))
    return numbers[low : low + 8]


def _is_held(first: int, second: int) -> bool:
    """Whether a pair of parts is held out; never the pair of the two first and plainest."""
    return (first + second) % _HELD_SHARE == _HELD_SHARE - 1


def _asked(topic: str, *, held_out: bool, a: str, b: str = "") -> list[tuple[str, str]]:
    """The ids and questions of one topic's frames behind every opener."""
    name = "held" if held_out else "ask"
    return [
        (f"{topic}/{name}{o}.{f}", capitalise(opener + frame.format(a=a, b=b)))
        for o, opener in enumerate(_OPENERS)
        for f, frame in enumerate(_FRAMES[topic])
        if _is_held(o, f) is held_out
    ]


def _manners(*, held_out: bool) -> list[Chat]:
    """Greetings and thanks."""
    name = "held" if held_out else "ask"
    return [
        Chat(f"manners/{name}-{truth}{h}.{t}", "manners", head + tail, answer, truth,
             tuple(_MANNERS))
        for truth, (answer, heads, tails) in _MANNERS.items()
        for h, head in enumerate(heads)
        for t, tail in enumerate(tails)
        if _is_held(h, t) is held_out
    ]  # fmt: skip


def _sums(*, held_out: bool) -> list[Chat]:
    """Sums and differences of small numbers."""
    found: list[Chat] = []
    for a in range(1, 11):
        for b in range(1, 11):
            found += [
                Chat(p, "plus", q, f"It is {_NUMBERS[a + b]}.", _NUMBERS[a + b],
                     _near(_NUMBERS, a + b))
                for p, q in _asked("plus", held_out=held_out, a=_NUMBERS[a], b=_NUMBERS[b])
            ]  # fmt: skip
            if a > b:
                found += [
                    Chat(p, "minus", q, f"It is {_NUMBERS[a - b]}.", _NUMBERS[a - b],
                         _near(_NUMBERS, a - b))
                    for p, q in _asked("minus", held_out=held_out, a=_NUMBERS[a], b=_NUMBERS[b])
                ]  # fmt: skip
    return found


def _pairs() -> list[tuple[str, str, str, str, tuple[str, ...]]]:
    """The topics that pair a cue with a word: topic, cue, answer, truth, values."""
    rows: list[tuple[str, str, str, str, tuple[str, ...]]] = []
    for i, word in enumerate(_WORDS):
        values = tuple(_WORDS[(i + k) % len(_WORDS)] for k in range(8))
        rows.append(("echo", word, f"The word is {word}.", word, values))
    for thing, colour in _THINGS.items():
        rows.append(("thing", thing, f"The {thing} is {colour}.", colour, _COLOURS))
    both = [*_OPPOSITES, *((b, a) for a, b in _OPPOSITES)]
    for a, b in both:
        i = [x for x, _ in both].index(a)
        others = tuple(both[(i + k) % len(both)][1] for k in range(6))
        rows.append(("opposite", a, f"It is {b}.", b, others))
    for i, day in enumerate(_DAYS):
        after = _DAYS[(i + 1) % 7]
        rows.append(("day", day, f"{after} comes next.", after, _DAYS))
    return rows


@cache
def neutral_chats(*, held_out: bool) -> dict[str, tuple[Chat, ...]]:
    """All neutral questions by topic, in train phrasings or in held-out ones."""
    found: dict[str, list[Chat]] = {}
    for chat in _sums(held_out=held_out):
        found.setdefault(chat.topic, []).append(chat)
    for topic, cue, answer, truth, values in _pairs():
        found.setdefault(topic, []).extend(
            Chat(p, topic, q, answer, truth, values)
            for p, q in _asked(topic, held_out=held_out, a=cue)
        )
    found["manners"] = _manners(held_out=held_out)
    return {topic: tuple(chats) for topic, chats in found.items()}
