"""Child process of the soak: one `AsyncLLM`, its solo answers, and the mix."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from typing import Any

import numpy as np
import torch

from tests.kit.child import serve
from tests.kit.process_tree import settled_usage

from .soak_plan import N_PROMPTS, N_VECTORS, Item, draw_items, draw_prompts, draw_vector

__all__ = ["main"]

Solo = dict[tuple[int, int | None], tuple[list[int], torch.Tensor | None]]
"""Tokens and rows by (prompt, vector)."""
CONCURRENT = 48


class Worker:
    """The engine, and what it answers alone and among others."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.layers = self.hidden = 0
        self._ids = itertools.count()

    async def start(self, options: dict[str, Any]) -> dict[str, Any]:
        """Start the engine."""
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
        config = self.engine.vllm_config.model_config
        self.layers = config.hf_config.num_hidden_layers
        self.hidden = config.hf_config.hidden_size
        is_cuda = torch.cuda.is_available()
        return {
            "torch": torch.__version__,
            "vllm": vllm.__version__,
            "device": torch.cuda.get_device_name() if is_cuda else "cpu",
            "dtype": str(config.dtype),
        }

    async def _ask(
        self,
        prompt: Any,
        index: int,
        vector: int | None,
        captured: bool,
        leave: int | None = None,
        *,
        is_new: bool = False,
    ) -> Any:
        from vllm import SamplingParams

        extra: dict[str, Any] = {}
        if captured:
            extra["output_residual_stream"] = True
        if vector is not None:
            from inspect_lens import SteeringVector

            fields: Any = draw_vector(index, vector, layers=self.layers, hidden=self.hidden)
            extra["apply_steering_vectors"] = [SteeringVector(**fields)]
        params = SamplingParams(
            max_tokens=prompt.max_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            extra_args=extra or None,
            skip_reading_prefix_cache=is_new or None,
        )
        request = {"prompt_token_ids": list(prompt.tokens)}
        stream = self.engine.generate(request, params, f"soak-{next(self._ids)}")
        seen, last = 0, None
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                seen, last = seen + 1, output
                if leave is not None and seen >= leave and not output.finished:
                    return None
        return last

    async def _solos(self, seed: int, *, with_lens: bool) -> Solo:
        """Every prompt alone, plain and in each way in which it is steered."""
        solos: Solo = {}
        ways: list[int | None] = [None, *range(N_VECTORS)] if with_lens else [None]
        for i, prompt in enumerate(draw_prompts(seed)):
            for way in ways:
                # Computed whole with and without the lens, in chunks of the same size.
                output = await self._ask(prompt, i, way, captured=with_lens, is_new=True)
                rows = output.activations["residual_stream"] if with_lens else None
                solos[i, way] = list(output.outputs[0].token_ids), rows
        return solos

    async def floor(self, seed: int, n: int) -> dict[str, Any]:
        """How plain answers differ among plain neighbours in an engine without the lens."""
        solos = await self._solos(seed, with_lens=False)
        tokens = {str(i): solos[i, None][0] for i in range(N_PROMPTS)}
        return {**await self._floor(seed, n, solos), "solo_tokens": tokens}

    async def _floor(self, seed: int, n: int, solos: Solo) -> dict[str, Any]:
        """How plain answers differ among plain neighbours: what batching alone does."""
        # In the mix prompts are computed again and again, since captured ones are and since steered
        # ones push others out of the cache; and each time they are cut into other chunks. So they
        # are here: out of the cache every answer would stand on what was computed alone.
        prompts = draw_prompts(seed)
        gate = asyncio.Semaphore(CONCURRENT)
        again = np.random.default_rng([seed, 2]).random(n) < 0.5

        async def one(index: int, is_new: bool) -> bool:
            async with gate:
                output = await self._ask(prompts[index], index, None, captured=False, is_new=is_new)
            return list(output.outputs[0].token_ids) != solos[index, None][0]

        asked = [i % N_PROMPTS for i in range(n)]
        different = await asyncio.gather(
            *(one(i, is_new) for i, is_new in zip(asked, again.tolist(), strict=True))
        )
        unsteady = {i for i, differs in zip(asked, different, strict=True) if differs}
        return {"requests": n, "different": sum(different), "unsteady_prompts": sorted(unsteady)}

    async def soak(self, seed: int, n: int) -> dict[str, Any]:
        """The mix, against solo answers of this engine."""
        solos = await self._solos(seed, with_lens=True)
        prompts = draw_prompts(seed)
        floor = await self._floor(seed, max(n // 8, 2 * N_PROMPTS), solos)
        # Pools and buffers that are made on first use are there before the first reading.
        await self._mix(prompts, draw_items(seed + 1, 4 * CONCURRENT), solos)
        await self._drained()
        before = settled_usage(os.getpid())
        started = time.perf_counter()
        found = await self._mix(prompts, draw_items(seed, n), solos)
        seconds = time.perf_counter() - started
        left = await self._drained()
        after = settled_usage(os.getpid())
        again = await self._ask(prompts[0], 0, None, captured=False)
        return {
            "seconds": seconds,
            "floor": floor,
            **found,
            "left": left,
            "descriptors": after.descriptors - before.descriptors,
            "shared_bytes": after.shared_bytes - before.shared_bytes,
            "processes": after.processes - before.processes,
            "lives": list(again.outputs[0].token_ids) == solos[0, None][0],
            "solo_tokens": {str(i): solos[i, None][0] for i in range(N_PROMPTS)},
        }

    async def _drained(self) -> dict[str, int]:
        """What the lens holds, once it has had time to let go."""
        for _ in range(60):
            counts = await self.engine.collective_rpc("inspect_lens_stats")
            # Time that steps have waited is no thing that is held.
            names = counts[0].keys() - {"waited_ms"}
            held = {k: sum(rank[k] for rank in counts) for k in sorted(names)}
            if not any(held.values()):
                break
            await asyncio.sleep(0.5)
        return held

    async def _mix(self, prompts: Any, items: list[Item], solos: Solo) -> dict[str, Any]:
        gate = asyncio.Semaphore(CONCURRENT)
        counts = dict.fromkeys((item.kind for item in items), 0)
        different = dict.fromkeys(counts, 0)
        unsteady: set[int] = set()
        errors: list[str] = []
        worst = 0.0
        n_rows = left_early = 0

        async def one(item: Item) -> None:
            nonlocal worst, n_rows, left_early
            prompt = prompts[item.prompt]
            async with gate:
                try:
                    output = await self._ask(
                        prompt, item.prompt, item.vector, item.is_captured, item.leave_after
                    )
                except Exception as error:  # noqa: BLE001 (counted; the mix goes on)
                    errors.append(f"{item.kind}: {type(error).__name__}: {error}"[:300])
                    return
            counts[item.kind] += 1
            if output is None:
                left_early += 1
                return
            tokens, rows = solos[item.prompt, item.vector]
            mine = list(output.outputs[0].token_ids)
            if mine != tokens:
                different[item.kind] += 1
                unsteady.add(item.prompt)
            if item.is_captured:
                n_same = len(prompt.tokens) + _agreement(mine, tokens)
                off, n = _row_error(output.activations["residual_stream"], rows, n_same)
                worst, n_rows = max(worst, off), n_rows + n

        await asyncio.gather(*(one(item) for item in items))
        return {
            "requests": counts,
            "different": different,
            "unsteady_prompts": sorted(unsteady),
            "left_early": left_early,
            "rows": n_rows,
            "largest_row_error": worst,
            "errors": errors[:10],
            "n_errors": len(errors),
        }


def _agreement(a: list[int], b: list[int]) -> int:
    """Sampled tokens that were fed and agree from the start: beyond, rows have other inputs."""
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return min(same, len(a) - 1)


def _row_error(found: torch.Tensor, solo: Any, n_same: int) -> tuple[float, int]:
    """Largest relative error of a row whose inputs agree, and how many were compared."""
    # A tensor of another shape than its solo is an error of infinity.
    if found.shape != solo.shape:
        return float("inf"), 0
    a, b = found[:, :n_same].float(), solo[:, :n_same].float()
    error = (a - b).norm(dim=-1) / b.norm(dim=-1)
    # NaN is an error too, and `max` would hide it.
    return float(torch.nan_to_num(error, nan=float("inf")).max()), error.numel()


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
