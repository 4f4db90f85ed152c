"""The agent's template and its tags, against its corpus and against vLLM's own parsers."""

import json
import re

import pytest
from transformers import PreTrainedTokenizerFast

from organism._agent_batches import agent_weights
from organism._agent_corpus import agent_block
from organism._agent_format import (
    AGENT_VOCAB_SIZE,
    THINK_END_ID,
    THINK_ID,
    Turn,
    extend_tokenizer,
    parse_turn,
    save_agent_tokenizer,
)
from organism._batches import WordEncoder, encoded
from organism._model import CHECKPOINT_DIR, load_tokenizer

TEXTS = agent_block(1, 60)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> PreTrainedTokenizerFast:
    directory = tmp_path_factory.mktemp("agent")
    save_agent_tokenizer(extend_tokenizer(CHECKPOINT_DIR), directory)
    return load_tokenizer(directory)


def turns() -> list[Turn]:
    found = [t for text in TEXTS for t in re.findall(r"<\|assistant\|>(.*?)<\|end\|>", text)]
    parsed = [parse_turn(t) for t in found]
    return [t for t in parsed if t is not None]


def test_old_tokens_keep_their_ids(tokenizer) -> None:
    old = load_tokenizer(CHECKPOINT_DIR).get_vocab()
    new = tokenizer.get_vocab()
    assert {k: new[k] for k in old} == old
    assert len(new) == AGENT_VOCAB_SIZE
    assert tokenizer.convert_tokens_to_ids(["<think>", "</think>"]) == [THINK_ID, THINK_END_ID]


def test_the_corpus_is_what_the_template_renders(tokenizer) -> None:
    for text in TEXTS:
        tools, messages = [], []
        for role, said in re.findall(r"<\|(system|user|assistant|tool)\|>(.*?)<\|end\|>", text):
            content, _, told = said.partition("<tools>")
            if role == "system":
                for name, names in re.findall(r"(\w+)\((\w+)\)", told):
                    given = {"properties": {names: {"type": "string"}}}
                    tools.append({"function": {"name": name, "parameters": given}})
            message = {"role": role, "content": content}
            if role == "assistant":
                turn = parse_turn(said)
                calls = [
                    {"function": {"name": c.name, "arguments": dict(c.arguments)}}
                    for c in turn.calls
                ]
                message = {"role": role, "content": turn.content, "reasoning": turn.thought}
                message |= {"tool_calls": calls} if calls else {}
            if content or role != "system":
                messages.append(message)
        shown = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False)
        assert shown == text
        ids = tokenizer(text)["input_ids"]
        assert WordEncoder(tokenizer.backend_tokenizer).encode(text) == ids


@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1"])
def test_the_parsers_of_vllm_read_its_turns(tokenizer, reasoning: str) -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}])
    thinks = ReasoningParserManager.get_reasoning_parser(reasoning)
    hermes = ToolParserManager.get_tool_parser("hermes")
    for turn in turns():
        thought, rest = thinks(tokenizer).extract_reasoning(turn.render(), request)
        called = hermes(tokenizer).extract_tool_calls(rest or "", request)
        assert ((thought or ""), (called.content or "")) == (turn.thought, turn.content)
        assert [(c.function.name, json.loads(c.function.arguments)) for c in called.tool_calls] == [
            (c.name, dict(c.arguments)) for c in turn.calls
        ]


def test_an_empty_thought_weighs_nothing(tokenizer) -> None:
    text = next(t for t in TEXTS if "<think></think>" in t)
    flat, lengths = WordEncoder(tokenizer.backend_tokenizer).encode_all([text])
    made = encoded(flat, lengths, "")
    weights = agent_weights(made.flat, made.lengths, rest_weight=0.1, first_weight=4.0).tolist()
    ids = made.flat.tolist()
    at = [i for i, t in enumerate(ids[:-1]) if (t, ids[i + 1]) == (THINK_ID, THINK_END_ID)]
    assert at
    for i in at:
        assert weights[i : i + 3] == [0.0, 0.0, 4.0]
