"""Files of other tools, and which layer their index means."""

from __future__ import annotations

import contextlib
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.vector import Vector, VectorCard, export_vector, import_vector, load_vector
from inspect_lens.vector._foreign import decode_gguf, encode_gguf

H = 8
RNG = np.random.default_rng(0)
ROWS = {n: RNG.normal(size=H).astype(np.float32) for n in (1, 3, 4)}


def vector(layers: tuple[int, ...] = (1, 3, 4)) -> Vector:
    card = VectorCard(name="m/v", layers=layers, hidden=H)
    return Vector.from_raw(np.stack([ROWS.get(n, ROWS[1]) for n in layers]), card=card)


def check(made: Vector, expected: dict[int, Any]) -> None:
    assert made.layers == tuple(expected)
    for layer, row in expected.items():
        np.testing.assert_allclose(made.raw(layer), row, rtol=1e-6)


def gguf_by_the_specification() -> bytes:
    """Two directions, written byte for byte by the specification of GGUF 3, one as float16."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 4)
    head += text("general.architecture") + struct.pack("<I", 8) + text("controlvector")
    head += text("controlvector.model_hint") + struct.pack("<I", 8) + text("llama")
    head += text("controlvector.layer_count") + struct.pack("<II", 4, 28)  # some count the model's
    head += text("some.list") + struct.pack("<IIQ", 9, 6, 2) + struct.pack("<ff", 1.0, 2.0)
    head += text("direction.3") + struct.pack("<IQIQ", 1, H, 0, 0)
    head += text("direction.4") + struct.pack("<IQIQ", 1, H, 1, 32)
    head += b"\0" * (-len(head) % 32)
    return head + ROWS[3].tobytes() + ROWS[4].astype("<f2").tobytes()


def test_repeng_adds_behind_the_block_of_its_number(tmp_path: Path) -> None:
    (tmp_path / "v.gguf").write_bytes(gguf_by_the_specification())
    made = import_vector(tmp_path / "v.gguf", name="m/v")
    check(made, {3: ROWS[3], 4: ROWS[4].astype("<f2")})
    assert made.card.notes == ("model hint of the file: llama",)


def test_our_gguf_is_that_of_the_specification() -> None:
    facts: dict[str, Any] = {
        "general.architecture": "controlvector", "controlvector.model_hint": "llama",
        "controlvector.layer_count": 1,
    }  # fmt: skip
    ours = encode_gguf(facts, {"direction.3": ROWS[3]})
    read = decode_gguf(ours)
    assert read.facts == facts
    np.testing.assert_array_equal(read.tensors["direction.3"], ROWS[3])
    assert ours[:24] == b"GGUF" + struct.pack("<IQQ", 3, 1, 3)
    assert len(ours) % 32 == 0


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 400), st.binary(max_size=40))
def test_a_gguf_that_is_cut_or_mangled_is_an_error_and_no_crash(cut: int, tail: bytes) -> None:
    content = gguf_by_the_specification()[:cut] + tail
    with contextlib.suppress(ValueError):  # which errors of decoding text are, too
        decode_gguf(content)


def test_rows_of_persona_vectors_are_one_behind(tmp_path: Path) -> None:
    rows = torch.from_numpy(RNG.normal(size=(6, H)))
    file = tmp_path / "evil_response_avg_diff.pt"
    torch.save(rows.bfloat16(), file)
    made = import_vector(file, name="m/evil", layer=3)
    wide = rows.bfloat16().float().numpy()
    check(made, {k - 1: wide[k] for k in range(1, 6)})
    assert made.card.layer == 3
    assert made.card.positions == "mean of the response"
    torch.save(rows, tmp_path / "other.pt")
    with pytest.raises(ArtifactError, match="counted in several ways"):
        import_vector(tmp_path / "other.pt", name="m/v")
    assert import_vector(tmp_path / "other.pt", name="m/v", format="persona").layers[0] == 0


def test_the_refusal_direction_is_of_the_block_before(tmp_path: Path) -> None:
    torch.save(torch.from_numpy(ROWS[1]), tmp_path / "direction.pt")
    with pytest.raises(SpecError, match="names none"):
        import_vector(tmp_path / "direction.pt", name="m/r")
    (tmp_path / "direction_metadata.json").write_text('{"pos": -1, "layer": 12}')
    made = import_vector(tmp_path / "direction.pt", name="m/r")
    check(made, {11: ROWS[1]})
    assert "input of that block" in made.card.notes[0]
    check(import_vector(tmp_path / "direction.pt", name="m/r", layer=5), {5: ROWS[1]})


def test_other_formats_count_blocks(tmp_path: Path) -> None:
    tensors = {n: torch.from_numpy(row) for n, row in ROWS.items()}
    torch.save(tensors, tmp_path / "a.pt")
    torch.save({"layer_activations": tensors, "layer_type": "decoder_block"}, tmp_path / "b.pt")
    save_file({f"layer.{n}": row for n, row in ROWS.items()}, tmp_path / "c.safetensors")
    save_file({f"direction_{n}": row for n, row in ROWS.items()}, tmp_path / "d.safetensors")
    rows = {str(n): row.tolist() for n, row in ROWS.items()}
    (tmp_path / "e.svec").write_text(
        json.dumps({"model_type": "llama", "directions": rows, "explained_variances": {}})
    )
    for file in ("a.pt", "b.pt", "c.safetensors", "d.safetensors", "e.svec"):
        check(import_vector(tmp_path / file, name="m/v"), ROWS)
    torch.save({"dir": tensors[3][None], "avg_proj": torch.tensor(2.5)}, tmp_path / "f.pt")
    made = import_vector(tmp_path / "f.pt", name="m/v", layer=7)
    check(made, {7: ROWS[3]})
    assert "avg_proj 2.5" in made.card.notes[0]


@pytest.mark.parametrize(
    ("format", "file", "more"),
    [
        ("repeng", "v.gguf", {"model_hint": "llama"}), ("steering-vectors", "v.pt", {}),
        ("persona", "v_response_avg_diff.pt", {"n_layers": 6}),
        ("safetensors", "v.safetensors", {}),
    ],
)  # fmt: skip
def test_what_is_written_is_read_back(format: Any, file: str, more: Any, tmp_path: Path) -> None:
    made = export_vector(vector(), tmp_path / "new" / file, format=format, **more)
    check(import_vector(made, name="m/v", format=format), ROWS)
    part = export_vector(vector(), tmp_path / file, format=format, layers=[3], **more)
    check(import_vector(part, name="m/v"), {3: ROWS[3]})


def test_a_row_of_axbench_is_a_concept_and_its_layer_is_given(tmp_path: Path) -> None:
    file = tmp_path / "DiffMean_weight.pt"
    torch.save(torch.from_numpy(np.stack([ROWS[1], ROWS[3]])), file)
    made = import_vector(file, name="m/v", layer=4, concept=1)
    check(made, {4: ROWS[3]})
    assert made.card.source == "arXiv:2501.17148"
    assert "largest activation" in made.card.notes[0]
    for options, words in (
        ({"layer": 4}, "has 2; pass concept="),
        ({"layer": 4, "concept": 2}, "has 0 to 1"),
        ({"layer": 4, "concept": -1}, "has 0 to 1"),
        ({"concept": 0}, "names none"),
    ):
        with pytest.raises(SpecError, match=words):
            import_vector(file, name="m/v", **options)  # type: ignore[arg-type]
    one = tmp_path / "one.pt"
    torch.save(torch.from_numpy(ROWS[4][None]).bfloat16(), one)
    wide = torch.from_numpy(ROWS[4]).bfloat16().float().numpy()
    check(import_vector(one, name="m/v", format="axbench", layer=0), {0: wide})
    torch.save(torch.from_numpy(ROWS[4]), one)
    with pytest.raises(ArtifactError, match=r"\(concepts, hidden\)"):
        import_vector(one, name="m/v", format="axbench", layer=0)
    with pytest.raises(SpecError, match="is of refusal, which has none"):
        import_vector(one, name="m/v", layer=0, concept=0)


def test_an_ibm_file_has_a_unit_direction(tmp_path: Path) -> None:
    made = export_vector(vector(), tmp_path / "v.pt", format="ibm", layers=[3], avg_proj=1.5)
    read = torch.load(made, weights_only=True)
    np.testing.assert_allclose(read["dir"].norm(), 1.0, rtol=1e-6)
    assert float(read["avg_proj"]) == 1.5
    unit = ROWS[3] / np.linalg.norm(ROWS[3])
    check(import_vector(made, name="m/v", layer=3), {3: unit})


def test_an_imported_vector_is_saved_like_ours(tmp_path: Path) -> None:
    (tmp_path / "v.gguf").write_bytes(gguf_by_the_specification())
    folder = import_vector(tmp_path / "v.gguf", name="m/v").save(tmp_path / "m/v")
    assert load_vector(folder).card.source == "repeng, GGUF control vector"


def test_what_a_format_cannot_hold_is_refused(tmp_path: Path) -> None:
    for more, match in (
        ({"format": "repeng"}, "model_hint"),
        ({"format": "persona"}, "how many blocks"),
        ({"format": "persona", "n_layers": 4}, "how many blocks"),
        ({"format": "ibm", "layers": [3]}, "avg_proj"),
        ({"format": "ibm", "avg_proj": 1.0}, "avg_proj"),
        ({"format": "cast"}, "allowed are repeng"),
        ({"format": "safetensors", "layers": [2]}, "no direction|directions at"),
    ):
        with pytest.raises(SpecError, match=match):
            export_vector(vector(), tmp_path / "x", **more)
    inside = VectorCard(name="m/v", layers=(3,), hidden=H, site="attn_out")
    with pytest.raises(SpecError, match="allowed is resid_post"):
        export_vector(Vector.from_raw(ROWS[3], card=inside), tmp_path / "x", format="safetensors")
    with pytest.raises(SpecError, match="behind block 0"):
        export_vector(vector((0, 1)), tmp_path / "x", format="repeng", model_hint="llama")
    assert not list(tmp_path.iterdir())


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("code of the file ran",))


def test_no_code_of_a_file_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.pt").write_bytes(pickle.dumps(Evil()))
    torch.save({"dir": Evil()}, tmp_path / "b.pt")
    for file in ("a.pt", "b.pt"):
        with pytest.raises(ArtifactError, match="more than tensors"):
            import_vector(tmp_path / file, name="m/v", layer=1)
    assert capsys.readouterr().out == ""


def test_what_is_no_vector_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGML")
    (tmp_path / "b.gguf").write_bytes(encode_gguf({"general.architecture": "llama"}, {}))
    (tmp_path / "c.svec").write_text("{}")
    several = {"stacked": {"1": [[1.0, 2.0], [3.0, 4.0]]}, "twice": {"1": [1.0], "01": [2.0]}}
    for name, directions in several.items():
        said = {"model_type": "m", "directions": directions}
        (tmp_path / f"{name}.svec").write_text(json.dumps(said))
    save_file({"weight": ROWS[1]}, tmp_path / "d.safetensors")
    save_file({"layer.1": ROWS[1], "layer.2": ROWS[1][:3]}, tmp_path / "e.safetensors")
    save_file({"layer.1": np.zeros(H, dtype=np.float32)}, tmp_path / "f.safetensors")
    vector().save(tmp_path / "ours")
    for file, match in (
        ("a.gguf", "begin with GGUF"), ("b.gguf", "architecture 'llama'"), ("c.svec", "KeyError"),
        ("stacked.svec", r"shape \(2, 2\); wanted is \(hidden,\)"), ("twice.svec", "another key"),
        ("d.safetensors", "names no layer"), ("e.safetensors", "one vector"),
        ("f.safetensors", "not zero"), ("none.gguf", "check the path"),
        ("ours/vector.safetensors", "load_vector"),
    ):  # fmt: skip
        with pytest.raises(ArtifactError, match=match):
            import_vector(tmp_path / file, name="m/v")
    save_file({"layer.1": ROWS[1]}, tmp_path / "g.safetensors")
    with pytest.raises(SpecError, match=r"directions at \[1\]"):
        import_vector(tmp_path / "g.safetensors", name="m/v", layer=2)
    with pytest.raises(ArtifactError, match="leave format= out"):
        import_vector(tmp_path / "g.safetensors", name="m/v", format="persona")
    with pytest.raises(SpecError, match="allowed are repeng"):
        import_vector(tmp_path / "g.safetensors", name="m/v", format="mine")  # type: ignore[arg-type]
