"""Where sites are in a block, told from the source and from modules, without an engine."""

from __future__ import annotations

import ast
import importlib.util
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from inspect_lens._vllm.model.sites import LOCATORS, middle_of_forward
from inspect_lens.spec import SITES


def test_every_site_has_a_locator() -> None:
    assert tuple(LOCATORS) == SITES


def middle(body: str) -> str | None:
    source = "def forward(self, hidden_states, residual):\n" + textwrap.indent(body, "    ")
    forward = ast.parse(source).body[0]
    assert isinstance(forward, ast.FunctionDef)
    return middle_of_forward(forward, "mlp")


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (  # a norm that adds
            "hidden_states = self.attn(hidden_states)\n"
            "hidden_states, residual = self.norm2(hidden_states, residual)\n"
            "hidden_states = self.mlp(hidden_states)\n"
            "return hidden_states, residual",
            "norm2",
        ),
        (  # a sum, and a norm of it
            "residual = hidden_states\n"
            "hidden_states = residual + self.attn(hidden_states)\n"
            "residual = hidden_states\n"
            "hidden_states = self.ln_2(hidden_states)\n"
            "hidden_states = self.mlp(hidden_states)\n"
            "return residual + hidden_states",
            "ln_2",
        ),
        (  # no norm in front
            "hidden_states = hidden_states + self.attn(hidden_states)\n"
            "x = self.mlp(hidden_states)\n"
            "return hidden_states + self.norm(x)",
            "mlp",
        ),
        (  # attention and feed-forward beside each other
            "x = self.norm(hidden_states)\n"
            "y = self.attn(x)\n"
            "z = self.mlp(x)\n"
            "return hidden_states + y + z",
            None,
        ),
        (  # what the norm gets does not hold the stream
            "hidden_states = self.norm2(self.attn(hidden_states))\nreturn self.mlp(hidden_states)",
            None,
        ),
        (  # inside of a branch
            "if residual is None:\n    return self.mlp(hidden_states)\nreturn hidden_states",
            None,
        ),
    ],
)
def test_the_stream_between_the_modules_is_found_in_the_source(
    body: str, found: str | None
) -> None:
    assert middle(body) == found


@pytest.mark.parametrize(
    ("family", "layer", "mlp", "found"),
    [
        ("llama", "LlamaDecoderLayer", "mlp", "post_attention_layernorm"),
        ("qwen3", "Qwen3DecoderLayer", "mlp", "post_attention_layernorm"),
        ("gemma3", "Gemma3DecoderLayer", "mlp", "pre_feedforward_layernorm"),
        ("gpt2", "GPT2Block", "mlp", "ln_2"),
        ("commandr", "CohereDecoderLayer", "mlp", None),
        ("stablelm", "StablelmDecoderLayer", "mlp", "post_attention_layernorm"),
    ],
)
def test_layers_of_the_installed_release(
    family: str, layer: str, mlp: str, found: str | None
) -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "model_executor" / "models" / f"{family}.py"
    classes = ast.parse(path.read_text(encoding="utf-8")).body
    cls = next(c for c in classes if isinstance(c, ast.ClassDef) and c.name == layer)
    forward = next(f for f in cls.body if isinstance(f, ast.FunctionDef) and f.name == "forward")
    assert middle_of_forward(forward, mlp) == found
