"""A lens: its formula, its files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.lens import Lens, LensCard, LensQuality, load_lens
from inspect_lens.spec import EngineLens

WIDTH = 6
RNG = np.random.default_rng(0)
MATRIX = RNG.standard_normal((2, WIDTH, WIDTH)).astype(np.float32)
BIAS = RNG.standard_normal((2, WIDTH)).astype(np.float32)


def card(kind: Any, **more: Any) -> LensCard:
    values = {"name": "m/l", "n_layers": 4, "layers": (0, 2), "hidden": WIDTH} | more
    return LensCard(kind=kind, **values)


def tuned(**more: Any) -> Lens:
    return Lens(matrix=MATRIX, bias=BIAS, card=card("tuned", **more))


def jacobian(dtype: Any = np.float32) -> Lens:
    return Lens(matrix=MATRIX.astype(dtype), card=card("jacobian"))


def test_rows_are_translated_by_the_formula() -> None:
    rows = RNG.standard_normal((3, 5, WIDTH))
    for i, layer in enumerate((0, 2)):
        own = np.einsum("oi,...i->...o", MATRIX[i].astype(np.float64), rows)
        np.testing.assert_allclose(jacobian().translate(rows, layer), own, rtol=1e-4, atol=1e-5)
        expected = rows + own + BIAS[i]
        np.testing.assert_allclose(tuned().translate(rows, layer), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(tuned().translate(rows, 3), rows, rtol=1e-6)  # the last layer
    with pytest.raises(SpecError, match=r"translates \[0, 2\]"):
        tuned().translate(rows, 1)
    with pytest.raises(SpecError, match="is 6 wide"):
        tuned().translate(rows[..., :5], 0)


@pytest.mark.parametrize("kind", ["tuned", "jacobian"])
def test_a_token_direction_is_the_gradient_of_its_score(kind: str) -> None:
    lens = tuned() if kind == "tuned" else jacobian()
    row, token = RNG.standard_normal(WIDTH), RNG.standard_normal(WIDTH)
    direction = lens.token_direction(token, 2)
    step = 1e-2
    for axis in range(WIDTH):
        moved = row + step * np.eye(WIDTH)[axis]
        rise = (lens.translate(moved, 2) - lens.translate(row, 2)) @ token / step
        assert rise == pytest.approx(direction[axis], abs=1e-3)
    vector = lens.token_vector(token, 2, scale=3.0)
    assert (vector.layers, vector.scale) == ((2,), 3.0)
    unit = direction / np.linalg.norm(direction)
    np.testing.assert_allclose(vector.vector.to_float32()[0], unit, rtol=1e-5)
    with pytest.raises(SpecError, match="maps this row to zero"):
        lens.token_vector(np.zeros(WIDTH), 2)


@pytest.mark.parametrize("made", [tuned(), jacobian(), jacobian(np.float16)])
def test_what_is_saved_comes_back(made: Lens, tmp_path: Path) -> None:
    made.save(tmp_path / "a")
    back = load_lens(tmp_path / "a")
    assert back.card == made.card
    assert back.matrix.dtype == made.matrix.dtype
    np.testing.assert_array_equal(back.matrix, made.matrix)
    assert back.for_engine().sha256 == made.for_engine().sha256


def test_the_readable_card_has_the_quality(tmp_path: Path) -> None:
    quality = LensQuality(layer=2, kl=0.25, logit_kl=1.5, agreement=0.75, logit_agreement=0.5)
    tuned(quality=(quality,), n_held_out=99).save(tmp_path)
    text = (tmp_path / "card.md").read_text()
    assert "| 2 | 0.250 | 1.500 | 0.750 | 0.500 |" in text
    assert "99 held-out rows" in text


def test_damage_is_found(tmp_path: Path) -> None:
    tuned().save(tmp_path)
    file = tmp_path / "lens.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + b"\x00")
    with pytest.raises(ArtifactError, match="damaged or replaced"):
        load_lens(tmp_path)
    file.write_bytes(good)
    stored = json.loads((tmp_path / "card.json").read_text())
    stored["card"]["layers"] = [0, 3]
    (tmp_path / "card.json").write_text(json.dumps(stored))
    with pytest.raises(ArtifactError, match="layers"):
        load_lens(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": (2, 0)}, "ascending"),
        ({"layers": (0, 4)}, "0 to 3"),
        ({"quality": ({"layer": 1, "kl": 0, "logit_kl": 0, "agreement": 1, "logit_agreement": 1},)},
         r"names layers \[1\]"),
    ],
)  # fmt: skip
def test_a_card_that_contradicts_itself_is_refused(change: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        card("tuned", **change)


@pytest.mark.parametrize(
    ("matrix", "bias", "kind", "words"),
    [
        (MATRIX[:1], BIAS, "tuned", r"shape \(1, 6, 6\)"),
        (MATRIX, BIAS[:, :5], "tuned", r"bias: shape"),
        (MATRIX, None, "tuned", "a tuned lens has one"),
        (MATRIX, BIAS, "jacobian", "a Jacobian lens has none"),
        (MATRIX * np.nan, None, "jacobian", "NaN"),
    ],
)
def test_tensors_that_do_not_fit_the_card_are_refused(
    matrix: Any, bias: Any, kind: str, words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        Lens(matrix=matrix, bias=bias, card=card(kind))


def test_the_form_for_the_engine() -> None:
    form = tuned().for_engine()
    assert (form.kind, form.layers, form.n_layers, form.hidden) == ("tuned", (0, 2), 4, WIDTH)
    again = EngineLens.model_validate(json.loads(json.dumps(form.model_dump(mode="json"))))
    assert again.sha256 == form.sha256
    assert form.entry.nbytes == MATRIX.nbytes + BIAS.nbytes
    other = Lens(matrix=MATRIX, bias=BIAS, card=card("tuned", layers=(1, 2))).for_engine()
    assert other.sha256 != form.sha256


@pytest.mark.parametrize("lens", [tuned(), jacobian()])
def test_a_swap_exchanges_what_two_tokens_have_in_a_row(lens: Lens) -> None:
    tokens, rows = RNG.standard_normal((2, WIDTH)), RNG.standard_normal((2, 3, WIDTH))
    steering = lens.token_swap(tokens, [0, 2]).frozen(rows, positions=[1, 4, 5])
    assert (steering.layers, steering.positions) == ((0, 2), (1, 4, 5))
    added = steering.vector.to_float32()
    half = lens.token_swap(tokens, [0, 2], strength=0.5).frozen(rows, positions=[1, 4, 5])
    np.testing.assert_allclose(half.vector.to_float32(), added / 2, rtol=1e-5, atol=1e-6)
    for i, layer in enumerate((0, 2)):
        inverse = np.linalg.pinv(lens.token_direction(tokens, layer).T.astype(np.float64))
        before, after = rows[i] @ inverse.T, (rows[i] + added[i]) @ inverse.T
        np.testing.assert_allclose(after, before[:, ::-1], rtol=1e-4, atol=1e-4)
        # Nothing else of the row has changed.
        beside = np.eye(WIDTH) - np.linalg.pinv(inverse) @ inverse
        np.testing.assert_allclose(added[i] @ beside.T, 0, atol=1e-5)
    with pytest.raises(ValueError, match="first and second"):
        lens.token_swap(np.stack([tokens[0], 2 * tokens[0]]), [0, 2])
    with pytest.raises(SpecError, match="unembedding: shape"):
        lens.token_swap(tokens[:1], [0])
    with pytest.raises(SpecError, match="rows: shape"):
        lens.token_swap(tokens, [0, 2]).frozen(rows[:1], positions=[1, 4, 5])
