"""Hooks, queries and keys through the provider: what stands in metadata, and what in the log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inspect_ai import Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.solver import Generate, TaskState, solver

from inspect_lens import Hook
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.model import lens_config, read_results
from tests.kit.fake_server import FakeLensServer

from .conftest import GetModel

pytestmark = pytest.mark.anyio

PROMPT = "one two three"


def note(ctx: Any, h: Any) -> None:
    ctx.saved["n"] = len(h)


HOOK = Hook(fn=note, layer_indices=[1])


@pytest.mark.parametrize("stream", [False, True])
async def test_results_are_in_the_metadata(
    server: FakeLensServer, model_of: GetModel, stream: bool
) -> None:
    config = GenerateConfig(extra_body={"extra_args": {"apply_hooks": [HOOK]}})
    output = await model_of(server, stream=stream).generate(PROMPT, config=config)
    saved = output.metadata["hook_results"]
    assert saved["0"]["layers"] == [1]
    assert isinstance(saved["0"]["rows"][0], torch.Tensor)
    assert isinstance(json.loads(server.requests[-1]["vllm_xargs"]["apply_hooks"]), list)


async def test_every_choice_has_its_own(server: FakeLensServer, model_of: GetModel) -> None:
    config = lens_config(hooks=[HOOK], num_choices=2)
    output = await model_of(server).generate(PROMPT, config=config)
    second = output.choices[1].message.metadata["hook_results"]
    assert (output.metadata["hook_results"]["0"]["choice"], second["0"]["choice"]) == (0, 1)


async def test_a_log_has_no_code_and_gives_the_results_back(
    server: FakeLensServer, model_of: GetModel, tmp_path: Path
) -> None:
    @solver
    def hooked() -> Any:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            return await generate(state, extra_body=lens_config(hooks=[HOOK]).extra_body)

        return solve

    task = Task(dataset=[Sample(input=PROMPT)], solver=hooked())
    (log,) = await eval_async(
        task, model=model_of(server), log_dir=str(tmp_path), log_format="json"
    )
    assert log.status == "success", log.error
    text = Path(log.location).read_text()
    assert "cloudpickle" not in text
    found = json.loads(text)["samples"][0]["output"]["metadata"]["hook_results"]
    saved = read_results(found)
    assert saved is not None
    np.testing.assert_array_equal(saved["0"]["rows"][0].numpy(), np.zeros((2, 3)))


async def test_what_is_too_large_for_a_log_is_an_error(
    server: FakeLensServer, model_of: GetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inspect_lens.model._response.HOOK_RESULTS_BYTES", 10)
    with pytest.raises(CaptureError, match="a log takes 10"):
        await model_of(server).generate(PROMPT, config=lens_config(hooks=[HOOK]))


async def test_a_server_that_runs_no_hooks_is_an_error(
    plain: FakeLensServer, model_of: GetModel
) -> None:
    with pytest.raises(CaptureError, match="without results of hooks"):
        await model_of(plain).generate(PROMPT, config=lens_config(hooks=[HOOK]))


def test_configs_merge_hooks() -> None:
    first = lens_config(hooks=[HOOK])
    assert lens_config(base=first).extra_body["extra_args"]["apply_hooks"][0].fn is HOOK.fn
    assert lens_config(hooks=[], base=first).extra_body is None
    with pytest.raises(SpecError, match="give a Hook"):
        lens_config(hooks=[3])
    for one in (HOOK, HOOK.model_dump(mode="json"), iter([HOOK])):
        assert len(lens_config(hooks=one).extra_body["extra_args"]["apply_hooks"]) == 1
