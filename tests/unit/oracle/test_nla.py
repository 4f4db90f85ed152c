"""`nla_meta.yaml` of a verbaliser as it is published, and where the row goes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import yaml
from inspect_ai.model import get_model

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model import activations, lens_config
from inspect_lens.oracle import Verbaliser, read_verbaliser, verbalise
from inspect_lens.spec import Replace, parse_extra_args
from tests.kit.fake_server import FakeLensServer, tokens_of

META: dict[str, Any] = {
    "kind": "nla_model",
    "schema_version": 1,
    "role": "av",
    "d_model": 3584,
    "extraction": {"injection_scale": 150.0, "mse_scale": 59.87, "layer_index": 20},
    "tokens": {
        "injection_char": "\u320e",
        "injection_token_id": 149705,
        "injection_left_neighbor_id": 29,
        "injection_right_neighbor_id": 522,
    },
    "prompt_templates": {"av": "Say what <concept>{injection_char}</concept> is."},
}


def saved(folder: Path, meta: object) -> Path:
    (folder / "nla_meta.yaml").write_text(yaml.safe_dump(meta, allow_unicode=True), "utf-8")
    return folder


def test_the_contract_of_a_verbaliser_is_read(tmp_path: Path) -> None:
    found = read_verbaliser(saved(tmp_path, META))
    assert found == read_verbaliser(tmp_path / "nla_meta.yaml").model_copy(
        update={"name": str(tmp_path)}
    )
    assert (found.hidden, found.layer, found.scale) == (3584, 20, 150.0)
    assert (found.char, found.left_id, found.token_id, found.right_id) == (
        "\u320e", 29, 149705, 522,
    )  # fmt: skip
    old = {k: v for k, v in META.items() if k != "role"} | {
        "prompt_templates": {"actor": META["prompt_templates"]["av"]},
        "extraction": {"injection_scale": 80000},
    }
    assert read_verbaliser(saved(tmp_path, old)).layer is None
    # As the published checkpoints have it, and a length in words.
    new = old | {"extraction_layer_index": 32, "extraction": {"injection_scale": "sqrt_d_model"}}
    found = read_verbaliser(saved(tmp_path, new))
    assert (found.layer, found.scale) == (32, pytest.approx(3584**0.5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"role": "ar"}, "role 'ar'"),
        ({"kind": "nla_dataset"}, "kind 'nla_dataset'"),
        ({"tokens": None}, "not the nla_meta.yaml"),
        ({"d_model": "wide"}, "not the nla_meta.yaml"),
        ({"extraction": {"injection_scale": None}}, "not the nla_meta.yaml"),
        ({"extraction": {"injection_scale": math.inf}}, "finite"),
        ({"d_model": 10**400, "extraction": {"injection_scale": "sqrt_d_model"}}, "OverflowError"),
        ({"prompt_templates": {"av": "no place"}}, "no or several places"),
    ],
)
def test_what_is_no_verbaliser_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        read_verbaliser(saved(tmp_path, META | change))


def test_code_in_yaml_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "nla_meta.yaml").write_text("!!python/object/apply:os.getcwd []")
    with pytest.raises(ArtifactError, match="could not determine a constructor"):
        read_verbaliser(tmp_path)
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_verbaliser(tmp_path / "none")


def test_a_row_of_its_length_takes_the_place_of_the_marked_token() -> None:
    left, mark, right = tokens_of("what mark is")
    own = Verbaliser(
        name="x", hidden=8, layer=2, scale=5.0, char="mark",
        prompt="mark Say what {injection_char} is", left_id=left, token_id=mark, right_id=right,
    )  # fmt: skip

    async def main(server: FakeLensServer) -> None:
        model = get_model("lens/org/tiny", base_url=server.url, memoize=False)
        output = await model.generate("tell me", config=lens_config(capture=[2]))
        server.says_next = [("<explanation> a thing </explanation> and more", [])]
        (answer,) = await verbalise(output, own, model=model, subject=model, controls=False)
        assert (answer.answer, answer.layers) == ("a thing", (2,))
        request = parse_extra_args(server.requests[-1]["vllm_xargs"])
        assert request is not None
        (edit,) = request.edits
        assert isinstance(edit, Replace)
        assert (edit.layers, edit.site) == ((0,), "resid_pre")
        ids = tokens_of(server.requests[-1]["messages"][-1]["content"])
        (place,) = edit.positions  # type: ignore[misc]
        # The first `mark` of the prompt has other neighbours.
        shift = place - ids.index(left) - 1
        assert ids[place - shift] == mark
        assert place - shift > ids.index(mark)
        handle = activations(output)
        assert handle is not None
        row = handle.numpy()[0][answer.positions[0] - handle.positions[0]].astype(np.float64)
        wanted = 5.0 * row / np.linalg.norm(row)
        np.testing.assert_allclose(edit.rows.to_float32().reshape(-1), wanted, rtol=1e-5)
        lost = own.model_copy(update={"layer": None})
        with pytest.raises(SpecError, match="states none"):
            await verbalise(output, lost, model=model, subject=model)

    with FakeLensServer() as server:
        anyio.run(main, server)
