"""`import_probe`: detectors of IBM's vLLM-Hook, against the formula of their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe import Probe, import_probe, load_probe

HIDDEN = 12
KINDS: dict[str, tuple[str, str, str]] = {
    "hallucinations": ("scaler_mean", "scaler_scale", "best_layer"),
    "risky tool calls": ("mean", "scale", "layer"),
}


def write(folder: Path, kind: str, **changes: Any) -> tuple[Path, Any]:
    """A detector as it is trained there, and the pipeline that it was made of."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((60, HIDDEN)) * 3 + 1
    rows[:, 4] = 2.0  # never varies
    fitted = make_pipeline(StandardScaler(), LogisticRegression()).fit(rows, rows[:, 0] > 1)
    scaler, last = fitted[0], fitted[1]
    mean, scale, layer = KINDS[kind]
    arrays = {
        "weights": last.coef_[0], "bias": last.intercept_[0], mean: scaler.mean_,
        scale: np.sqrt(scaler.var_), layer: np.int64(7), "h_node_indices": np.arange(3),
    }  # fmt: skip
    arrays |= changes.pop("arrays", {})
    np.savez(folder / "probe.npz", **{k: v for k, v in arrays.items() if v is not None})
    beside = {"model_name": "org/model", "layer": 7} | changes
    (folder / "probe.json").write_text(json.dumps(beside))
    return folder / "probe.npz", fitted


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_the_log_odds_of_the_pipeline_that_made_the_file(
    kind: str, tmp_path: Path
) -> None:
    path, fitted = write(tmp_path, kind, threshold=0.9)
    probe = import_probe(path, name="mine/detector")
    assert isinstance(probe, Probe)
    rows = np.random.default_rng(1).standard_normal((5, HIDDEN)).astype(np.float32)
    rows[:, 4] = 2.0
    ours = [probe.score(row[None, None]) for row in rows]
    np.testing.assert_allclose(ours, fitted.decision_function(rows), atol=1e-4)
    # Their seventh layer, counted from 1, is the output of block 6.
    assert (probe.layers, probe.card.positions, probe.threshold) == ((6,), "last_prompt", None)
    assert probe.card.model is not None
    assert probe.card.model.name == "org/model"
    assert kind in probe.card.method
    assert f"{np.log(9):.5g}" in probe.card.notes[0]
    assert load_probe(probe.save(tmp_path / "made")).sha256 == probe.sha256
    assert probe.for_engine().kind == "linear"


def test_what_is_no_detector_is_refused(tmp_path: Path) -> None:
    path, _ = write(tmp_path, "risky tool calls", arrays={"layer": None})
    with pytest.raises(ArtifactError, match="has the arrays"):
        import_probe(path, name="a/b")
    path, _ = write(tmp_path, "risky tool calls")
    with pytest.raises(SpecError, match="which is layer 6 here"):
        import_probe(path, name="a/b", layer=7)
    with pytest.raises(SpecError, match="are of lie-detectors"):
        import_probe(path, name="a/b", kind="apollo")
    path, _ = write(tmp_path, "risky tool calls", arrays={"mean": np.zeros(3)})
    with pytest.raises(ArtifactError, match=r"probe\.npz"):
        import_probe(path, name="a/b")
    write(tmp_path, "risky tool calls", threshold=1.5)
    with pytest.raises(ArtifactError, match="no probability"):
        import_probe(path, name="a/b")
    (tmp_path / "probe.json").unlink()
    with pytest.raises(ArtifactError, match=r"probe\.json beside it"):
        import_probe(path, name="a/b")
    np.savez(path, weights=np.asarray([{"a": 1}], dtype=object))
    with pytest.raises(ArtifactError):
        import_probe(path, name="a/b")
