"""Where sites are in a block, told from the source and from modules, without an engine."""

from __future__ import annotations

import ast
import importlib.util
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from inspect_lens._vllm.model.find_layers import LOCATORS, middle_of_forward
from inspect_lens.errors import UnsupportedError
from inspect_lens.spec import SITES


def test_every_site_has_a_locator() -> None:
    assert tuple(LOCATORS) == SITES


class Routed(nn.Module):
    """A block of which the router is known; the one that is called is made up."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.gate = Router()


class Router(nn.Module):
    output_size = 6
    quant_method = None


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Reads rows of six numbers, as all sites but the stream's do."""
    block = Routed()
    home = "inspect_lens._vllm.model.find_layers"
    monkeypatch.setattr(f"{home}.block_module", lambda block, site: block.mlp)
    monkeypatch.setattr(f"{home}._is_linear", lambda module: isinstance(module, Router))
    place = LOCATORS["router_logits"](block, 6)
    return lambda value: place.read((), {}, value)[0]


@pytest.mark.parametrize(
    "rows",
    [
        torch.zeros(4, 6),
        torch.zeros(4, 2, 3),
        torch.zeros(1, 4, 6),
        torch.zeros(4, 15)[:, 3:9],  # queries among queries, keys and values
        torch.zeros(4, 5, 3)[:, 1:3],
        torch.zeros(2, 4, 6).transpose(0, 1)[:, :1],
        torch.zeros(0, 6),
    ],
    ids=lambda rows: "x".join(map(str, rows.shape)),
)
def test_what_is_read_is_what_an_edit_reaches(read: Any, rows: torch.Tensor) -> None:
    found = read((rows, None))
    found += 1
    assert found.shape[1] == 6
    assert bool((rows == 1).all())


@pytest.mark.parametrize(
    "rows",
    [
        torch.zeros(6, 4).T,
        torch.zeros(2, 4, 3).transpose(0, 1),  # heads in front of tokens
        torch.zeros(4, 3, 2).transpose(1, 2),
        torch.zeros(4, 12)[:, ::2],
    ],
    ids=lambda rows: "x".join(map(str, rows.shape)),
)
def test_rows_that_an_edit_would_not_reach_are_refused_by_name(
    read: Any, rows: torch.Tensor
) -> None:
    with pytest.raises(UnsupportedError, match=r"router_logits: Router has .* behind one another"):
        read(rows)


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
