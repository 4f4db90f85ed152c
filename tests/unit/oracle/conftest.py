from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inspect_ai.model import Model, get_model

from inspect_lens.oracle import _send
from tests.kit.fake_server import FakeLensServer

PUBLISHED: dict[str, Any] = {
    "hook_onto_layer": 1,
    "special_token": " ?",
    # As in the published files: a backslash and an n, not a line feed.
    "prefix_template": "Layer: {layer}\\n{special_token} * {num_positions} \\n",
    "steering_coefficient": 1.0,
    "act_layer_combinations": [[1], [2], [3]],
}

WriteOracle = Callable[..., Path]


@pytest.fixture(autouse=True)
def _elsewhere(elsewhere: Path) -> None:
    """Every test."""


@pytest.fixture
def write_oracle(tmp_path: Path) -> WriteOracle:
    """Writes the folder of an oracle, with fields of its configuration changed or taken away."""

    def write(name: str = "tiny", *, weights: bytes = b"weights", **changes: Any) -> Path:
        folder = tmp_path / "oracles" / name
        folder.mkdir(parents=True)
        config = {k: v for k, v in {**PUBLISHED, **changes}.items() if v is not ...}
        (folder / "ao_config.json").write_text(json.dumps(config))
        adapter = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": "org/tiny"}
        (folder / "adapter_config.json").write_text(json.dumps(adapter))
        (folder / "adapter_model.safetensors").write_bytes(weights)
        return folder

    return write


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    """A port may come back with another tokenizer."""
    _send._prompts.values.clear()
    _send._norms.values.clear()


@pytest.fixture
def model(server: FakeLensServer) -> Model:
    return get_model(f"lens/{server.model}", base_url=server.url, memoize=False)
