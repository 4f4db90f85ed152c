"""Jacobian lenses in the files of others, and the coordinates of a row, against TransformerLens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from inspect_lens._cli._main import app
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.lens import (
    coordinate_patch,
    decompose,
    estimate_occupancy,
    import_lens,
    load_lens,
)
from inspect_lens.probe import ModelRef
from inspect_lens.spec import Add
from tests.kit.jacobian_files import FOLDER, HIDDEN, LAYERS, PAIRS

LENS = FOLDER / "lens.pt"


@pytest.fixture(scope="module")
def theirs() -> Any:
    with np.load(FOLDER / "coordinates.npz") as arrays:
        return dict(arrays)


def test_a_published_lens_translates_as_its_own_package(theirs: Any, tmp_path: Path) -> None:
    lens = import_lens(LENS, name="org/published")
    card = lens.card
    assert (card.layers, card.n_layers, card.hidden, card.kind) == (LAYERS, 4, HIDDEN, "jacobian")
    assert card.model == ModelRef(name="org/tiny")
    assert lens.matrix.dtype == np.float16
    for layer in LAYERS:
        # Theirs is the float32 matrix; the file has it in float16.
        np.testing.assert_allclose(
            lens.translate(theirs["rows"], layer), theirs[f"transport.{layer}"], atol=5e-3
        )
        exact = theirs["rows"] @ torch.load(LENS)["J"][layer].float().numpy().T
        np.testing.assert_allclose(lens.translate(theirs["rows"], layer), exact, atol=1e-5)
    assert load_lens(lens.save(tmp_path / "lens")).layers == LAYERS
    assert any("fitted on 7 prompts" in note for note in card.notes)
    assert any("Assumed: the model has 4 layers" in note for note in card.notes)


def test_the_command_writes_a_lens_that_an_engine_takes(tmp_path: Path) -> None:
    out = str(tmp_path / "lens")
    made = CliRunner().invoke(
        app, ["lens", "import", str(LENS), "--out", out, "--name", "organism/theirs",
              "--model", "organism/checkpoint", "--n-layers", "6", "--json"],
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    found = json.loads(made.output)
    assert (found["n_layers"], found["layers"]) == (6, list(LAYERS))
    lens = load_lens(out)
    assert lens.card.model is not None
    assert lens.card.model.sha256
    assert lens.for_engine().layers == LAYERS


def saved(folder: Path, **change: Any) -> Path:
    whole = {"J": {0: torch.eye(4)}, "n_prompts": 3, "source_layers": [0], "d_model": 4} | change
    torch.save({k: v for k, v in whole.items() if v is not None}, folder / "lens.pt")
    return folder / "lens.pt"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"J": None}, "not a Jacobian lens"),
        ({"J": {}, "source_layers": []}, "not a Jacobian lens"),
        ({"d_model": 5}, "for d_model 5"),
        ({"J": {0: torch.eye(4), 1: torch.eye(3)}, "source_layers": [0, 1]}, "same shape"),
        ({"source_layers": [0, 2]}, r"source_layers are \[0, 2\], and J has .* of \[0\]"),
        ({"J": {0: torch.eye(4) * float("inf")}}, "NaN or infinity"),
        ({"J": None, "jacobian_sum": {0: torch.eye(4)}}, "a fit that had not ended"),
        ({"metadata": {"target_layer": 3}}, "leads to layer 3"),
        ({"metadata": Path("x")}, "more than tensors and plain values"),
    ],
)
def test_a_file_that_is_no_such_lens_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        import_lens(saved(tmp_path, **change), name="m/l")


def test_an_address_on_the_hub_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, str | None]] = []

    def download(repo: str, name: str, revision: str | None = None) -> str:
        asked.append((repo, name, revision))
        return str(LENS)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    lens = import_lens("hf://org/lenses/tiny/data/lens.pt@v1", name="org/published")
    assert asked == [("org/lenses", "tiny/data/lens.pt", "v1")]
    assert lens.layers == LAYERS


def test_what_the_file_does_not_say_can_be_given(tmp_path: Path) -> None:
    file = saved(tmp_path, metadata={"target_layer": 3})
    assert import_lens(file, name="m/l", n_layers=4).card.n_layers == 4
    with pytest.raises(SpecError, match="n_layers=1"):
        import_lens(
            saved(tmp_path, J={1: torch.eye(4)}, source_layers=None), name="m/l", n_layers=1
        )
    with pytest.raises(ArtifactError, match="cannot be read"):
        import_lens(tmp_path / "none.pt", name="m/l")
    with pytest.raises(ArtifactError, match=r"hf://owner/repository/folder/file\.pt"):
        import_lens("hf://owner/lens.pt", name="m/l")


@pytest.mark.parametrize("i", range(3))
def test_a_decomposition_is_that_of_transformer_lens(theirs: Any, i: int) -> None:
    found = decompose(theirs["rows"][i], theirs["dictionary"], k=6)
    assert list(found.support) == theirs[f"{i}.support"].tolist()
    assert list(found.selected) == theirs[f"{i}.selected"].tolist()
    for name in ("coordinates", "reconstruction", "component"):
        np.testing.assert_allclose(getattr(found, name), theirs[f"{i}.{name}"], atol=1e-5)
    squares = [float(v @ v) for v in (theirs[f"{i}.component"], theirs["rows"][i])]
    assert found.explained == pytest.approx(squares[0] / squares[1], abs=1e-5)


@pytest.mark.parametrize("i", range(3))
def test_what_directions_explain_is_that_of_transformer_lens(theirs: Any, i: int) -> None:
    found = estimate_occupancy(theirs["rows"][i], theirs["dictionary"], max_atoms=6, n_controls=2)
    assert list(found.support) == theirs[f"{i}.occupancy_support"].tolist()
    np.testing.assert_allclose(found.explained, theirs[f"{i}.explained"], atol=1e-5)


def test_occupancy_counts_the_planted_directions() -> None:
    rng = np.random.default_rng(0)
    atoms = rng.standard_normal((300, 64))
    for n in (1, 4, 7):
        row = atoms[:n].sum(axis=0)
        found = estimate_occupancy(row, atoms, max_atoms=12, n_controls=4)
        assert found.occupancy == n
        assert set(found.support[:n]) == set(range(n))
        assert found.explained[n - 1] == pytest.approx(1.0)
        assert found.control[n - 1] < 0.9


@pytest.mark.parametrize("i", range(3))
@pytest.mark.parametrize("j", range(len(PAIRS)))
@pytest.mark.parametrize("target", ["active", "absent"])
def test_a_patch_is_that_of_transformer_lens(theirs: Any, i: int, j: int, target: str) -> None:
    mode, strength = PAIRS[j]
    row, source = theirs["rows"][i], int(theirs[f"{i}.support"][0])
    at = int(theirs[f"{i}.{target}_target"])
    patch = coordinate_patch(
        row, theirs["dictionary"], source, at, mode=mode, strength=strength, k=6  # type: ignore[arg-type]
    )  # fmt: skip
    np.testing.assert_allclose(patch.patched, theirs[f"{i}.{j}.{target}"], atol=1e-5)
    assert (patch.before == 0.0) == (target == "absent")
    edit = Add(vector=patch.delta[None], layers=(1,), positions=(3,))
    np.testing.assert_allclose(row + edit.vector.to_float32()[0], patch.patched, atol=1e-5)


def test_wrong_arguments_are_refused() -> None:
    row, atoms = np.array([3.0, 0.0, 2.0]), np.eye(3)
    with pytest.raises(SpecError, match="row: shape"):
        decompose(row[:2], atoms)
    with pytest.raises(SpecError, match="k=0 of 3 directions"):
        decompose(row, atoms, k=0)
    assert decompose(row, atoms).support == (0, 2)  # of fewer than 25
    with pytest.raises(SpecError, match="direction 1 is zero"):
        decompose(row, np.diag([1.0, 0.0, 1.0]), k=2)
    with pytest.raises(SpecError, match="not finite"):
        decompose(row * np.nan, atoms, k=2)
    with pytest.raises(SpecError, match=r"not active in this row; active are \[0, 2\]"):
        coordinate_patch(row, atoms, 1, 0, k=3)
    with pytest.raises(SpecError, match="two indices"):
        coordinate_patch(row, atoms, 0, 0, k=3)
    with pytest.raises(SpecError, match="substitute, swap"):
        coordinate_patch(row, atoms, 0, 1, mode="move", k=3)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="it is zero"):
        estimate_occupancy(0 * row, atoms, max_atoms=2)
    with pytest.raises(SpecError, match="n_controls=0"):
        estimate_occupancy(row, atoms, max_atoms=2, n_controls=0)
    assert decompose(0 * row, atoms, k=2).support == ()
