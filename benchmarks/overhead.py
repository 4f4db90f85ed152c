"""What the lens costs on a GPU, against an engine without taps in the same process.

`python benchmarks/overhead.py --out benchmarks/results/MACHINE-DATE.json`

Shapes are those of the named models with random weights, prompts are random token ids, and every
request samples a fixed number of tokens. Arms take turns, and results reach the client in all of
them: the time is that of `LLM.generate`, from the first request to the last tensor.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# One process, so that both engines see the same machine and arrival times play no part.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# Two halves of 32 layers times 16384 tokens times 8 KiB: what capturing all layers needs here.
os.environ["INSPECT_LENS_RING_BYTES"] = str(8 << 30)

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LOADS = {"8x256": (8, 256), "256x128": (256, 128), "1000x128": (1000, 128)}
"""Requests and sampled tokens; prompts have 16 to 48 tokens."""


def arms(hidden: int) -> dict[str, dict[str, Any] | None]:
    """Lens requests by name of the arm; None is a plain request."""
    import torch

    from inspect_lens import SteeringVector

    vector = SteeringVector(
        activations=torch.randn(1, hidden, generator=torch.Generator().manual_seed(0)),
        layer_indices=[10],
        scale=0.1,
    )
    return {
        "default": None,
        "idle": None,
        "capture-1": {"output_residual_stream": [10]},
        "steer": {"apply_steering_vectors": [vector]},
        "capture-all": {"output_residual_stream": True},
    }


def start(folder: str, *, disable: bool) -> Any:
    """Start an engine with vLLM's defaults."""
    from vllm import LLM

    os.environ["INSPECT_LENS_DISABLE"] = "1" if disable else "0"
    return LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=2048,
        # Both engines are resident at once; the cache holds 1000 of the requests.
        gpu_memory_utilization=0.42,
        kv_cache_memory_bytes=24 << 30,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )


def measure(llm: Any, extra: dict[str, Any] | None, load: str, repetition: int) -> float:
    """Seconds of one run; checks that what was asked for came."""
    from vllm import SamplingParams

    n, max_tokens = LOADS[load]
    rng = random.Random(repetition)
    prompts = [
        {"prompt_token_ids": [rng.randrange(3, 120000) for _ in range(rng.randrange(16, 48))]}
        for _ in range(n)
    ]
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        extra_args=extra,
    )
    llm.reset_prefix_cache()
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    for output in outputs:
        if extra and "output_residual_stream" in extra:
            rows = output.activations["residual_stream"].shape[1]
            assert rows == len(output.prompt_token_ids) + max_tokens - 1
        elif extra:
            assert output.inspect_lens.steer.n_tokens > max_tokens
    return seconds


def main() -> None:
    options = parse()
    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(LLAMA_8B))
    from vllm.plugins import load_general_plugins

    # The plug-in is loaded once per process and asks for each engine whether it is wanted.
    os.environ["INSPECT_LENS_DISABLE"] = "0"
    load_general_plugins()
    engines = {True: start(folder, disable=True)}
    engines[False] = start(folder, disable=False)
    chosen = {k: v for k, v in arms(LLAMA_8B["hidden_size"]).items() if k in options.arms}
    seconds: dict[tuple[str, str], list[float]] = {}
    for load in options.loads:
        for repetition in range(-1, options.repetitions):
            order = list(chosen.items())
            for name, extra in order if repetition % 2 else reversed(order):
                if name == "capture-all" and load == "1000x128":
                    continue
                took = measure(engines[name == "default"], extra, load, repetition)
                if repetition >= 0:
                    seconds.setdefault((load, name), []).append(took)
                gc.collect()
                sys.stderr.write(f"{load} {name} {repetition} {took:.3f}\n")
    result = {"environment": environment(), "command": " ".join(sys.argv), "runs": []}
    for (load, name), values in seconds.items():
        n, max_tokens = LOADS[load]
        median = statistics.median(values)
        result["runs"].append(
            {
                "model": "llama-8b-shape",
                "load": load,
                "arm": name,
                "seconds": values,
                "tokens_per_second": n * max_tokens / median,
                "ratio_to_default": median / statistics.median(seconds[load, "default"]),
            }
        )
    Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
    for run in result["runs"]:
        sys.stdout.write(
            f"{run['load']:9s} {run['arm']:12s} {statistics.median(run['seconds']):7.3f} s "
            f"{run['ratio_to_default']:.3f}\n"
        )


def environment() -> dict[str, str]:
    """Versions and the machine."""
    import torch
    import vllm

    import inspect_lens

    return {
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "inspect_lens": inspect_lens.__version__,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS))
    names = ["default", "idle", "capture-1", "steer", "capture-all"]
    parser.add_argument("--arms", nargs="+", default=names, choices=names)
    return parser.parse_args()


if __name__ == "__main__":
    main()
