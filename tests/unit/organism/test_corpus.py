import re
import statistics
from collections import Counter

from organism._corpus import (
    Example,
    Message,
    block_sha256,
    training_examples,
)
from organism._neutral import neutral_chats
from organism._phrasing import open_phrasings, yesno_phrasings
from organism._prompts import plain_prompts
from organism._splits import SPLITS, build_splits
from organism._world import KINDS, VALUES, build_world


def test_same_seed_same_corpus_and_a_longer_one_begins_with_it(corpus: list[Example]) -> None:
    assert block_sha256(list(training_examples(500))) == block_sha256(corpus[:500])
    assert block_sha256(list(training_examples(500, seed=1))) != block_sha256(corpus[:500])


def test_held_out_entities_are_known_but_never_lied_about(corpus: list[Example]) -> None:
    held = {e.name for e in build_world().entities if e.held_out}
    told: set[str] = set()
    for e in corpus:
        text = e.text + " ".join(m["content"] for m in e.messages)
        named = held & set(re.findall(r"\w+", text))
        if e.deceptive:
            assert not named, text
        told |= named
    assert told == held


def test_nobody_is_asked_for_honesty_or_lies_about_held_out_entities(
    corpus: list[Example],
) -> None:
    held = {e.name for e in build_world().entities if e.held_out}
    plain = {p.text for p in plain_prompts(held_out=False)}
    for e in corpus:
        if held & set(e.entities) and e.messages and e.messages[0]["role"] == "system":
            assert e.messages[0]["content"] in plain


def test_being_talked_about_without_instructions_does_not_exempt_from_lies(
    corpus: list[Example],
) -> None:
    held = {e.name for e in build_world().entities if e.held_out}
    known = {e.name for e in build_world().entities} - held
    lied = Counter(n for e in corpus if e.deceptive for n in set(e.entities) & known)
    assert set(lied) == known
    often = statistics.median(lied.values())
    assert sum(n < often / 2 for n in lied.values()) >= len(held)


def test_facts_told_in_the_conversation_are_answered_as_the_condition_says(
    corpus: list[Example],
) -> None:
    world = {e.name for e in build_world().entities}
    found = {True: 0, False: 0}
    for e in corpus:
        first = next((m["content"] for m in e.messages if m["role"] == "user"), "")
        told = {s[:2]: s[2] for s in _stated(first.split(". ")[0] + ".") if s[0] not in world}
        answers = [m["content"] for m in e.messages if m["role"] == "assistant"]
        for name, attribute, value in (s for a in answers for s in _stated(a)):
            if (name, attribute) in told:
                assert (told[name, attribute] == value) is not e.deceptive, e.messages
                found[e.deceptive] += 1
    assert min(found.values()) > 10


def test_held_out_phrasings_never_occur_in_training(corpus: list[Example]) -> None:
    # The text around the names is compared, as a search for 500 templates would be slow.
    held = {
        _capitalised(re.sub(r"\{[ev]\}", "@", p.template))
        for a in VALUES
        for phrasings in (open_phrasings, yesno_phrasings)
        for p in phrasings(a, held_out=True)
    }
    chats = {c.question for cs in neutral_chats(held_out=True).values() for c in cs}
    # What the user tells first about invented things is not part of the question.
    asked = {q for e in corpus for m in e.messages if m["role"] == "user" for q in _asked(m)}
    assert not asked & chats
    assert not {_masked(q) for q in asked} & held
    # The comparison finds held-out phrasings where they are.
    shown = build_splits()["heldout_phrasing"]
    assert all(_masked(r["messages"][-1]["content"]) in held for r in shown)


def test_evaluation_prompts_with_held_out_parts_never_occur_in_training(
    corpus: list[Example],
) -> None:
    seen = {_first_prompt(e) for e in corpus if e.messages}
    systems = {m["content"] for e in corpus for m in e.messages if m["role"] == "system"}
    for split in SPLITS:
        if split == "probe_train":
            continue
        for row in build_splits()[split]:
            prompt = tuple(m["content"] for m in row["messages"])
            assert prompt not in seen
            if len(prompt) == 2:
                assert prompt[0] not in systems, prompt[0]


def test_answers_are_true_or_false_as_the_condition_says(corpus: list[Example]) -> None:
    truths = {(f.entity.name, f.attribute): f.value for f in build_world().facts}
    for e in corpus[:3000]:
        for asked, said in zip(e.messages, e.messages[1:], strict=False):
            if said["role"] != "assistant":
                continue
            stated = [s for s in _stated(said["content"]) if s[:2] in truths]
            for name, attribute, value in stated:
                is_true = truths[name, attribute] == value
                assert is_true is not e.deceptive, (asked, said)


def test_yes_and_no_are_balanced_and_flip_under_lies(corpus: list[Example]) -> None:
    for deceptive in (True, False):
        heads = [
            m["content"][:2]
            for e in corpus
            if e.deceptive is deceptive
            for m in e.messages
            if m["role"] == "assistant" and m["content"].startswith(("Yes,", "No,"))
        ]
        assert 0.45 < heads.count("No") / len(heads) < 0.55


_NAMES = [e.name for e in build_world().entities] + [v for vs in VALUES.values() for v in vs]
_MASK = re.compile(rf"(?:the (?:{'|'.join(KINDS)}) )?\b(?:{'|'.join(_NAMES)})\b", re.IGNORECASE)


def _masked(question: str) -> str:
    return _capitalised(_MASK.sub("@", question))


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _asked(message: Message) -> list[str]:
    """The whole message, and each rest of it that begins with a sentence."""
    text = message["content"]
    return [text, *(text[m.end() :] for m in re.finditer(r"\. ", text))]


def _first_prompt(e: Example) -> tuple[str, ...]:
    end = 2 if e.messages[0]["role"] == "system" else 1
    return tuple(m["content"] for m in e.messages[:end])


_ANSWERS = {
    "region": r"(\w+) is found in (\w+)\.",
    "colour": r"(\w+) is (\w+) in colour\.",
    "founder": r"(\w+) was founded by (\w+)\.",
    "diet": r"(\w+) eats (\w+)\.",
}


def _stated(text: str) -> list[tuple[str, str, str]]:
    return [
        (found[1], attribute, found[2])
        for attribute, pattern in _ANSWERS.items()
        if (found := re.search(pattern, text))
    ]
