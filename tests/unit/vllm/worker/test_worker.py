"""The worker's glue without an engine: discovery, layouts, the start-up check."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from inspect_lens._engine.protocol.readouts import LAG
from inspect_lens._settings import Settings
from inspect_lens._vllm.model.find_layers import decoder_layers, layout_here, split_output
from inspect_lens._vllm.worker.worker import sums_that_fit
from inspect_lens.errors import UnsupportedError

HIDDEN = 8


class Mixer(nn.Module):
    """Passes for an attention layer."""


@pytest.fixture(autouse=True)
def _mixers_count_as_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    # Imported first: its own classes derive from the base that is replaced here.
    # Classes that are made of the real one have to be there before another stands for it.
    import vllm.model_executor.layers.attention
    import vllm.model_executor.models.utils  # noqa: F401
    from vllm.model_executor.layers import attention_layer_base

    monkeypatch.setattr(attention_layer_base, "AttentionLayerBase", Mixer)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = Mixer()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Model(nn.Module):
    def __init__(self, n: int, *, twice: bool = False, mixers: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() if mixers else nn.Linear(1, 1) for _ in range(n))
        if twice:
            self.more = nn.ModuleList(Layer() for _ in range(n))
        self.others = nn.ModuleList(nn.Linear(1, 1) for _ in range(n))


def test_layers_of_another_stage_are_none() -> None:
    from vllm.model_executor.models.utils import PPMissingLayer

    model = Model(3)
    model.layers[0] = PPMissingLayer()
    assert decoder_layers(model, 3)[0] is None


@pytest.mark.parametrize("path", ["", "layers.{i}"])
def test_a_stage_without_layers_is_refused_in_words_of_its_own(path: str) -> None:
    from vllm.model_executor.models.utils import PPMissingLayer

    model = Model(3)
    model.layers = nn.ModuleList(PPMissingLayer() for _ in range(3))
    with pytest.raises(UnsupportedError, match=r"no decoder layer; .*VLLM_PP_LAYER_PARTITION"):
        decoder_layers(model, 3, path)


@pytest.mark.parametrize(
    "model", [Model(2), Model(3, twice=True), Model(3, mixers=False)], ids=["few", "two", "none"]
)
def test_an_unknown_structure_is_refused_by_name(model: nn.Module) -> None:
    with pytest.raises(UnsupportedError, match=r"Model.*INSPECT_LENS_DISABLE"):
        decoder_layers(model, 3)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("layers", r"write \{i\} where the index"),
        ("blocks.{i}", r"Model has 3 layers, and nothing under .* layer 0; .*: layers\.\{i\}, oth"),
        ("layers.0.mixer", "write"),
        ("more", "write"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused_and_names_the_lists_that_are_there(
    path: str, reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=rf"INSPECT_LENS_LAYER_PATH='.*{reason}"):
        decoder_layers(Model(3), 3, path)


def test_named_layers_are_taken_as_they_are_and_an_unknown_pair_counts_as_a_sum() -> None:
    class Odd(Layer):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            for _ in range(1):
                pair = x + y, x - y
            return pair

    model = Model(2, twice=True)
    model.more = nn.ModuleList([Odd(), Layer()])
    assert layout_here(model.more[0]) == "unknown"
    assert decoder_layers(model, 2, "more.{i}") == [*model.more]
    # What the source does show stays as it is.
    assert [layout_here(layer) for layer in model.more] == ["fused", "plain"]
    assert layout_here(model.layers[0]) == "plain"


def test_one_module_for_two_layers_is_refused() -> None:
    model = Model(2)
    model.layers[1] = model.layers[0]
    with pytest.raises(UnsupportedError, match="two of its layers are one module"):
        decoder_layers(model, 2, "layers.{i}")


H, R = torch.ones(2, HIDDEN), torch.zeros(2, HIDDEN)


@pytest.mark.parametrize("output", [(H, R, R), [H, R], {"h": H}, (None, H), None])
def test_an_unknown_layout_is_refused_by_name(output: Any) -> None:
    with pytest.raises(UnsupportedError, match="output of Layer"):
        split_output(Layer(), output, "fused")


def test_a_pair_whose_source_does_not_show_its_sum_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"output of Layer.*'unknown'"):
        split_output(Layer(), (H, R), "unknown")


def test_sums_of_as_many_requests_fit_as_the_documentation_says() -> None:
    found = sums_that_fit(Settings(), 4096, torch.bfloat16, LAG)
    assert (found // 33, found // 4) == (248, 2048)
