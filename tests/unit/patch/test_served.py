"""A server is asked for the same as an engine in this process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inspect_lens.client import LensClient
from inspect_lens.errors import CaptureError
from inspect_lens.patch import causal_trace, patch_sweep
from tests.kit.toy_runs import ToyRuns, ToyServer

CLEAN, CORRUPTED = "The river Talmo is in", "The river Velosh is in"


def locally(function: Any, *args: Any, **options: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inspect_lens.patch._sweep.open_runs", lambda _: ToyRuns())
        return function(None, *args, **options)


def test_a_sweep_over_http_is_the_sweep_in_this_process() -> None:
    asked: dict[str, Any] = {"answer": " Verun", "foil": " Sar", "window": 2, "floor_runs": 2}
    with ToyServer(ToyRuns()) as server, LensClient(server.url) as client:
        found = patch_sweep(client, CLEAN, CORRUPTED, **asked)
        bodies = server.requests
    wanted = locally(patch_sweep, CLEAN, CORRUPTED, **asked)
    np.testing.assert_allclose(found.metric, wanted.metric, atol=1e-6)
    assert (found.layers, found.positions) == (wanted.layers, wanted.positions)
    assert found.floor == pytest.approx(wanted.floor, abs=1e-6)
    # One request for each cell and idle run, both runs, the two captures, and four tokenisations.
    assert len(bodies) == found.metric.size + 4 + 2 + 2 + 4
    assert {body["max_tokens"] for body in bodies} == {1}


def test_a_trace_over_http_is_the_trace_in_this_process() -> None:
    asked: dict[str, Any] = {"subject": [3, 4], "answer": " Verun", "draws": 3}
    with ToyServer(ToyRuns()) as server, LensClient(server.url) as client:
        found = causal_trace(client, CLEAN, **asked)
    wanted = locally(causal_trace, CLEAN, **asked)
    np.testing.assert_allclose(found.restored, wanted.restored, atol=1e-6)
    np.testing.assert_allclose(found.corrupted, wanted.corrupted, atol=1e-6)


def test_a_server_without_the_log_probabilities_is_named() -> None:
    with (
        ToyServer(ToyRuns(), knows_tokens=False) as server,
        LensClient(server.url) as client,
        pytest.raises(CaptureError, match="logprob_token_ids"),
    ):
        patch_sweep(client, CLEAN, CORRUPTED, answer=" Verun", foil=" Sar")
