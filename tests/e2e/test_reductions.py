"""A reduced capture through Inspect: shape, receipt and log, on a real engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.solver import Solver

from inspect_lens.model import Activations, read_activations
from inspect_lens.solver import with_capture
from tests.kit.lying import run_eval

pytestmark = pytest.mark.engine

QUESTIONS = ["Who is the founder of the town Velosh?", "Where does the founder of Velosh live?"]


def captured(solver: Solver, url: str, folder: Path) -> list[Activations]:
    task = Task(
        dataset=[Sample(question) for question in QUESTIONS],
        solver=solver,
        config=GenerateConfig(temperature=0, max_tokens=12),
    )
    return [call.activations for call in read_activations(run_eval(task, url, folder).location)]


def test_a_mean_in_a_log_is_that_of_all_rows(lens_server_url: str, tmp_path: Path) -> None:
    whole = captured(with_capture([1, 4]), lens_server_url, tmp_path)
    solver = with_capture([1, 4], reduce="mean", phase="prefill")
    for one, rows in zip(captured(solver, lens_server_url, tmp_path), whole, strict=True):
        info = one.tensors["residual_stream"]
        assert (info.shape, info.reduce) == ((2, 1, 256), "mean")
        assert one.positions == tuple(range(one.n_prompt))
        assert one.receipt is not None
        assert one.receipt.capture is not None
        assert one.receipt.capture.rows == 2 * one.n_prompt
        truth = rows.numpy()[:, : one.n_prompt].mean(axis=1, keepdims=True)
        np.testing.assert_allclose(one.numpy(), truth, rtol=1e-4, atol=1e-4)
