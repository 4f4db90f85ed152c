"""Child process with one `AsyncLLM`: what an API server has inside, without HTTP.

Reads commands as JSON lines (`tests/kit/child.py`); captured rows go to `.npz` files.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import itertools
import os
import platform
from typing import Any

import numpy as np
import torch

from tests.kit.child import serve

__all__ = ["main"]


class Worker:
    """The engine and what the commands do with it."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.package: Any = None
        self.leftover_calls: list[str] = []
        self._ids = itertools.count()

    async def start(self, package: str, options: dict[str, Any], leftovers: list[str]) -> Any:
        """Start the engine; the plug-in under test is loaded by vLLM."""
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.package = importlib.import_module(package)
        self.leftover_calls = leftovers
        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
        config = self.engine.vllm_config
        is_cuda = torch.cuda.is_available()
        return {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "vllm": vllm.__version__,
            "device": torch.cuda.get_device_name() if is_cuda else "cpu",
            "devices": torch.cuda.device_count() if is_cuda else 1,
            "runner": "V2" if getattr(config, "use_v2_model_runner", False) else "V1",
            "enforce_eager": bool(config.model_config.enforce_eager),
            "dtype": str(config.model_config.dtype),
            "version": importlib.metadata.version(package.replace("_", "-")),
        }

    async def generate(self, asks: list[dict[str, Any]], together: bool, path: str) -> Any:
        """Answer requests; rows are written to `path` by index."""
        if together:
            outputs = await asyncio.gather(*(self._one(ask) for ask in asks))
        else:
            outputs = [await self._one(ask) for ask in asks]
        rows = {}
        answers = []
        for i, (answer, found) in enumerate(outputs):
            if found is not None:
                rows[str(i)] = found
            answers.append(answer)
        np.savez(path, **rows)
        return {"answers": answers}

    async def _one(self, ask: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        try:
            outputs = [output async for output in self._stream(ask)]
            return _answer(outputs[-1])
        except Exception as error:  # noqa: BLE001 (what a backend raises is its answer)
            return {"error": f"{type(error).__name__}: {error}"[:2000]}, None

    def _stream(self, ask: dict[str, Any]) -> Any:
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=ask["max_tokens"],
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            logprobs=ask["logprobs"],
            extra_args=self._extra_args(ask) or None,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": ask["prompt"]}
        if ask["salt"]:
            prompt["cache_salt"] = ask["salt"]
        return self.engine.generate(prompt, params, f"ask-{next(self._ids)}")

    def _extra_args(self, ask: dict[str, Any]) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if ask["capture"] is not None:
            extra["output_residual_stream"] = ask["capture"]
        if ask["vectors"]:
            extra["apply_steering_vectors"] = [
                self.package.SteeringVector(
                    activations=torch.tensor(v["values"], dtype=torch.float32),
                    layer_indices=v["layers"],
                    scale=v["scale"],
                    norm_match=v["norm_match"],
                    position_indices=v["positions"],
                )
                for v in ask["vectors"]
            ]
        if ask["hook_layer"] is not None:
            hook = self.package.Hook(fn=_note_length, layer_indices=[ask["hook_layer"]])
            extra["apply_hooks"] = [hook]
        return extra

    async def abort(self, asks: list[dict[str, Any]], concurrent: int) -> Any:
        """Take the first output of each request, then close its stream."""
        gate = asyncio.Semaphore(concurrent)
        cut = 0

        async def one(ask: dict[str, Any]) -> None:
            nonlocal cut
            async with gate, contextlib.aclosing(self._stream(ask)) as outputs:
                async for output in outputs:
                    cut += not output.finished
                    break

        await asyncio.gather(*(one(ask) for ask in asks))
        return {"cut": cut}

    async def reset(self) -> Any:
        """Forget cached prefixes."""
        # Blocks of a request that just finished may still be on their way back.
        for _ in range(50):
            if await self.engine.reset_prefix_cache() is not False:
                return {"done": True}
            await asyncio.sleep(0.1)
        return {"done": False}

    async def preemptions(self) -> Any:
        """Count as vLLM does."""
        from vllm.v1.metrics.reader import get_metrics_snapshot

        found = [m for m in get_metrics_snapshot() if m.name == "vllm:num_preemptions"]
        return {"preemptions": int(sum(getattr(m, "value", 0) for m in found))}

    async def leftovers(self) -> Any:
        """What the plug-in still holds, summed over ranks, by the calls it offers for it."""
        held: dict[str, int] = {}
        for name in self.leftover_calls:
            for rank in await self.engine.collective_rpc(name):
                counts = rank if isinstance(rank, dict) else {name.strip("_"): rank}
                for key, value in counts.items():
                    if isinstance(value, int):
                        held[key] = held.get(key, 0) + value
        return {"held": held}


def _note_length(ctx: Any, hidden: Any) -> None:
    ctx.saved.setdefault("lengths", []).append(int(hidden.shape[0]))


def _answer(output: Any) -> tuple[dict[str, Any], Any]:
    choice = output.outputs[0]
    activations = getattr(output, "activations", None) or {}
    rows = activations.get("residual_stream")
    hooks = getattr(output, "hook_results", None) or {}
    answer = {
        "token_ids": [int(i) for i in choice.token_ids],
        "logprobs": [{str(k): v.logprob for k, v in step.items()} for step in choice.logprobs]
        if choice.logprobs is not None
        else None,
        "cached_tokens": output.num_cached_tokens,
        "hook_list": hooks.get("0", {}).get("lengths"),
    }
    # To float32 without loss, also from bfloat16, which numpy does not know.
    return answer, None if rows is None else torch.as_tensor(rows).float().cpu().numpy()


async def _serve() -> None:
    worker = Worker()
    await serve(worker)
    # Still inside the loop, which the engine's tasks belong to.
    if worker.engine is not None:
        worker.engine.shutdown()


def main() -> None:
    """Serve commands until standard input ends."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    asyncio.run(_serve())


if __name__ == "__main__":
    main()
