from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe import Probe, ProbeCard
from inspect_lens.reading import read_token_scores
from inspect_lens.scorer import trait_projection
from inspect_lens.vector import Vector, VectorCard
from tests.kit.mock_evals import WIDTH, call, run, scores

DIRECTION = np.array([3.0, 4.0, 0.0, 0.0], dtype=np.float32)


def vector(folder: Path, array: Any = DIRECTION) -> str:
    path = folder / "vector.safetensors"
    save_file({"activations": np.asarray(array, dtype=np.float32)}, path)
    return str(path)


def projected(folder: Path, *options: Any, **more: Any) -> list[Any]:
    outputs = [call([1.0, 3.0], [0.0, 2.0]), call([-5.0], [0.0])]
    return scores(run(outputs, trait_projection(*options, **more), folder=folder))


def test_the_mean_projection_on_the_unit_direction(tmp_path: Path) -> None:
    got = projected(tmp_path, vector(tmp_path), layer=1)
    # Tokens (1, 0) and (3, 2) on (0.6, 0.8), and (-5, 0).
    assert [s.value for s in got] == pytest.approx([(0.6 + 3.4) / 2, -3.0])
    assert got[0].metadata["threshold"] is None
    assert got[0].metadata["source"] == "rows"


def test_length_token_scores_and_pool(tmp_path: Path) -> None:
    path = vector(tmp_path)
    assert projected(tmp_path, path, layer=1, normalise=False)[0].value == pytest.approx(10.0)
    assert projected(tmp_path, path, layer=1, pool="max")[0].value == pytest.approx(3.4)
    log = run([call([1.0, 3.0], [0.0, 2.0])], trait_projection(path, layer=1), folder=tmp_path)
    np.testing.assert_allclose(read_token_scores(log)[0].scores, [0.6, 3.4], atol=1e-6)


def test_the_direction_of_a_probe_without_scaler_and_bias(tmp_path: Path) -> None:
    card = ProbeCard(name="test/scaled", layers=(0, 1), hidden=WIDTH)
    weight = np.stack([np.eye(WIDTH)[3], DIRECTION * 2])
    probe = Probe(
        weight=weight, bias=np.full(2, 7.0), mean=np.full((2, WIDTH), 9.0),
        scale=np.full((2, WIDTH), 2.0), card=card,
    )  # fmt: skip
    path = str(probe.save(tmp_path / "p"))
    assert projected(tmp_path, path, layer=1)[0].value == pytest.approx(2.0)
    assert projected(tmp_path, path, layer=1, normalise=False)[0].value == pytest.approx(10.0)
    with pytest.raises(SpecError, match="allowed is one layer"):
        trait_projection(path)


def test_a_vector_knows_its_layer_and_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = VectorCard(name="test/trait", layers=(0, 1), layer=1, hidden=WIDTH)
    raw = np.stack([np.eye(WIDTH)[3], DIRECTION * 2])
    made = Vector.from_raw(raw, card=card)
    folder = made.save(tmp_path / "vectors" / "test" / "trait")
    monkeypatch.chdir(tmp_path)
    # As an object, by its folder, its file, and its name.
    for given in (made, str(folder), str(folder / "vector.safetensors"), "test/trait"):
        assert projected(tmp_path, given)[0].value == pytest.approx(2.0)
    assert projected(tmp_path, made, normalise=False)[0].value == pytest.approx(20.0)
    with pytest.raises(SpecError, match="layer=3"):
        trait_projection(made, layer=3)


def test_a_name_of_both_kinds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vector_card = VectorCard(name="test/both", layers=(1,), hidden=WIDTH)
    probe_card = ProbeCard(name="test/both", layers=(1,), hidden=WIDTH)
    folder = Vector.from_raw(DIRECTION, card=vector_card).save(tmp_path / "vectors/test/both")
    Probe.from_direction(DIRECTION, card=probe_card).save(tmp_path / "probes/test/both")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match="a vector and of a probe"):
        trait_projection("test/both")
    assert projected(tmp_path, str(folder))[0].value == pytest.approx(2.0)


def test_what_cannot_be_projected_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="does not say at which layer"):
        trait_projection(vector(tmp_path))
    with pytest.raises(ArtifactError, match=r"of shape \(2, 4\)"):
        trait_projection(vector(tmp_path, np.ones((2, WIDTH))), layer=1)
    with pytest.raises(ArtifactError, match="allowed is one that is not zero"):
        trait_projection(vector(tmp_path, np.zeros(WIDTH)), layer=1)
    with pytest.raises(ArtifactError, match="was not found"):
        trait_projection(str(tmp_path / "none.safetensors"), layer=1)
