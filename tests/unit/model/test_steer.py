from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.model import GenerateConfig, get_model

from inspect_lens.errors import ArtifactError, CaptureError
from inspect_lens.model import lens_config, receipt
from inspect_lens.model._request import resolve_references
from inspect_lens.spec import (
    Add,
    LensRequest,
    SteeringVector,
    decode_tensor,
    to_extra_args,
    to_wire_args,
)
from tests.kit.fake_server import FakeLensServer

from .conftest import GetModel, RunEval

PROMPT = "one two three"


def _vector(seed: int = 0, width: int = 8, **fields: Any) -> SteeringVector:
    values = np.random.default_rng(seed).normal(size=(1, width)).astype(np.float32)
    return SteeringVector(activations=values, layer_indices=[1], **fields)


def _readme(vector: Any) -> GenerateConfig:
    return GenerateConfig(extra_body={"extra_args": {"apply_steering_vectors": [vector]}})


def _log_text(log: EvalLog) -> str:
    with ZipFile(log.location) as archive:
        return "".join(archive.read(name).decode() for name in archive.namelist())


def test_the_wire_form_is_the_one_of_vllm_lens() -> None:
    args = to_wire_args(to_extra_args(LensRequest(edits=[_vector()])))
    (wire,) = json.loads(args["apply_steering_vectors"])
    assert set(wire) == {
        "activations",
        "layer_indices",
        "scale",
        "norm_match",
        "position_indices",
    }
    assert set(wire["activations"]) >= {"data", "dtype", "original_dtype", "shape", "compression"}
    assert SteeringVector.model_validate(wire).vector.sha256 == _vector().vector.sha256


def test_inside_other_things_it_dumps_as_a_reference() -> None:
    vector = _vector()
    dumped = json.loads(_readme(vector).model_dump_json(exclude_none=True))
    (form,) = dumped["extra_body"]["extra_args"]["apply_steering_vectors"]
    assert form == json.loads(json.dumps(vector.reference()))
    assert form["vector"]["sha256"] == vector.vector.sha256
    assert len(json.dumps(form)) < 500


def test_an_edit_of_the_source_does_not_reach_the_vector() -> None:
    source = torch.ones(1, 8)
    vector = SteeringVector(activations=source, layer_indices=[1])
    before = vector.vector.sha256
    source *= 2
    assert vector.vector.to_float32().max() == 1
    assert vector.vector.sha256 == before


@pytest.mark.anyio
@pytest.mark.parametrize("spelling", ["object", "json", "text", "lens_config", "torch", "numpy"])
async def test_every_spelling_reaches_the_server_whole(
    server: FakeLensServer, model_of: GetModel, spelling: str
) -> None:
    vector = _vector(scale=2.0, norm_match=True, position_indices=[3])
    values = vector.vector.to_float32()
    wire = vector.model_dump(mode="json")
    config = {
        "object": _readme(vector),
        "json": _readme(wire),
        "text": GenerateConfig(
            extra_body={"extra_args": {"apply_steering_vectors": json.dumps([wire])}}
        ),
        "lens_config": lens_config(steer=vector),
        "torch": _readme(wire | {"vector": torch.from_numpy(values.copy())}),
        "numpy": _readme(wire | {"vector": values}),
    }[spelling]
    output = await model_of(server).generate(PROMPT, config=config)
    assert output.completion.startswith("steered")
    (sent,) = json.loads(server.requests[-1]["vllm_xargs"]["apply_steering_vectors"])
    np.testing.assert_array_equal(decode_tensor(sent["activations"]).to_float32(), values)
    assert (sent["layer_indices"], sent["scale"], sent["norm_match"]) == ([1], 2.0, True)
    assert sent["position_indices"] == [3]
    done = receipt(output)
    assert done is not None
    assert done.steer is not None
    assert done.steer.vectors == (vector.vector.sha256,)


@pytest.mark.anyio
async def test_a_server_that_does_not_steer_is_an_error(
    plain: FakeLensServer, peer: FakeLensServer, model_of: GetModel
) -> None:
    with pytest.raises(CaptureError, match="without steering"):
        await model_of(plain).generate(PROMPT, config=_readme(_vector()))
    # vllm-lens gives no receipt, and is known by its routes.
    output = await model_of(peer).generate(PROMPT, config=_readme(_vector()))
    assert output.completion.startswith("steered")
    assert receipt(output) is None


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", ["plain", "peer"])
@pytest.mark.parametrize(
    ("native", "message"),
    [
        ({"edits_named": ["v"]}, r"edits_named \['v'\]: the server answered without steering"),
        (
            {"probes": ["other", {"name": "lies", "alarm": "stop"}]},
            r"probes \['other', 'lies'\]: the server answered without running them",
        ),
        ({"edits": [_vector(phase="decode")]}, "steering vectors among them.: the server answered"),
    ],
)
async def test_named_vectors_and_probes_that_a_server_passes_over_are_an_error(
    server: FakeLensServer,
    request: pytest.FixtureRequest,
    model_of: GetModel,
    dialect: str,
    native: dict[str, Any],
    message: str,
) -> None:
    config = GenerateConfig(extra_body={"extra_args": {"inspect_lens": native}})
    with pytest.raises(CaptureError, match=message):
        await model_of(request.getfixturevalue(dialect)).generate(PROMPT, config=config)
    server.probe_scores = {"lies": 1.0, "other": 0.0}
    done = receipt(await model_of(server).generate(PROMPT, config=config))
    assert done is not None
    assert bool(done.steer) == ("probes" not in native)
    assert [probe.name for probe in done.probes] == (["other", "lies"] if done.probes else [])


@pytest.mark.parametrize("spelling", ["object", "json"])
def test_a_vector_stays_out_of_the_log(
    server: FakeLensServer, run_eval: RunEval, spelling: str
) -> None:
    vector = _vector(width=50_000)  # 200 kB
    given = vector if spelling == "object" else vector.model_dump(mode="json")
    plain = len(_log_text(run_eval(server, model=get_model("mockllm/model"), n=3)))
    log = run_eval(server, config=_readme(given), n=3)
    assert log.status == "success"
    text = _log_text(log)
    # As JSON a task's config is logged once as the user wrote it; calls never repeat it.
    config_once = 0 if spelling == "object" else 3 * len(given["vector"]["data"])
    assert len(text) - plain < 3 * 4096 + config_once
    assert "edit/1" in text


@pytest.mark.anyio
async def test_the_logged_form_steers_again(
    server: FakeLensServer, model_of: GetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSPECT_LENS_DIR", str(tmp_path / "kept"))
    vector = _vector(5, scale=0.5)
    await model_of(server).generate(PROMPT, config=_readme(vector))
    logged = json.loads(_readme(vector).model_dump_json(exclude_none=True))
    digest = vector.vector.sha256
    del vector
    await model_of(server).generate(PROMPT, config=GenerateConfig(**logged))
    first, second = (
        json.loads(body["vllm_xargs"]["apply_steering_vectors"])[0] for body in server.requests
    )
    assert first == second
    assert base64.b64decode(first["activations"]["data"])
    assert (
        resolve_references(logged["extra_body"]["extra_args"]["apply_steering_vectors"][0])[
            "vector"
        ].sha256
        == digest
    )


def test_a_lost_vector_is_a_named_error() -> None:
    reference = _vector(99).reference()
    reference["vector"] |= {"sha256": "0" * 64, "uri": "lens-vectors/0.safetensors"}
    with pytest.raises(ArtifactError, match="looked for"):
        resolve_references(reference)


def test_a_logged_file_of_another_vector_is_refused(
    server: FakeLensServer, run_eval: RunEval, tmp_path: Path
) -> None:
    run_eval(server, config=_readme(_vector(7)), n=1)
    (file,) = (tmp_path / "logs" / "lens-vectors").glob("*.safetensors")
    reference = _vector(8).reference()
    reference["vector"] |= {"uri": f"lens-vectors/{file.name}"}
    with pytest.raises(ArtifactError, match="another vector"):
        resolve_references(reference)
    assert read_eval_log is not None


def test_the_vector_of_each_log_is_written(
    server: FakeLensServer, run_eval: RunEval, tmp_path: Path
) -> None:
    for _ in range(2):
        run_eval(server, config=_readme(_vector(71)), n=1)
        (file,) = (tmp_path / "logs" / "lens-vectors").glob("*.safetensors")
        file.unlink()  # as one who clears away a first try


@pytest.mark.anyio
async def test_everything_but_the_numbers_comes_back_from_a_reference(
    server: FakeLensServer, model_of: GetModel
) -> None:
    vector = _vector(
        6, site="resid_pre", phase="decode", scale=0.5, norm_match=True, position_indices=[5, 6]
    )
    await model_of(server).generate(PROMPT, config=lens_config(steer=vector))
    logged = json.loads(json.dumps(vector.reference()))
    assert Add.model_validate(resolve_references(logged)).model_dump() == vector.model_dump()
