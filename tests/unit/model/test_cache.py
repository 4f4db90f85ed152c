from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from inspect_ai.model import GenerateConfig, Model

from inspect_lens.model import lens_config
from inspect_lens.spec import SteeringVector
from tests.kit.fake_server import FakeLensServer

from .conftest import GetModel

pytestmark = pytest.mark.anyio

PROMPT = "one two three"


async def _calls(server: FakeLensServer, model: Model, *configs: GenerateConfig) -> int:
    """How many of these calls reach the server."""
    before = len(server.requests)
    for config in configs:
        await model.generate(PROMPT, config=config, cache=True)
    return len(server.requests) - before


def _steer(activations: Any) -> GenerateConfig:
    vector = {"activations": activations, "layer_indices": [1]}
    return GenerateConfig(extra_body={"extra_args": {"apply_steering_vectors": [vector]}})


def _pair() -> tuple[np.ndarray, np.ndarray]:
    """Two long vectors whose `repr` is the same, because numpy and torch cut the middle out."""
    one = np.zeros((1, 5000), dtype=np.float32)
    two = one.copy()
    two[0, 2500] = 1.0
    assert repr(one) == repr(two)
    return one, two


@pytest.mark.parametrize("wrap", [lambda v: v, torch.from_numpy, lambda v: v.tolist()])
async def test_different_vectors_never_share_an_entry(
    server: FakeLensServer, model_of: GetModel, wrap: Any
) -> None:
    one, two = _pair()
    model = model_of(server)
    assert await _calls(server, model, _steer(wrap(one)), _steer(wrap(two))) == 2
    assert await _calls(server, model, _steer(wrap(one)), _steer(wrap(two))) == 0


async def test_equal_requests_share_an_entry_however_spelled(
    server: FakeLensServer, model_of: GetModel
) -> None:
    one, _ = _pair()
    vector = SteeringVector(activations=one, layer_indices=[1])
    spellings = [
        _steer(one),
        _steer(torch.from_numpy(one)),
        GenerateConfig(extra_body={"extra_args": {"apply_steering_vectors": [vector]}}),
        lens_config(steer=[vector.model_dump(mode="json")]),
    ]
    assert await _calls(server, model_of(server), *spellings) == 1


async def test_scale_and_layer_are_in_the_key(server: FakeLensServer, model_of: GetModel) -> None:
    one, _ = _pair()
    configs = [
        lens_config(steer=SteeringVector(activations=one, layer_indices=[layer], scale=scale))
        for layer in (1, 2)
        for scale in (1.0, 2.0)
    ]
    assert await _calls(server, model_of(server), *configs) == 4


async def test_the_model_argument_is_in_the_key(server: FakeLensServer, model_of: GetModel) -> None:
    plain, capturing = model_of(server), model_of(server, capture=[1])
    assert await _calls(server, plain, GenerateConfig()) == 1
    output = await capturing.generate(PROMPT, cache=True)
    assert output.metadata["activations"].layers == (1,)
    assert await _calls(server, model_of(server, capture=[2]), GenerateConfig()) == 1
    assert await _calls(server, capturing, GenerateConfig()) == 0


@pytest.mark.parametrize("mode", ["memory", "sidecar"])
async def test_a_hit_brings_the_activations(
    server: FakeLensServer, model_of: GetModel, tmp_path: Any, mode: str
) -> None:
    from inspect_lens.model._handle import MEMORY

    model = model_of(server, capture=[1], activations=mode, activations_dir=str(tmp_path / "d"))
    first = await model.generate(PROMPT, cache=True)
    stream = first.metadata["activations"].numpy()
    MEMORY.clear()
    if mode == "memory":
        # Whoever asks the cache has another process, or a memory that is full.
        assert first.metadata["activations"].uri is None
    second = await model.generate(PROMPT, cache=True)
    assert len(server.requests) == 1
    np.testing.assert_array_equal(second.metadata["activations"].numpy(), stream)
    assert second.metadata["token_ids"] == first.metadata["token_ids"]
    assert second.metadata["activations"].model_dump()["tensors"]


async def test_a_hit_without_its_file_is_none(
    server: FakeLensServer, model_of: GetModel, tmp_path: Any
) -> None:
    def capturing(**kept: Any) -> Model:
        return model_of(server, capture=[1], **kept)

    await capturing(activations="memory").generate(PROMPT, cache=True)
    in_files = capturing(activations_dir=str(tmp_path))
    for requests in (2, 2):  # the first hit has no file, and this eval asks for one
        await in_files.generate(PROMPT, cache=True)
        assert len(server.requests) == requests
    (file,) = tmp_path.rglob("*.safetensors")
    file.unlink()
    output = await in_files.generate(PROMPT, cache=True)
    assert len(server.requests) == 3
    assert output.metadata["activations"].is_here


async def test_handles_that_no_call_asks_for_are_read_as_they_are(
    server: FakeLensServer, model_of: GetModel, tmp_path: Any
) -> None:
    """Of a researcher's own pickles, or of another process."""
    in_memory = await model_of(server, capture=[1], activations="memory").generate(PROMPT)
    pickled = pickle.dumps(in_memory.metadata["activations"])
    in_files = model_of(server, capture=[1], activations_dir=str(tmp_path))
    for _ in range(2):  # the second one is a hit
        await in_files.generate(PROMPT, cache=True)
        assert pickle.loads(pickled).layers == (1,)
    assert len(server.requests) == 2


async def test_the_base_url_is_stable_and_has_no_port_of_ours(
    server: FakeLensServer, model_of: GetModel
) -> None:
    model = model_of(server)
    before = model.api.base_url
    await model.generate(PROMPT)
    assert model.api.base_url == before == f"{server.url}/v1"
