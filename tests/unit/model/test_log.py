from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.model import GenerateConfig, Model, get_model
from inspect_ai.scorer import Score, Scorer, mean, scorer
from inspect_ai.solver import Generate, TaskState, solver

from inspect_lens.errors import ArtifactError
from inspect_lens.model import (
    Activations,
    activations,
    activations_for,
    lens_config,
    read_activations,
    receipt,
)
from inspect_lens.model._handle import MEMORY
from tests.kit.fake_server import FakeLensServer, residual

from .conftest import GetModel, RunEval

CAPTURE = GenerateConfig(extra_body={"extra_args": {"output_residual_stream": [1, 2]}})


@scorer(metrics=[mean()])
def announced() -> Scorer:
    """The scorer of the announcement, word for word."""

    async def score(state: TaskState, target: Any) -> Score:
        acts = state.output.metadata["activations"]["residual_stream"][0]
        return Score(value=acts.float().mean().item())

    return score


def _sample_bytes(log: EvalLog) -> float:
    with ZipFile(log.location) as archive:
        sizes = [len(archive.read(n)) for n in archive.namelist() if n.startswith("samples/")]
    return sum(sizes) / len(sizes)


def _expected(acts: Activations) -> np.ndarray:
    tokens = [*acts.prompt_token_ids, *acts.token_ids]
    return residual(tokens, acts.layers, list(acts.positions)).to_float32()


@pytest.fixture
def short_logs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A folder of ordinary length: its path is in each reference."""
    folder = Path("/tmp") / f"lens-{tmp_path_factory.mktemp('x').parent.name}"
    yield str(folder)
    shutil.rmtree(folder, ignore_errors=True)


def test_a_sample_grows_by_less_than_a_kilobyte(
    server: FakeLensServer, run_eval: RunEval, short_logs: str
) -> None:
    """And without a capture by nothing, compared with Inspect's own provider."""
    vllm = get_model("vllm/org/tiny", base_url=f"{server.url}/v1", memoize=False)
    for config, most in ((CAPTURE, 1024), (None, 128)):
        # Twelve samples, because Inspect logs the raw call of the first five only.
        bare, ours = (
            run_eval(server, config=config, model=model, n=12, log_dir=short_logs)
            for model in (vllm, None)
        )
        assert _sample_bytes(ours) - _sample_bytes(bare) < most


def test_the_reference_is_small_and_says_what_there_is(
    server: FakeLensServer, run_eval: RunEval
) -> None:
    log = read_eval_log(run_eval(server, model=None, config=CAPTURE).location)
    assert log.samples is not None
    reference = log.samples[0].output.metadata["activations"]
    assert set(reference) == {
        "$lens",
        "uri",
        "root",
        "tensors",
        "sha256",
        "n_prompt",
        "n_completion",
    }
    assert reference["tensors"] == {"residual_stream": "bfloat16 2x8x8 layers 1,2"}
    assert not reference["uri"].startswith("/")
    assert len(json.dumps(reference)) <= 400
    assert "token_ids" not in json.dumps(log.samples[0].output.metadata)


def test_a_log_reads_back(server: FakeLensServer, run_eval: RunEval) -> None:
    live = run_eval(server, config=CAPTURE, epochs=2)
    MEMORY.clear()
    log = read_eval_log(live.location)
    calls = read_activations(log)
    assert len(calls) == 6
    assert {(call.sample_id, call.epoch) for call in calls} == {
        (i, epoch) for i in (1, 2, 3) for epoch in (1, 2)
    }
    for call in calls:
        np.testing.assert_array_equal(call.activations.numpy(), _expected(call.activations))
        assert call.activations.origin["message_id"] == call.message_id
        assert call.activations.receipt is not None
    assert log.samples is not None
    sample = log.samples[0]
    handle = activations(sample.output)
    assert handle is not None
    assert handle == activations(sample.output.model_dump())
    assert handle == activations(sample.output.metadata)
    assert receipt(sample.output) == handle.receipt
    assert [call.message_id for call in read_activations(sample)] == [sample.output.message.id]
    assert read_activations(live.location) == calls


@pytest.mark.slow
def test_scoring_again_needs_no_server_and_no_help(
    server: FakeLensServer, run_eval: RunEval, tmp_path: Path
) -> None:
    log = run_eval(server, config=CAPTURE, model=None)
    assert log.samples is not None
    expected = [
        float(read_activations(sample)[0].activations.numpy().mean()) for sample in log.samples
    ]
    server.requests.clear()
    script = textwrap.dedent(
        f"""
        import sys
        from inspect_ai import score
        from inspect_ai.log import read_eval_log
        from inspect_ai.scorer import Score, mean, scorer
        from inspect_lens.model import activations, activations_for

        @scorer(metrics=[mean()])
        def again():
            async def run(state, target):
                acts = activations(state.output)
                assert activations_for(state.output.message).sha256 == acts.sha256
                assert activations_for(state.messages[-1]).sha256 == acts.sha256
                return Score(value=float(acts.numpy("residual_stream").mean()))
            return run

        done = score(read_eval_log({log.location!r}), again(), display="none")
        assert done.status == "success", done.error
        values = [sample.scores["again"].value for sample in done.samples]
        assert values == {expected!r}, values
        assert "torch" not in sys.modules and "vllm" not in sys.modules
        """
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run([sys.executable, "-c", script], check=True, cwd=elsewhere)
    assert not server.requests


def test_every_turn_of_an_agent_is_there(server: FakeLensServer, run_eval: RunEval) -> None:
    @solver
    def turns() -> Any:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            for _ in range(3):
                state = await generate(state)
            return state

        return solve

    log = run_eval(server, config=CAPTURE, solver=turns(), n=1)
    assert log.status == "success", log.error
    calls = read_activations(read_eval_log(log.location))
    assert len({call.message_id for call in calls}) == 3
    assert len({call.activations.n_prompt for call in calls}) == 3
    assert all(activations_for(call.message_id or "") is not None for call in calls)


def test_choices_of_a_logged_call_are_all_there(server: FakeLensServer, run_eval: RunEval) -> None:
    log = run_eval(server, config=lens_config(base=CAPTURE, num_choices=2), n=1)
    assert log.status == "success", log.error
    MEMORY.clear()
    calls = read_activations(read_eval_log(log.location))
    assert [call.activations.n_completion for call in calls] == [3, 4]
    for call in calls:
        np.testing.assert_array_equal(call.activations.numpy(), _expected(call.activations))


def test_memory_writes_no_file_and_says_so_when_it_is_gone(
    server: FakeLensServer, run_eval: RunEval, model_of: GetModel, tmp_path: Path
) -> None:
    model = model_of(server, activations="memory", capture=[1])
    log = run_eval(server, model=model, scorer=announced())
    assert log.status == "success", log.error
    assert not list((tmp_path / "logs").glob("*.lens"))
    (call, *_) = read_activations(read_eval_log(log.location))
    assert call.activations.tensors["residual_stream"].shape[0] == 1
    with pytest.raises(ArtifactError, match="INSPECT_LENS_DIR"):
        call.activations["residual_stream"]


def test_drop_keeps_shapes_only(
    server: FakeLensServer, run_eval: RunEval, model_of: GetModel
) -> None:
    model = model_of(server, activations="drop", capture=[1])
    log = run_eval(server, model=model)
    (call, *_) = read_activations(log)
    assert call.activations.tensors["residual_stream"].shape == (1, 8, 8)
    with pytest.raises(ArtifactError, match="drop"):
        call.activations.numpy()


def test_a_damaged_or_missing_file_is_a_named_error(
    server: FakeLensServer, run_eval: RunEval, tmp_path: Path
) -> None:
    log = run_eval(server, config=CAPTURE, n=2)
    first, second = read_activations(read_eval_log(log.location))
    files = list((tmp_path / "logs").glob("*.lens/*.safetensors"))
    contents = [file.read_bytes() for file in files]
    files[0].write_bytes(contents[1])
    files[1].write_bytes(contents[0])
    MEMORY.clear()
    with pytest.raises(ArtifactError, match="the log refers to"):
        first.activations.numpy()
    for file in files:
        file.write_bytes(b"no")
    with pytest.raises(ArtifactError, match="damaged"):
        second.activations.numpy()
    for file in files:
        file.unlink()
    with pytest.raises(ArtifactError, match="looked for"):
        second.activations.numpy()


def test_a_header_has_no_activations(server: FakeLensServer, run_eval: RunEval) -> None:
    log = run_eval(server, config=CAPTURE, n=1)
    with pytest.raises(ArtifactError, match="header_only"):
        read_activations(read_eval_log(log.location, header_only=True))


def test_a_role_is_logged_without_a_port_of_ours() -> None:
    model: Model = get_model("lens/org/tiny", memoize=False)
    assert model.api.base_url is None
