"""The final norm of a model, found or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from inspect_lens._vllm.model.parameters import final_norm, logits_processor
from inspect_lens.errors import UnsupportedError


class Inner(nn.Module):
    def __init__(self, layers: nn.ModuleList, **children: Any) -> None:
        super().__init__()
        self.layers = layers
        for name, child in children.items():
            setattr(self, name, child)


class Causal(nn.Module):
    def __init__(self, **children: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        # Of a vision tower, say.
        self.visual = Inner(nn.ModuleList(nn.Linear(2, 2) for _ in range(3)), norm=nn.Identity())
        self.model = Inner(self.layers, **children)
        del self.layers

    @property
    def blocks(self) -> list[nn.Module | None]:
        return list(self.model.layers)


@pytest.mark.parametrize("name", ["norm", "final_layernorm", "ln_f", "norm_f"])
def test_it_is_the_norm_beside_the_decoder_layers(name: str) -> None:
    norm = nn.LayerNorm(2)
    model = Causal(embed_tokens=nn.Embedding(3, 2), **{name: norm})
    assert final_norm(model, model.blocks) is norm


@pytest.mark.parametrize(
    ("children", "words"),
    [
        ({}, "Inner has none behind its layers"),
        ({"norm": nn.Identity(), "ln_f": nn.Identity()}, "norm, ln_f"),
        ({"final_layer_norm": nn.Identity(), "project_out": nn.Linear(2, 2)}, "project_out"),
    ],
)
def test_others_are_refused_by_name(children: dict[str, Any], words: str) -> None:
    model = Causal(**children)
    with pytest.raises(UnsupportedError, match=f"final norm of Causal.*{words}"):
        final_norm(model, model.blocks)


def test_a_model_without_logits_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"unembedding of Causal.*0 logits processors"):
        logits_processor(Causal())
