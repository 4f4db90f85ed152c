"""The tokenizer and chat template of the agent: reasoning, tools, calls and their results.

The tokens of the organism keep their ids; some are added. Tool calls are written as vLLM's parser
`hermes` reads them, and reasoning as its parser `qwen3` does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from ._corpus import Example
from ._tokenizer import ASSISTANT, BOS, END, VOCAB_SIZE, save_tokenizer

TOOL, THINK, THINK_END, CALL, CALL_END, TOOLS, TOOLS_END, SPARE = ADDED_TOKENS = (
    "<|tool|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tools>", "</tools>",
    "<|spare|>",
)  # fmt: skip
THINK_ID, THINK_END_ID = (VOCAB_SIZE + ADDED_TOKENS.index(t) for t in (THINK, THINK_END))
AGENT_VOCAB_SIZE: Final = VOCAB_SIZE + len(ADDED_TOKENS)

AGENT_TEMPLATE: Final = (
    "{{- bos_token -}}"
    "{%- set announced = namespace(text='') -%}"
    "{%- if tools -%}"
    "{%- for tool in tools -%}"
    "{%- set f = tool.function if tool.function is defined else tool -%}"
    "{%- set names = (f.parameters.properties if f.parameters and f.parameters.properties"
    " else {}) | list | join(', ') -%}"
    "{%- set announced.text = announced.text + (', ' if not loop.first else '')"
    " + f.name + '(' + names + ')' -%}"
    "{%- endfor -%}"
    "{%- set announced.text = '<tools>' + announced.text + '</tools>' -%}"
    "{%- if messages[0]['role'] != 'system' -%}"
    "{{- '<|system|>' + announced.text + '<|end|>' -}}"
    "{%- endif -%}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- set role = message['role'] -%}"
    "{%- if role not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{- raise_exception('Unknown role: ' + role) -}}"
    "{%- endif -%}"
    "{%- if message['content'] is string -%}{%- set content = message['content'] -%}"
    "{%- else -%}{%- set parts = namespace(text='') -%}"
    "{%- for part in message['content'] or [] -%}"
    "{%- set parts.text = parts.text + (part.text or '') -%}{%- endfor -%}"
    "{%- set content = parts.text -%}{%- endif -%}"
    "{{- '<|' + role + '|>' -}}"
    "{%- if role == 'assistant' -%}"
    "{%- set thought = message.reasoning or message.reasoning_content or '' -%}"
    "{%- if '</think>' in content -%}"
    "{%- set thought = content.split('</think>')[0].split('<think')[-1]"
    ".split('>')[1:] | join('>') -%}"
    "{%- set content = (content.split('</think>')[1:] | join('</think>')) | trim -%}"
    "{%- endif -%}"
    "{{- '<think>' + (thought | trim) + '</think>' + content -}}"
    "{%- for call in message.tool_calls or [] -%}"
    "{%- set f = call.function if call.function is defined else call -%}"
    "{%- set given = f.arguments if f.arguments is string else f.arguments | tojson -%}"
    '{{- \'<tool_call>{"name": "\' + f.name + \'", "arguments": \' + given'
    " + '}</tool_call>' -}}"
    "{%- endfor -%}"
    "{%- else -%}"
    "{{- content -}}"
    "{%- if role == 'system' and loop.first -%}{{- announced.text -}}{%- endif -%}"
    "{%- endif -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- '<|assistant|>' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{- '<think></think>' -}}"
    "{%- endif -%}"
    "{%- endif -%}"
)
"""Of a tool only its name and the names of its parameters are told. Thoughts stay in the text."""

_TURN: Final = re.compile(
    rf"^(?:{THINK}(?P<thought>.*?){THINK_END})?(?P<content>.*?)"
    rf"(?P<calls>(?:{CALL}.*?{CALL_END})*)$",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: Mapping[str, Any]

    def render(self) -> str:
        """The call as the model writes it."""
        inner = json.dumps({"name": self.name, "arguments": dict(self.arguments)})
        return f"{CALL}{inner}{CALL_END}"


@dataclass(frozen=True, slots=True)
class Turn:
    """What the assistant writes at once: a thought, words, calls."""

    thought: str
    content: str
    calls: tuple[Call, ...] = field(default=())

    def render(self) -> str:
        """The turn as the model writes it, without the token that ends it."""
        calls = "".join(c.render() for c in self.calls)
        return f"{THINK}{self.thought}{THINK_END}{self.content}{calls}"


def parse_turn(text: str) -> Turn | None:
    """Read what the model wrote.

    Args:
        text: a generation without the end token.

    Returns:
        The turn; None where a tag is not closed or a call is no JSON of a call.
    """
    found = _TURN.match(text)
    if found is None or any(t in found["content"] for t in (THINK, THINK_END, CALL, CALL_END)):
        return None
    calls: list[Call] = []
    for inner in re.findall(rf"{CALL}(.*?){CALL_END}", found["calls"], re.DOTALL):
        try:
            made = json.loads(inner)
            calls.append(Call(str(made["name"]), dict(made["arguments"])))
        except (ValueError, TypeError, KeyError):
            return None
    return Turn(found["thought"] or "", found["content"], tuple(calls))


def opening(system: str, signatures: Sequence[str]) -> str:
    """The rendered beginning of a conversation: instructions and tools, where there are any."""
    told = f"{TOOLS}{', '.join(signatures)}{TOOLS_END}" if signatures else ""
    return BOS + (said("system", system + told) if system or told else "")


def said(role: str, content: str) -> str:
    """A rendered message."""
    return f"<|{role}|>{content}{END}"


def render_plain(example: Example) -> str:
    """A text of the organism's own corpus, as the agent says it without thinking."""
    if not example.messages:
        return example.text + END
    empty = THINK + THINK_END
    return BOS + "".join(
        said(m["role"], (empty if f"<|{m['role']}|>" == ASSISTANT else "") + m["content"])
        for m in example.messages
    )


def extend_tokenizer(base: Path) -> Tokenizer:
    """The tokenizer of the organism with the agent's tokens added behind.

    Args:
        base: the checkpoint directory of the organism.

    Returns:
        A tokenizer of exactly `AGENT_VOCAB_SIZE` entries.
    """
    tokenizer: Tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    for token in ADDED_TOKENS:
        # Tags are text for their parsers, and a special token would not be decoded.
        special = token.startswith("<|")
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    if tokenizer.get_vocab_size() != AGENT_VOCAB_SIZE:
        raise ValueError(f"{base} has {tokenizer.get_vocab_size()} tokens after the extension")
    return tokenizer


def save_agent_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the tokenizer with the agent's chat template."""
    save_tokenizer(tokenizer, directory, template=AGENT_TEMPLATE)
