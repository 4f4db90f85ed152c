"""Engines that tests share: a start costs a minute."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kit.preloaded import forked
from tests.kit.reference import HuggingFace
from tests.kit.tiny_models import tiny_llama

LAYERS = 4
HIDDEN = 128
BLOCK = 32
STEP_TOKENS = 64
"""Tokens of one step: prompts of more are prefilled in chunks."""


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"), layers=LAYERS, hidden=HIDDEN)


@pytest.fixture(scope="session")
def hugging_face(tiny_folder: Path) -> HuggingFace:
    return HuggingFace(tiny_folder)


def tokens(n: int, seed: int = 0) -> list[int]:
    """A prompt of `n` token ids."""
    return [(i * i * 31 + i * (7 + 2 * seed) + 11 * seed) % 300 + 3 for i in range(n)]


@dataclass
class Engine:
    """An offline engine and how the tests talk to it."""

    llm: Any

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        extra_args: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        *,
        max_tokens: int = 8,
        logprobs: int | None = None,
        n: int = 1,
        temperature: float = 0.0,
    ) -> list[Any]:
        from vllm import SamplingParams

        each = (
            list(extra_args)
            if isinstance(extra_args, list | tuple)
            else [extra_args] * len(prompts)
        )
        params = [
            SamplingParams(
                max_tokens=max_tokens,
                temperature=temperature,
                ignore_eos=True,
                detokenize=False,
                logprobs=logprobs,
                n=n,
                extra_args=extra,
            )
            for extra in each
        ]
        inputs = [{"prompt_token_ids": list(p)} for p in prompts]
        return list(self.llm.generate(inputs, params, use_tqdm=False))

    def stats(self) -> dict[str, int]:
        """What the lens holds."""
        found = dict(self.llm.collective_rpc("inspect_lens_stats")[0])
        del found["waited_ms"]
        return found

    def close(self) -> None:
        # vLLM's five seconds are short on a busy machine, and then it kills.
        self.llm.llm_engine.engine_core.shutdown(timeout=30)


def start(folder: Path, *, in_process: bool = False, **overrides: Any) -> Engine:
    """Start an engine with vLLM's defaults, small buffers apart.

    Args:
        folder: of the model.
        in_process: whether scheduler and worker run in this process. vLLM's default is a process
            for each. In one process, steps are taken only while somebody waits for requests, and
            the worker learns later what was let go of; so it is for tests that ask for neither.
        **overrides: options of the engine.
    """
    from vllm import LLM

    options: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_batched_tokens": STEP_TOKENS,
        "max_num_seqs": 8,
        "block_size": BLOCK,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": 64 << 20,
        "disable_log_stats": False,
    }
    with pytest.MonkeyPatch.context() as environment, nullcontext() if in_process else forked():
        if in_process:
            # Read when an engine is made.
            environment.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        return Engine(LLM(**(options | overrides)))


def stand_in(model: str) -> dict[str, Any]:
    """Options of an engine that runs a class of the kit, `module:Class`, in the place of Llama."""
    name = model.partition(":")[2]
    return {
        "hf_overrides": {"architectures": [name]},
        "model_class_overrides": {name: f"tests.kit.{model}"},
    }


@dataclass
class Fresh:
    """What a fresh engine answered to its first request."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[dict[int, float]]
    rows: Any


def answer(engine: Engine, prompt: list[int]) -> Fresh:
    """Greedy tokens, their log-probabilities and all rows of one plain request."""
    plain = engine.run([prompt], logprobs=5)[0].outputs[0]
    return Fresh(
        prompt=prompt,
        token_ids=list(plain.token_ids),
        logprobs=[{k: v.logprob for k, v in step.items()} for step in plain.logprobs],
        rows=None,
    )


@pytest.fixture(scope="session")
def _compiled(tiny_folder: Path) -> Iterator[tuple[Engine, Fresh]]:
    # Read when an engine is made: this one also runs hooks.
    os.environ["INSPECT_LENS_ALLOW_CODE"] = "1"
    try:
        engine = start(tiny_folder)
    finally:
        del os.environ["INSPECT_LENS_ALLOW_CODE"]
    fresh = answer(engine, tokens(200, seed=9))
    yield engine, fresh
    engine.close()


@pytest.fixture(scope="session")
def engine(_compiled: tuple[Engine, Fresh]) -> Engine:
    """A compiled engine that may run code: chunked prefill at 64 tokens, prefix cache on."""
    return _compiled[0]


@pytest.fixture(scope="session")
def fresh(_compiled: tuple[Engine, Fresh]) -> Fresh:
    """What `engine` answered to its very first request."""
    return _compiled[1]


@pytest.fixture(scope="session")
def soak_requests(request: pytest.FixtureRequest) -> int:
    """How many requests the soak mixes; `--soak-requests 10000` for the long one."""
    return int(request.config.getoption("--soak-requests"))
