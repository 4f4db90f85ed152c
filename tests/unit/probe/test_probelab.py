"""`import_probe`: files of the packages probelab and sae-probes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from inspect_lens.errors import ArtifactError, SpecError, UnsupportedError
from inspect_lens.probe import NeuralProbe, Probe, import_probe, load_probe
from tests.kit.probelab_files import FAMILIES, FOLDER, HIDDEN, REFUSED, write_probes

SERVED = {"Logistic": "linear", "MassMean": "linear", "MLP": "mlp"}


def check(folder: Path, family: str) -> Probe | NeuralProbe:
    """Our scores of a file are those that the package gave."""
    theirs = np.load(folder / "rows.npz")
    probe = import_probe(folder / f"{family}.pt", name="mine/made", layer=3)
    for rows, wanted in zip(theirs["rows"], theirs[family], strict=True):
        ours = probe.score_tokens(rows) if wanted.shape else probe.score(rows)
        np.testing.assert_allclose(ours, wanted, atol=1e-5)
    return probe


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_the_package_that_wrote_the_file(family: str, tmp_path: Path) -> None:
    probe = check(FOLDER, family)
    assert (probe.layers, probe.hidden, probe.threshold) == ((3,), HIDDEN, None)
    assert "Not stated: the model, its site" in probe.card.notes[0]
    assert load_probe(probe.save(tmp_path / "made")).sha256 == probe.sha256
    if family in SERVED:
        assert probe.for_engine().kind == SERVED[family]
    elif family != "PositionalAttention":
        with pytest.raises(UnsupportedError, match="capture its layers and score the rows"):
            probe.for_engine()


@pytest.mark.parametrize("seed", [1, 2])
def test_scores_are_those_of_the_package_beside(tmp_path: Path, seed: int) -> None:
    pytest.importorskip("probelab", reason="probelab is not installed beside")
    write_probes(tmp_path, seed=seed)
    for family in FAMILIES:
        check(tmp_path, family)


def test_what_is_not_read_is_refused(tmp_path: Path) -> None:
    (name,) = REFUSED
    with pytest.raises(ArtifactError, match="class 'TPC' of probelab; read are Bilinear, Gated"):
        import_probe(FOLDER / f"{name}.pt", name="a/b", layer=1)
    with pytest.raises(SpecError, match=r"layer=None: files of probelab name no layer"):
        import_probe(FOLDER / "MLP.pt", name="a/b")
    with pytest.raises(SpecError, match="are of lie-detectors"):
        import_probe(FOLDER / "MLP.pt", name="a/b", layer=1, kind="apollo")
    content = torch.load(FOLDER / "MLP.pt", weights_only=True)
    broken = (
        content | {"init_kwargs": {"activation": "gelu"}},
        content | {"state_dict": {"fc1.weight": torch.zeros(3, 4)}},
        content | {"state_dict": content["state_dict"] | {"fc2.weight": torch.zeros(2, 9)}},
        content | {"state_dict": 7},
    )
    for one in broken:
        torch.save(one, tmp_path / "broken.pt")
        with pytest.raises(ArtifactError, match=r"not a MLP of probelab 0.1"):
            import_probe(tmp_path / "broken.pt", name="a/b", layer=1)


@pytest.mark.parametrize("family", [["x"], None, {"MLP": 1}])
def test_a_class_that_is_no_name_is_refused(tmp_path: Path, family: object) -> None:
    torch.save({"class": family, "init_kwargs": {}, "state_dict": {}}, tmp_path / "odd.pt")
    with pytest.raises(ArtifactError, match="of probelab; read are"):
        import_probe(tmp_path / "odd.pt", name="a/b", layer=1)


def test_a_pickled_classifier_of_sae_probes_is_refused(tmp_path: Path) -> None:
    """That package saves objects of scikit-learn, and reading them runs code from the file."""
    fitted = LogisticRegression().fit(np.random.default_rng(0).normal(size=(8, 3)), [0, 1] * 4)
    torch.save({"classifier": fitted, "scaler": None}, tmp_path / "classifier.pt")
    with pytest.raises(ArtifactError, match="holds more than tensors and plain values"):
        import_probe(tmp_path / "classifier.pt", name="a/b", layer=1)
