"""Child process with one engine. The parent gives commands as JSON lines (`tests/kit/child.py`).

The engine's own processes are below this one, as vLLM has it by default. Seconds are those of
`LLM.generate`: from the first request to the last tensor in this process's hands.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping
from typing import Any

from tests.kit.child import requests_and_reply
from tests.kit.process_tree import cpu_clock, cpu_model, usage

from .arms import ARMS, ENGINES, Vector
from .loads import LOADS, requests
from .shapes import SHAPES, Shape

__all__ = ["main"]


class Vllm:
    """An offline vLLM engine."""

    def __init__(self, kind: str, shape: Shape, options: Mapping[str, Any]) -> None:
        from vllm import LLM

        self._shape = shape
        self._set_up: set[str] = set()
        self._vectors: dict[Vector, Any] = {}
        self.llm: Any = LLM(**options)

    def _extra_args(self, request: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if not request:
            return None
        return {
            key: [self._vector(v) for v in value] if key == "apply_steering_vectors" else value
            for key, value in request.items()
        }

    def _vector(self, vector: Vector) -> Any:
        import torch

        from inspect_lens import SteeringVector

        if vector not in self._vectors:
            self._vectors[vector] = SteeringVector(
                activations=torch.from_numpy(vector.values).float()[None],
                layer_indices=[vector.layer],
                scale=vector.scale,
            )
        return self._vectors[vector]

    def prepare(self, arm: str) -> None:
        """Set an arm up, once."""
        probes = ARMS[arm].probes
        if probes is not None and arm not in self._set_up:
            from inspect_lens.engine import register

            for name, probe in probes(self._shape).items():
                register(self.llm, name, probe)
        self._set_up.add(arm)

    def run(self, arm: str, load: str, seed: int, limit_s: float) -> dict[str, Any]:
        """One timed run. vLLM cannot be interrupted: the parent enforces the limit."""
        from vllm import SamplingParams

        self.prepare(arm)
        drawn = requests(LOADS[load], vocab=self._shape.vocab, seed=seed)
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in drawn]
        asked = [ARMS[arm].request(self._shape, i) for i in range(len(drawn))]
        params = [
            SamplingParams(
                max_tokens=sampled,
                temperature=0,
                ignore_eos=True,
                detokenize=False,
                extra_args=self._extra_args(request),
            )
            for (_, sampled), request in zip(drawn, asked, strict=True)
        ]
        self.llm.reset_prefix_cache()
        before, used = self._preemptions(), cpu_clock({os.getpid(): "client"})
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        cpu_s = used()
        shared = usage(os.getpid()).shared_bytes
        self._check(outputs, asked, drawn)
        return {
            "seconds": seconds,
            "tokens": sum(sampled for _, sampled in drawn),
            "preemptions": self._preemptions() - before,
            "shared_bytes": shared,
            "cpu_s": cpu_s,
        }

    def profile(self, prefix: str, **asked: Any) -> dict[str, Any]:
        """One run, of which vLLM's profiler keeps the steps that the engine's options name."""
        self.llm.start_profile(prefix)
        try:
            return self.run(**asked)
        finally:
            self.llm.stop_profile()

    def _preemptions(self) -> int:
        found = [m for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions"]
        return int(sum(m.value for m in found))

    def _check(self, outputs: list[Any], asked: list[Any], drawn: list[Any]) -> None:
        """What was asked for came: otherwise the seconds mean nothing."""
        for output, request, (prompt, sampled) in zip(outputs, asked, drawn, strict=True):
            n = len(output.outputs[0].token_ids)
            if n != sampled:
                raise RuntimeError(f"{n} tokens sampled instead of {sampled}")
            layers = (request or {}).get("output_residual_stream")
            if layers:
                expected = (
                    self._shape.layers if layers is True else len(layers),
                    len(prompt) + sampled - 1,
                    self._shape.hidden,
                )
                if tuple(output.activations["residual_stream"].shape) != expected:
                    raise RuntimeError(f"a tensor is not {expected}")
            elif edits := getattr((request or {}).get("inspect_lens"), "edits", ()):
                edited = output.inspect_lens.steer.n_tokens
                of_prompt = 0 if edits[0].positions == "completion" else len(prompt)
                if edited != of_prompt + sampled - 1:
                    raise RuntimeError(f"{edited} tokens were edited")
            elif "capture" in ((request or {}).get("inspect_lens") or {}):
                rows = output.activations["router_logits"].shape
                if tuple(rows[:2]) != (1, len(prompt) + sampled - 1):
                    raise RuntimeError(f"logits of routers are {tuple(rows)}")
            elif (request or {}).get("inspect_lens"):
                _check_read(output.inspect_lens, len(prompt), sampled)
            elif (request or {}).get("apply_steering_vectors"):
                n_tokens = output.inspect_lens.steer.n_tokens
                if n_tokens != len(prompt) + sampled - 1:
                    raise RuntimeError(f"{n_tokens} tokens were steered")

    def close(self) -> None:
        """End the engine's processes."""
        self.llm.llm_engine.engine_core.shutdown()


def _check_read(receipt: Any, n_prompt: int, sampled: int) -> None:
    """A lens read all tokens or those that were sampled, and probes these."""
    if receipt.lens is not None:
        if receipt.lens.n_positions not in (n_prompt + sampled - 1, sampled - 1):
            raise RuntimeError(f"the lens read {receipt.lens.n_positions} tokens")
        return
    read = {probe.n_tokens for probe in receipt.probes}
    if read != {sampled - 1}:
        raise RuntimeError(f"probes read {read} tokens")


def main() -> None:
    """Serve commands until standard input ends."""
    commands, reply = requests_and_reply()
    engine: Any = None
    for command in commands:
        name = command.pop("do")
        try:
            if name == "start":
                started = time.perf_counter()
                engine = _start(**command)
                reply({"cold_start_seconds": time.perf_counter() - started, **_about()})
            else:
                reply(getattr(engine, name)(**command))
        except Exception as error:  # noqa: BLE001 (the parent records why an arm has no number)
            reply({"error": f"{type(error).__name__}: {error}"[:2000]})
    if engine is not None:
        engine.close()


def _start(kind: str, model: str, options: dict[str, Any], *, served: bool = False) -> Any:
    if served:
        from .served import Served

        made: Any = Served(kind, SHAPES[model], options)
    elif ENGINES[kind].is_hf:
        from .hugging_face import HuggingFace

        made = HuggingFace(SHAPES[model], **options)
    else:
        made = Vllm(kind, SHAPES[model], options)
    # As vLLM's server does when it has started: a full collection of all that was imported takes
    # 0.4 s, and hits now one arm and now another.
    gc.collect()
    gc.freeze()
    return made


def _about() -> dict[str, Any]:
    import platform

    import torch
    import transformers
    import vllm

    import inspect_lens

    is_cuda = torch.cuda.is_available()
    return {
        "environment": {
            "gpu": torch.cuda.get_device_name() if is_cuda else None,
            "cpu": cpu_model(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "vllm": vllm.__version__,
            "transformers": transformers.__version__,
            "inspect_lens": inspect_lens.__version__,
        }
    }


if __name__ == "__main__":
    main()
