"""Vectors: files, names, controls and what a request carries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model import lens_config
from inspect_lens.probe import ModelRef
from inspect_lens.spec import Add, parse_extra_args
from inspect_lens.vector import Vector, VectorCard, load_vector, steering_vector

H = 16


def make(name: str = "tiny/v", *, seed: int = 0, **card: Any) -> Vector:
    raw = np.random.default_rng(seed).standard_normal((2, H)) * [[3.0], [0.5]]
    facts: dict[str, Any] = {"layers": (1, 4), "layer": 4, "residual_norms": (10.0, 20.0)} | card
    return Vector.from_raw(raw, card=VectorCard(name=name, hidden=H, **facts))


def test_a_saved_vector_is_loaded_bit_equal(tmp_path: Path) -> None:
    vector = make(site="attn_out", model=ModelRef(name="m", sha256="a" * 64))
    loaded = Vector.load(vector.save(tmp_path / "v"))
    assert loaded.direction.tobytes() == vector.direction.tobytes()
    assert loaded.norm.tobytes() == vector.norm.tobytes()
    assert loaded.card == vector.card
    stored = json.loads((tmp_path / "v/card.json").read_text())
    assert loaded.sha256 == vector.sha256 == stored["sha256"]
    text = (tmp_path / "v/card.md").read_text()
    assert vector.sha256 in text
    assert "**4**" in text


def test_damage_and_edits_are_noticed(tmp_path: Path) -> None:
    make().save(tmp_path)
    card = (tmp_path / "card.json").read_text()
    (tmp_path / "card.json").write_text(card.replace('"layer": 4', '"layer": 1'))
    with pytest.raises(ArtifactError, match=r"layer is 1 and the tensors were saved with 4"):
        Vector.load(tmp_path)
    (tmp_path / "card.json").write_text(card)
    content = bytearray((tmp_path / "vector.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "vector.safetensors").write_bytes(content)
    with pytest.raises(ArtifactError, match="sha256"):
        Vector.load(tmp_path)


def test_names_are_found_as_those_of_probes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("tiny/v").save(tmp_path / "vectors/tiny/v")
    deep = tmp_path / "evals/task"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    for name in ("tiny/v", "v", Path("tiny/v"), "vectors/tiny/v"):
        assert load_vector(name).name == "tiny/v"
    with pytest.raises(ArtifactError, match="vector='tiny/w' was not found"):
        load_vector("tiny/w")
    with pytest.raises(ArtifactError, match=r"hf://owner/repository"):
        load_vector("hf://nothing")
    with pytest.raises(ArtifactError, match="never saved"):
        load_vector({"name": "x"})  # type: ignore[arg-type]


def test_the_organisms_vector_is_of_this_checkpoint() -> None:
    from inspect_lens.probe import fingerprint_model
    from tests.kit.repository import ROOT

    vector = load_vector("organism/truth")
    assert vector.site == "attn_out"
    assert vector.card.model is not None
    assert vector.card.model.sha256 == fingerprint_model(ROOT / "organism/checkpoint")
    assert vector.card.separation[vector.layers.index(vector.default_layer())] == 1.0


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.floats(-8, 8, allow_subnormal=False))
def test_a_request_carries_scale_times_length_times_direction(seed: int, scale: float) -> None:
    vector = make(seed=seed)
    steering = vector.to_steering(1, scale, positions=[0, -1])
    assert steering.layers == (1,)
    assert steering.positions == (0, -1)
    added = steering.scale * steering.vector.to_float32()[0].astype(np.float64)
    expected = scale * float(vector.norm[0]) * vector.direction[0].astype(np.float64)
    np.testing.assert_allclose(added, expected, rtol=1e-5, atol=1e-6)
    matched = vector.to_steering([1, 4], scale, norm_match=True)
    assert matched.norm_match
    assert matched.vector.shape == (2, H)


def test_the_relative_scale_is_a_share_of_the_mean_norm() -> None:
    vector = make()
    scale = vector.relative_scale(4, 0.25)
    length = np.linalg.norm(vector.raw(4).astype(np.float64)) * scale
    assert length == pytest.approx(0.25 * 20.0, rel=1e-5)


@settings(deadline=None)
@given(seed=st.integers(0, 2**40))
def test_controls_have_the_same_length_and_orthogonal_ones_a_right_angle(seed: int) -> None:
    vector = make()
    for control in (vector.random_control(seed), vector.orthogonal_control(seed)):
        assert control.norm.tobytes() == vector.norm.tobytes()
        lengths = np.linalg.norm(control.direction.astype(np.float64), axis=1)
        np.testing.assert_allclose(lengths, 1.0, atol=1e-6)
    cosines = (vector.orthogonal_control(seed).direction * vector.direction).sum(axis=1)
    assert np.abs(cosines).max() < 1e-6


def test_controls_differ_by_seed_and_say_what_they_are() -> None:
    vector = make()
    first, again, other = (vector.random_control(s) for s in (0, 0, 1))
    assert first.sha256 == again.sha256 != other.sha256
    assert vector.sha256[:12] in first.card.description
    assert not np.allclose(first.direction, vector.orthogonal_control(0).direction)


def test_random_directions_are_uniform_over_angles() -> None:
    vector = make()
    cosines = [(vector.random_control(s).direction[0] @ vector.direction[0]) for s in range(400)]
    # Mean 0 and variance 1/H for directions that are uniform on the sphere.
    assert np.mean(cosines) == pytest.approx(0.0, abs=4 / np.sqrt(400 * H))
    assert np.var(cosines) == pytest.approx(1 / H, rel=0.3)


def test_wrong_values_are_refused() -> None:
    vector = make(layer=None)
    with pytest.raises(SpecError, match="pass layer="):
        vector.to_steering()
    with pytest.raises(SpecError, match="directions at"):
        vector.to_steering(2)
    with pytest.raises(SpecError, match="finite"):
        vector.to_steering(1, float("inf"))
    with pytest.raises(SpecError, match="from_raw"):
        Vector(direction=np.ones((2, H)), norm=np.ones(2), card=vector.card)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="not zero"):
        Vector.from_raw(np.zeros((2, H)), card=vector.card)


def test_configs_take_names_objects_and_mappings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make("tiny/v").save(tmp_path / "vectors/tiny/v")
    monkeypatch.chdir(tmp_path)
    vector = Vector.load(folder)
    expected = vector.to_steering(4, 2.0)
    spelled = {"vector": "tiny/v", "scale": 2.0}
    for steer in (expected, spelled, {**spelled, "layer": 4}, [vector.to_steering(4, 2.0)]):
        body = lens_config(steer=steer).extra_body
        assert body is not None
        request = parse_extra_args(body["extra_args"])
        assert request is not None
        (found,) = request.edits
        assert (found.scale, found.layers) == (2.0, (4,))
        assert found.vector.sha256 == expected.vector.sha256
    for steer in ("tiny/v", str(folder), folder, vector):
        body = lens_config(steer=steer).extra_body
        assert body is not None
    # As the command line has it: --extra-body '{"extra_args": {...}}'.
    config = lens_config(extra_body={"extra_args": {"apply_steering_vectors": [spelled]}})
    assert config.extra_body is not None
    assert isinstance(config.extra_body["extra_args"]["apply_steering_vectors"][0], Add)
    with pytest.raises(SpecError, match="unknown keys"):
        steering_vector({"vector": "tiny/v", "scales": 2})
