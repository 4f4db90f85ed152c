"""Several GPUs: tensor, pipeline, data and expert parallelism against one GPU.

One engine after another, tiny shapes: `python -m pytest tests/gpu/multi` takes minutes on 4 GPUs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from inspect_lens import SteeringVector
from inspect_lens.client import LensClient
from inspect_lens.spec import BLOCK_SITES, Add, result_name
from tests.engine.conftest import Engine, start, tokens
from tests.engine.test_architectures import check_case
from tests.kit.architectures import CASES, LAYERS, Case, write
from tests.kit.engine_probes import check_probes
from tests.kit.reference import HuggingFace
from tests.kit.repository import ROOT
from tests.kit.sampled_edits import check_sampled_edits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]

HIDDEN = 512
TAPS = 3 * LAYERS + 1
MIN_COSINE, MAX_ERROR, MIN_SHARE = 0.998, 0.08, 0.8
"""bfloat16: sums over ranks are added in another order, layer upon layer."""

PROMPTS = [tokens(n, seed=n) for n in (1, 17, 64, 300)]
STEERED_LAYERS = (1, LAYERS - 1)
"""On two stages of a pipeline."""

# Forked children of a process that has looked at a GPU cannot use one.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")

OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 1 << 30,
    "gpu_memory_utilization": 0.2,
}

ENGINES = {
    "tp2": ("llama", 2, {"tensor_parallel_size": 2}),
    "pp2": ("llama", 2, {"pipeline_parallel_size": 2}),
    "tp2-pp2": ("llama", 4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "ep2": ("mixtral", 2, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
}
SERVERS = {
    "dp2": ("llama", ["--data-parallel-size", "2"]),
    "dp2-ep2": ("mixtral", ["--data-parallel-size", "2", "--enable-expert-parallel"]),
}


@dataclass
class Seen:
    """What one engine answered."""

    prompt_rows: list[dict[str, torch.Tensor]]
    """By site, of the prompts, nothing steered."""
    steered: list[tuple[list[int], torch.Tensor]]
    """Tokens fed, and the stream after every layer, steered."""


def vectors() -> list[Add]:
    v = torch.randn(len(STEERED_LAYERS), HIDDEN, generator=torch.Generator().manual_seed(0))
    return [SteeringVector(activations=2.0 * v, layer_indices=list(STEERED_LAYERS))]


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


@cache
def folder(name: str) -> Path:
    made = write(case_of(name), Path(tempfile.mkdtemp(prefix=name)), torch.bfloat16, hidden=HIDDEN)
    # A server wants a tokenizer; its words do not matter here.
    for path in (ROOT / "organism" / "checkpoint").glob("*token*"):
        shutil.copy(path, made)
    return made


@cache
def reference(name: str) -> HuggingFace:
    return HuggingFace(folder(name))


def started(name: str, **options: Any) -> Engine:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("INSPECT_LENS_SITES", "all")
        environment.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        return start(folder(name), **(engine_options(name) | options))


def is_routed(name: str) -> bool:
    return case_of(name).is_routed


def engine_options(name: str) -> dict[str, Any]:
    return OPTIONS | ({"dtype": "float32"} if is_routed(name) else {})


def observe(engine: Engine) -> Seen:
    request = {"inspect_lens": {"capture": {"site": list(BLOCK_SITES), "positions": "prompt"}}}
    outputs = engine.run(PROMPTS, request, max_tokens=4)
    steered = engine.run(
        PROMPTS,
        {"apply_steering_vectors": vectors(), "output_residual_stream": True},
        max_tokens=12,
    )
    for output in outputs:
        n = len(output.prompt_token_ids)
        assert output.inspect_lens.capture.rows == TAPS * n
    for output in steered:
        n = len(output.prompt_token_ids) + 12 - 1
        assert output.inspect_lens.steer.n_tokens == n
        assert output.inspect_lens.steer.layers == STEERED_LAYERS
        assert output.activations["residual_stream"].shape == (LAYERS, n, HIDDEN)
    return Seen(
        [dict(output.activations) for output in outputs],
        [(fed(output), output.activations["residual_stream"]) for output in steered],
    )


def fed(output: Any) -> list[int]:
    return list(output.prompt_token_ids) + list(output.outputs[0].token_ids)[:-1]


@cache
def one_gpu(name: str) -> Seen:
    engine = started(name)
    try:
        return observe(engine)
    finally:
        engine.close()


def compare(found: torch.Tensor, expected: torch.Tensor) -> None:
    found, expected = found.float(), expected.float()
    assert found.shape == expected.shape
    assert float(torch.cosine_similarity(found, expected, dim=-1).min()) >= MIN_COSINE
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.max()) <= MAX_ERROR


def compare_routed(found: torch.Tensor, expected: torch.Tensor) -> None:
    # Ranks add in another order, and a token near a tie between experts takes another one.
    found, expected = found.float(), expected.float()
    assert found.shape == expected.shape
    cosine = torch.cosine_similarity(found, expected, dim=-1)
    assert float((cosine >= MIN_COSINE).float().mean()) >= MIN_SHARE


def check(seen: Seen, name: str) -> None:
    base = one_gpu(name)
    same = compare_routed if is_routed(name) else compare
    for found, expected in zip(seen.prompt_rows, base.prompt_rows, strict=True):
        assert list(found) == [result_name(site) for site in BLOCK_SITES]
        for site, rows in found.items():
            same(rows, expected[site])
    rows = torch.from_numpy(vectors()[0].vector.to_float32().copy())
    edits = {
        layer: (lambda h, v=row: h + v) for layer, row in zip(STEERED_LAYERS, rows, strict=True)
    }
    for ids, stream in seen.steered:
        same(stream, reference(name).residual_stream(ids, edits))


def check_lens(engine: Engine, name: str) -> None:
    """What a lens reads is what the model's head makes of the rows of the same request."""
    asked: list[Any] = [
        {"inspect_lens": {"capture": {}, "lens": {"layers": "all", "top_k": 3, "tokens": [7]}}},
        {"inspect_lens": {"capture": {}, "lens": {"layers": [0], "top_k": 1, "tokens": [7]}}},
        None,
    ]
    # More than run together, so that some begin while others run.
    prompts, requests = PROMPTS * 6, [asked[i % 3] for i in range(6 * len(PROMPTS))]
    model = reference(name).model
    for output, request in zip(engine.run(prompts, requests, max_tokens=9), requests, strict=True):
        if request is None:
            continue
        table = output.inspect_lens.lens.result(output.activations)
        rows = output.activations["residual_stream"].to(model.dtype).to(model.device)
        with torch.no_grad():
            logits = model.lm_head(model.model.norm(rows[list(table.layers)]))
        truth = logits.float().log_softmax(dim=-1).transpose(0, 1).cpu()[list(table.positions)]
        best = truth.topk(table.logprobs.shape[-1], dim=-1).values
        torch.testing.assert_close(torch.from_numpy(table.logprobs), best, atol=0.1, rtol=0)
        chosen = torch.from_numpy(table.target_logprobs[..., 0])
        torch.testing.assert_close(chosen, truth[..., 7], atol=0.1, rtol=0)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_on_several_gpus_equals_one(name: str) -> None:
    model, n_gpus, options = ENGINES[name]
    if torch.cuda.device_count() < n_gpus:
        pytest.skip(f"needs {n_gpus} GPUs")
    engine = started(model, distributed_executor_backend="mp", **options)
    try:
        seen = observe(engine)
        check_probes(engine.llm, engine.run, PROMPTS, HIDDEN, LAYERS)
        check_lens(engine, model)
        edited = (0, LAYERS // 2, LAYERS - 1)
        check_sampled_edits(
            engine.run, PROMPTS, HIDDEN, edited, compare_routed if is_routed(model) else compare
        )
        sent = [tap for taps in engine.llm.collective_rpc("inspect_lens_taps") for tap in taps]
        engine.run([tokens(9)], max_tokens=2)
        left = engine.llm.collective_rpc("inspect_lens_stats")
    finally:
        engine.close()
    check(seen, model)
    assert len(sent) == len(set(sent)) == TAPS
    assert len(left) == n_gpus
    assert not any(n for held in left for name, n in held.items() if name != "waited_ms")


@contextlib.contextmanager
def server(model: str, arguments: Sequence[str], log: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder(model)), "--port", str(port)]
    command += ["--max-model-len", "512", "--no-enable-prefix-caching", *arguments]
    for key, value in engine_options(model).items():
        command += [f"--{key.replace('_', '-')}", str(value)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "INSPECT_LENS_SITES": "all", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            time.sleep(0.5)
        else:
            pytest.fail(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=30)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_a_sum_that_the_next_norm_completes_is_whole(name: str, tmp_path: Path) -> None:
    # Attention and feed-forward modules return shares, which are refused.
    case = replace(case_of(name), sites=("resid_pre", "resid_post"))
    options = OPTIONS | {"dtype": torch.bfloat16, "tensor_parallel_size": 2}
    check_case(case, tmp_path, **options)


@pytest.mark.parametrize("name", SERVERS)
def test_data_parallel_engines_behind_one_server_equal_one(name: str, tmp_path: Path) -> None:
    model, arguments = SERVERS[name]
    with server(model, arguments, tmp_path / "server.log") as url, LensClient(url) as client:

        def ask(prompt: list[int], *, is_steered: bool) -> Any:
            sampling: dict[str, Any] = {"ignore_eos": True}
            if is_steered:
                return client.generate(
                    prompt,
                    max_tokens=12,
                    capture_layers=True,
                    steering_vectors=vectors(),
                    **sampling,
                )
            capture = {"site": list(BLOCK_SITES), "positions": "prompt"}
            return client.generate(prompt, max_tokens=4, capture=capture, **sampling)

        # Enough at once that each of the engines gets a part.
        with ThreadPoolExecutor(16) as pool:
            plain = list(pool.map(lambda p: ask(p, is_steered=False), PROMPTS * 4))
            steered = list(pool.map(lambda p: ask(p, is_steered=True), PROMPTS * 4))
        metrics = httpx.get(f"{url}/metrics").text
    for i in range(0, len(plain), len(PROMPTS)):
        group, other = plain[i : i + len(PROMPTS)], steered[i : i + len(PROMPTS)]
        for out in other:
            assert out.receipt.steer.n_tokens == len(out.prompt_token_ids) + 12 - 1
        seen = Seen(
            [dict(out.activations) for out in group],
            [
                (out.prompt_token_ids + out.token_ids[:-1], out.activations["residual_stream"])
                for out in other
            ],
        )
        check(seen, model)
    assert all(served_by(metrics, rank) > 0 for rank in (0, 1))


def served_by(metrics: str, rank: int) -> float:
    """Requests that a data-parallel engine finished."""
    return sum(
        float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        if line.startswith("vllm:request_success_total") and f'engine="{rank}"' in line
    )
