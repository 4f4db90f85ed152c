"""What the suite needs of a backend, and what a test gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

__all__ = [
    "PROFILES",
    "Answer",
    "Ask",
    "Backend",
    "Engine",
    "FloatArray",
    "NotSupported",
    "Profile",
    "Suite",
    "Truth",
    "Usage",
    "Vector",
    "Verdict",
    "fed",
]

FloatArray = npt.NDArray[np.float32]

Profile = Literal["wide", "chunked", "tight"]

_COMMON = {
    "max_model_len": 512,
    "block_size": 32,
    "enable_prefix_caching": True,
    "kv_cache_memory_bytes": 256 << 20,
    "gpu_memory_utilization": 0.3,
}
PROFILES: dict[Profile, dict[str, Any]] = {
    "wide": {**_COMMON, "max_num_seqs": 64, "max_num_batched_tokens": 256},
    "chunked": {**_COMMON, "max_num_seqs": 8, "max_num_batched_tokens": 32},
    "tight": {
        **_COMMON,
        "max_model_len": 256,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": 40,
    },
}
"""Options of an engine, by what it is for: 64 requests at once, prompts in chunks of 32 tokens,
or a cache that holds a quarter of what is asked for."""


class NotSupported(Exception):
    """A backend, or this machine, cannot do what a test needs; the message says what and why."""


@dataclass(frozen=True)
class Vector:
    """A steering vector in the words of the protocol."""

    values: FloatArray
    """(layers, hidden), or (layers, positions, hidden)."""
    layers: tuple[int, ...]
    scale: float = 1.0
    norm_match: bool = False
    positions: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Ask:
    """One request: a prompt of token ids, greedy, of exactly `max_tokens` sampled tokens."""

    prompt: tuple[int, ...]
    max_tokens: int = 1
    capture: tuple[int, ...] | None = None
    """Layers whose residual stream is wanted for every token."""
    vectors: tuple[Vector, ...] = ()
    logprobs: int | None = None
    salt: str | None = None
    """Requests of different salts share no cached prefix."""
    hook_layer: int | None = None
    """Run a custom hook at this layer that appends the length of its input to a list."""


@dataclass(frozen=True)
class Answer:
    """What came back for one `Ask`."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Mapping[int, float], ...] | None = None
    rows: FloatArray | None = None
    """(layers, positions, hidden) float32; None when the response has no activations."""
    cached_tokens: int | None = None
    hook_list: tuple[int, ...] | None = None
    error: str | None = None
    """Why there is no answer: an exception, or the body of an HTTP error."""
    status: int | None = None
    """HTTP status, where there is one."""


@dataclass(frozen=True)
class Usage:
    """What the processes of an engine hold."""

    descriptors: int
    shared_bytes: int


class Engine(Protocol):
    """A running engine."""

    def generate(self, asks: Sequence[Ask], *, together: bool = True) -> list[Answer]:
        """Answer requests, all at once or one after the other."""

    def abort(self, asks: Sequence[Ask], *, concurrent: int) -> int:
        """Go away from each request after its first token; return how many had not finished."""

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False where that cannot be asked for."""

    def preemptions(self) -> int:
        """Pre-emptions since the start."""

    def leftovers(self) -> Mapping[str, int]:
        """What the lens still holds for requests; empty where it cannot be asked."""

    def usage(self) -> Usage | None:
        """What the processes hold; None where they cannot be seen."""


class Backend(Protocol):
    """Something that starts engines, or has one."""

    name: str
    version: str
    environment: dict[str, Any]
    """Versions and devices, known once an engine was started."""
    max_ranks: int
    """Over how many an engine can be spread: GPUs, or cores."""

    def engine(
        self, profile: Profile, *, tensor_parallel: int = 1
    ) -> AbstractContextManager[Engine]:
        """Start an engine; raises `NotSupported` where it cannot be had."""

    def server(self) -> AbstractContextManager[str]:
        """Address of an API server; raises `NotSupported` where none can be had."""

    def rescore(self, command: Sequence[str]) -> dict[str, Any]:
        """Run `conformance.inspect_child` where this backend's Inspect provider is installed."""


class Truth(Protocol):
    """The slow twin that says what the rows should be."""

    layers: int
    hidden: int

    def residual_stream(self, tokens: Sequence[int]) -> FloatArray:
        """Residual stream after each layer, (layers, tokens, hidden) float32."""


@dataclass(frozen=True)
class Suite:
    """What a test is given."""

    backend: Backend
    truth: Truth
    work: Path
    """Folder for what tests write."""
    aborts: int = 500


@dataclass(frozen=True)
class Verdict:
    """Outcome of one test; `passed` is None where it was not run."""

    test: str
    passed: bool | None
    measured: Any
    limit: str
    detail: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """The verdict as one row of the result."""
        row = {
            "test": self.test,
            "passed": self.passed,
            "measured": self.measured,
            "limit": self.limit,
            "detail": self.detail,
        }
        return {**row, "data": dict(self.data)} if self.data else row


def fed(ask: Ask, answer: Answer) -> list[int]:
    """Tokens that were fed to the model: the last sampled one never is."""
    return [*ask.prompt, *answer.token_ids[:-1]]
