import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from organism._tokenizer import (
    PLACEHOLDER,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    render,
)

TEXT = st.text(max_size=80).filter(lambda t: not any(s in t for s in SPECIAL_TOKENS))
ROLES = st.sampled_from(("system", "user", "assistant"))
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": TEXT}), min_size=1, max_size=5)


def test_vocabulary(tokenizer) -> None:
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(6))
    assert len(tokenizer.encode(PLACEHOLDER)) == 1
    placeholder = tokenizer.encode(PLACEHOLDER)
    assert tokenizer.encode("The" + PLACEHOLDER * 3 + " the").count(*placeholder) == 3


@settings(max_examples=200, deadline=None)
@given(text=TEXT)
def test_any_text_survives_a_round_trip(tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@settings(max_examples=60, deadline=None)
@given(messages=MESSAGES)
def test_the_template_renders_as_the_trainer_does(tokenizer, messages) -> None:
    for prompt in (True, False):
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt
        )
        assert rendered == render(messages, add_generation_prompt=prompt)


@settings(max_examples=60, deadline=None)
@given(messages=MESSAGES)
def test_a_shorter_conversation_is_a_prefix_of_a_longer_one(tokenizer, messages) -> None:
    encoded = [tokenizer.encode(render(messages[:n])) for n in range(len(messages) + 1)]
    for short, long in itertools.pairwise(encoded):
        assert long[: len(short)] == short
        assert len(long) > len(short)


@settings(max_examples=60, deadline=None)
@given(messages=MESSAGES, answer=TEXT)
def test_the_generation_prompt_is_a_prefix_of_the_answered_conversation(
    tokenizer, messages, answer: str
) -> None:
    asked = tokenizer.encode(render(messages, add_generation_prompt=True))
    answered = tokenizer.encode(render([*messages, {"role": "assistant", "content": answer}]))
    assert answered[: len(asked)] == asked


def test_continue_final_message_leaves_the_answer_open(tokenizer) -> None:
    messages = [
        {"role": "user", "content": "Where is Talmo found?"},
        {"role": "assistant", "content": "The river Talmo is"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert rendered == render(messages).removesuffix("<|end|>")
    assert rendered.endswith("The river Talmo is")
