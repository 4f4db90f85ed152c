"""`python -m benchmarks.soak --requests 10000 --out FILE`: everything at once, for long.

Steered, captured, aborted and plain requests share one engine. Each answer is compared with
what the same engine gave to the same request alone, and in the end nothing may be left. How
often an answer may differ is what plain requests among plain ones show, in an engine without the
lens and in this one before anything is steered. With `--batch-invariant`, on a GPU that has the
kernels for it, no answer depends on its neighbours, and so none may differ.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inspect_lens.probe import clopper_pearson
from tests.kit.child import ROOT, Child
from tests.kit.files import write_json
from tests.kit.process_tree import cpu_model

from .soak_plan import N_PROMPTS

__all__ = ["allowed_differences", "judge", "main", "soak"]

ROW_TOLERANCE = {"torch.float32": 1e-4, "torch.bfloat16": 0.1}
"""Largest relative error of a row. bfloat16: other batch sizes take other kernels, and rows of
one engine were seen to differ by 2% in the middle of a model and 6% at its end."""


def allowed_differences(n: int, unsteady: int, n_prompts: int = N_PROMPTS) -> int:
    """Answers of `n` that may differ, from how many prompts have one that batching changes.

    None where none has. Else the upper end of the exact (Clopper-Pearson) 95% interval of their
    share, times `n`: prompts are what was drawn, and one that is near a tie differs each time.
    """
    if unsteady == 0:
        return 0
    return int(n * clopper_pearson(unsteady, n_prompts).high)


def judge(floor: dict[str, Any], found: dict[str, Any], dtype: str) -> list[str]:
    """What is wrong, in words; empty when nothing is.

    Args:
        floor: of the engine without the lens, as `soak_worker.Worker.floor` returns it.
        found: of the mix, as `soak_worker.Worker.soak` returns it, with the floor of its engine.
        dtype: of the engine, as torch names it.
    """
    problems = [f"{found['n_errors']} requests failed: {found['errors']}"] * bool(found["n_errors"])
    unsteady = max(len(f["unsteady_prompts"]) for f in (floor, found["floor"]))
    for kind, n in found["requests"].items():
        allowed = allowed_differences(n, unsteady)
        if found["different"][kind] > allowed:
            problems.append(
                f"{found['different'][kind]} of {n} {kind} answers differ from their solo "
                f"answers; {allowed} allowed"
            )
    if not found["rows"]:
        problems.append("no row was compared")
    if not found["largest_row_error"] <= ROW_TOLERANCE[dtype]:
        problems.append(f"largest error of a row: {found['largest_row_error']}")
    if not found["left_early"]:
        problems.append("no client went away before its end")
    problems += [f"{n} {name} left" for name, n in found["left"].items() if n]
    problems += [
        f"{name} grew by {found[name]}"
        for name in ("descriptors", "shared_bytes", "processes")
        if found[name] > 0
    ]
    if not found["lives"]:
        problems.append("afterwards a plain request differs from its first answer")
    return problems


def soak(
    folder: Path,
    *,
    requests: int,
    seed: int = 0,
    limit_s: float = 3600,
    is_invariant: bool = False,
    **overrides: Any,
) -> dict[str, Any]:
    """Run floor and mix, each in an engine of its own.

    Args:
        folder: where the model and logs are written.
        requests: of the mix.
        seed: of prompts, vectors, kinds and order.
        limit_s: seconds to wait for the mix.
        is_invariant: whether both engines take vLLM's batch-invariant kernels.
        **overrides: options of both engines.

    Returns:
        What is written: `environment`, `floor`, `mix`, `problems`, `passed`.
    """
    import torch

    from tests.kit.tiny_models import marked_llama

    is_cuda = torch.cuda.is_available()
    model = folder / "model"
    if not model.exists():
        marked_llama(model, dtype=torch.bfloat16 if is_cuda else torch.float32)
    options = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16" if is_cuda else "float32",
        "max_model_len": 256,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 128,
        "block_size": 32,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": 64 << 20,
        "gpu_memory_utilization": 0.3,
        **overrides,
    }
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    base = {**os.environ, "PYTHONPATH": path, "VLLM_PLUGINS": "inspect_lens"}
    if is_invariant:
        base["VLLM_BATCH_INVARIANT"] = "1"
    off = {**base, "INSPECT_LENS_DISABLE": "1"}
    with Child("benchmarks.soak_worker", environment=off, log=folder / "floor.log") as child:
        child.ask(600, do="start", options=options)
        floor = child.ask(limit_s, do="floor", seed=seed, n=max(requests // 4, 200))
    with Child("benchmarks.soak_worker", environment=base, log=folder / "soak.log") as child:
        environment = child.ask(600, do="start", options=options)
        mix = child.ask(limit_s, do="soak", seed=seed, n=requests)
    mine, theirs = mix.pop("solo_tokens"), floor.pop("solo_tokens")
    problems = judge(floor, mix, environment["dtype"])
    return {
        "environment": {"cpu": cpu_model(), "cpus": os.cpu_count()} | environment,
        "seed": seed,
        "floor": floor,
        "mix": mix,
        "solo_answers_that_differ_from_an_engine_without_the_lens": sum(
            mine[k] != theirs[k] for k in mine
        ),
        "problems": problems,
        "passed": not problems,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak; the exit code is 1 where something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True, help="JSON file")
    parser.add_argument("--limit", type=float, default=500.0, help="seconds to wait for the mix")
    parser.add_argument(
        "--batch-invariant", action="store_true", help="vLLM's batch-invariant kernels (a GPU)"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        result = soak(
            Path(folder), requests=options.requests, seed=options.seed, limit_s=options.limit,
            is_invariant=options.batch_invariant,
        )  # fmt: skip
    invariant = " --batch-invariant" * options.batch_invariant
    result["command"] = f"python -m benchmarks.soak --requests {options.requests}{invariant}"
    write_json(Path(options.out), result)
    for problem in result["problems"]:
        sys.stdout.write(f"soak: {problem}\n")
    state = "passed" if result["passed"] else "FAILED"
    took = result["mix"]["seconds"]
    sys.stdout.write(f"soak: {state}: {options.requests} requests in {took:.0f} s\n")
    return int(not result["passed"])


if __name__ == "__main__":
    sys.exit(main())
