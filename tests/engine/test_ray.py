"""Workers that Ray starts and places: what two workers of vLLM's own do, they do."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import Engine, start
from tests.engine.test_parallel import (
    test_each_tap_is_sent_by_one_worker,
    test_edits_of_heads_of_either_rank_equal_hugging_face,
    test_hooks_run_on_the_worker_that_has_the_layer,
    test_nothing_is_left_behind,
    test_parameters_are_whole_on_every_worker,
    test_probes_read_layers_of_both_stages,
    test_reductions_of_both_stages,
    test_rows_of_every_site_equal_hugging_face,
    test_shares_of_ranks_are_put_together,
    test_steering_on_one_stage_or_both,
    test_steering_without_capture_is_confirmed,
)
from tests.engine.test_sites import SERVED
from tests.kit.ray_on_cpu import ray_environment, why_no_ray

__all__ = [
    "test_each_tap_is_sent_by_one_worker",
    "test_edits_of_heads_of_either_rank_equal_hugging_face",
    "test_hooks_run_on_the_worker_that_has_the_layer",
    "test_nothing_is_left_behind",
    "test_parameters_are_whole_on_every_worker",
    "test_probes_read_layers_of_both_stages",
    "test_reductions_of_both_stages",
    "test_rows_of_every_site_equal_hugging_face",
    "test_shares_of_ranks_are_put_together",
    "test_steering_on_one_stage_or_both",
    "test_steering_without_capture_is_confirmed",
]

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(why_no_ray() is not None, reason=str(why_no_ray())),
]


@pytest.fixture(
    scope="module",
    params=[{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}],
    ids=["tp2", "pp2"],
)
def two(
    request: pytest.FixtureRequest, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    environment = ray_environment(tmp_path_factory.mktemp("ray"), places=2)
    with (
        pytest.MonkeyPatch.context() as patch,
        # Sockets lie in it, whose paths have to be short.
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as short,
    ):
        for name, value in {
            **environment,
            "RAY_TMPDIR": short,
            "INSPECT_LENS_SITES": ",".join(SERVED),
            "INSPECT_LENS_ALLOW_CODE": "1",
            "INSPECT_LENS_HOSTS_ADDRESS": "127.0.0.1",
        }.items():
            patch.setenv(name, value)
        # The engine's process takes over this one's path, not what the environment says.
        for folder in reversed(environment["PYTHONPATH"].split(":")):
            patch.syspath_prepend(folder)
        made = start(
            tiny_folder, enforce_eager=True, distributed_executor_backend="ray", **request.param
        )
        yield made
        made.close()
