"""Experts on two workers on a CPU: the same rows, each from one worker, as without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from inspect_lens import SteeringVector
from inspect_lens.spec import BLOCK_SITES
from tests.engine.conftest import Engine, start, tokens
from tests.engine.test_capture import TOLERANCE, fed
from tests.engine.test_sites import capture, check, check_edits
from tests.kit.architectures import CASES, LAYERS, write
from tests.kit.inner_edits import expert_cases, head_cases
from tests.kit.reference import HuggingFace, max_relative_error

pytestmark = pytest.mark.engine

HIDDEN = 256
"""Four heads and two key heads, so that each worker has groups of its own."""
INNER = ("q", "k", "v", "z", "resid_mid", "router_logits")

# vLLM 0.32's experts for CPUs read beyond their weights for tokens of another rank's experts. Told
# that these weigh nothing, they compute what they should.
EXPERTS_OF_A_RANK = """
def register():
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    experts = cpu_moe.CPUUnquantizedExperts
    original = experts.apply

    def apply(self, **given):
        if (expert_map := given["expert_map"]) is not None:
            own = expert_map[given["topk_ids"].long()]
            given["topk_weights"] = given["topk_weights"].masked_fill(own < 0, 0)
            given["topk_ids"] = own.clamp(min=0).to(given["topk_ids"].dtype)
        return original(self, **given)

    if not hasattr(original, "minds_the_map"):
        apply.minds_the_map = True
        experts.apply = apply
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = next(case for case in CASES if case.name == "mixtral")
    return write(case, tmp_path_factory.mktemp("mixtral"), torch.float32, hidden=HIDDEN)


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    plugin = tmp_path_factory.mktemp("plugin")
    (plugin / "experts_of_a_rank.py").write_text(EXPERTS_OF_A_RANK)
    info = plugin / "experts_of_a_rank-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: experts-of-a-rank\nVersion: 0\n")
    lines = "[vllm.general_plugins]\nexperts_of_a_rank = experts_of_a_rank:register\n"
    (info / "entry_points.txt").write_text(lines)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("INSPECT_LENS_SITES", ",".join([*BLOCK_SITES, *INNER]))
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        # Processes that begin anew load the plug-in.
        environment.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        # They are given this process's path.
        environment.syspath_prepend(str(plugin))
        made = start(
            folder, enforce_eager=True, tensor_parallel_size=2, enable_expert_parallel=True
        )
    yield made
    made.close()


def test_rows_of_experts_on_two_workers_equal_hugging_face(engine: Engine, folder: Path) -> None:
    config = engine.llm.llm_engine.vllm_config.parallel_config
    assert config.enable_expert_parallel
    twin = HuggingFace(folder)
    for output in engine.run([tokens(n, seed=n) for n in (1, 40, 120)], capture(*BLOCK_SITES)):
        ids = fed(output)
        rows = output.activations["residual_stream"]
        assert rows.shape == (LAYERS, len(ids), HIDDEN)
        assert max_relative_error(rows, twin.residual_stream(ids)) <= TOLERANCE
        assert output.inspect_lens.capture.rows == (3 * LAYERS + 1) * len(ids)
    sent = [tap for taps in engine.llm.collective_rpc("inspect_lens_taps") for tap in taps]
    assert len(sent) == len(set(sent)) == (3 + len(INNER)) * LAYERS + 1


def test_router_logits_equal_hugging_face(engine: Engine, folder: Path) -> None:
    twin = HuggingFace(folder)
    for output in engine.run([tokens(n, seed=n) for n in (3, 120)], capture(*INNER)):
        expected = twin.inner_sites(fed(output))
        assert output.activations["router_logits"].shape == (LAYERS, len(fed(output)), 4)
        check(output, expected)


def test_edits_of_experts_and_of_heads_in_groups_equal_hugging_face(
    engine: Engine, folder: Path
) -> None:
    twin = HuggingFace(folder)
    check_edits(engine, twin, [*expert_cases(4), *head_cases(twin.model)], tokens(90, seed=3))


def test_steering_meets_experts_on_both_workers(engine: Engine, folder: Path) -> None:
    v = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(3))
    vector = SteeringVector(activations=v, layer_indices=[1], scale=2.0)
    asked = {"apply_steering_vectors": [vector], "output_residual_stream": True}
    output = engine.run([tokens(60)], asked, max_tokens=9)[0]
    expected = HuggingFace(folder).residual_stream(fed(output), {1: lambda h: h + 2.0 * v[0]})
    assert max_relative_error(output.activations["residual_stream"], expected) <= TOLERANCE
    assert output.inspect_lens.steer.n_tokens == len(fed(output))
