"""A model of a few lines, and an engine of it that can be told to do things wrong.

Rows of the model depend on the token, the layer and the tokens before; the reserved coordinates
are those of `tiny_models.marked_llama`. The engine keeps a prefix cache as vLLM does.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conformance.protocol import Answer, Ask, Engine, FloatArray, Profile, Usage, Vector

from .tiny_models import BITS, RESERVED

__all__ = ["FakeBackend", "FakeEngine", "Model"]

VOCAB = 8192
SAMPLED = 64
"""Ids that can be sampled: the lowest ones, so that a step takes microseconds."""
BLOCK = 32
CHUNK = 32


class Model:
    """Token ids in, rows and log-probabilities out."""

    layers = 3
    hidden = 64

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        free = self.hidden - RESERVED
        self._own = rng.standard_normal((self.layers, VOCAB, free)).astype(np.float32)
        self._past = rng.standard_normal((self.layers, VOCAB, free)).astype(np.float32)
        self._head = rng.standard_normal((self.hidden, SAMPLED)).astype(np.float32) / 4

    def residual_stream(self, tokens: Sequence[int]) -> FloatArray:
        """Rows after each layer, (layers, tokens, hidden)."""
        return self.continued(np.array(tokens, dtype=np.int64), 0, np.float32(0))[0]

    def continued(self, ids: Any, n_before: int, past: Any) -> tuple[FloatArray, Any]:
        """Rows of tokens that follow others, and the sum over all tokens for the next call."""
        rows = np.zeros((self.layers, len(ids), self.hidden), np.float32)
        rows[:, :, :BITS] = ((ids[:, None] >> np.arange(BITS)) & 1) * 2 - 1
        counts = np.arange(n_before + 1, n_before + len(ids) + 1, dtype=np.float32)[:, None]
        sums = past + np.cumsum(self._past[:, ids], axis=1)
        rows[:, :, RESERVED:] = self._own[:, ids] + sums / counts
        return rows, sums[:, -1:]

    def logprobs(self, row: FloatArray) -> FloatArray:
        """Log-probabilities after a row of the last layer."""
        logits = row @ self._head
        found: FloatArray = logits - np.logaddexp.reduce(logits)
        return found


@dataclass
class FakeEngine:
    """An engine that is right, but for the fault that it is given."""

    model: Model
    fault: str = ""
    n_preemptions: int = 0
    held: int = 0
    descriptors: int = 10
    cached: dict[str, FloatArray | None] = field(default_factory=dict)
    """By prefix: what a steered request left in it, or None from a plain one."""

    def generate(self, asks: Sequence[Ask], *, together: bool = True) -> list[Answer]:
        """Answer requests."""
        answers = [self._one(ask) for ask in asks]
        if len(asks) > 1 and self.fault == "swapped requests":
            rows = [a.rows for a in answers]
            answers = [
                Answer(a.token_ids, a.logprobs, rows[i - 1], a.cached_tokens)
                for i, a in enumerate(answers)
            ]
        if len(asks) > 8:
            self.n_preemptions += len(asks) // 2
        return answers

    def _refusal(self, ask: Ask) -> str | None:
        layers = [*(ask.capture or ()), *(i for v in ask.vectors for i in v.layers)]
        if any(i >= self.model.layers for i in layers):
            return "ValueError: no such layer"
        if any(v.values.shape[-1] != self.model.hidden for v in ask.vectors):
            return "ValueError: another width"
        if any(not np.isfinite(v.values).all() for v in ask.vectors):
            return "ValueError: not finite"
        return None

    def _one(self, ask: Ask) -> Answer:
        refusal = self._refusal(ask)
        if refusal is not None:
            return (
                Answer(token_ids=(5,)) if self.fault == "answers anyway" else Answer(error=refusal)
            )
        edits = self._edits(ask)
        stain, hit = self._read_cache(ask)
        new, tokens, steps = list(ask.prompt), list(ask.prompt), []
        parts, past = [], np.float32(0)
        for _ in range(ask.max_tokens):
            first = len(tokens) - len(new)
            rows, past = self.model.continued(np.array(new), first, past)
            if ask.vectors:
                rows += np.stack([edits(first + i) for i in range(len(new))], axis=1)
            parts.append(rows)
            last = rows[-1, -1] if stain is None else rows[-1, -1] + 0.5 * stain
            logprobs = self.model.logprobs(last)
            steps.append({int(i): float(logprobs[i]) for i in np.argsort(logprobs)[-5:]})
            new = [max(steps[-1], key=lambda i: steps[-1][i])]
            tokens += new
        self._write_cache(ask)
        return Answer(
            token_ids=tuple(tokens[len(ask.prompt) :]),
            logprobs=tuple(steps) if ask.logprobs else None,
            rows=None
            if ask.capture is None
            else self._returned(np.concatenate(parts, axis=1), ask),
            cached_tokens=hit,
        )

    def _returned(self, rows: FloatArray, ask: Ask) -> FloatArray:
        rows = rows[list(ask.capture or ())]
        if self.fault == "layers swapped" and len(rows) > 1:
            return rows[::-1]
        if self.fault == "duplicate rows" and ask.max_tokens > 100:
            return np.concatenate([rows[:, :40], rows[:, : rows.shape[1] - 40]], axis=1)
        if self.fault == "a row is missing":
            return rows[:, :-1]
        return rows

    def _edits(self, ask: Ask) -> Any:
        """What is added to the rows of all layers at a position, (layers, hidden)."""

        def at(position: int) -> FloatArray:
            added = np.zeros((self.model.layers, self.model.hidden), np.float32)
            for vector in ask.vectors:
                for layer, values in zip(vector.layers, vector.values, strict=True):
                    added[layer:] += self._amount(vector, values, position, len(ask.prompt))
            return added

        return at

    def _amount(self, vector: Vector, values: FloatArray, position: int, n: int) -> Any:
        scale = vector.scale * (1.05 if self.fault == "five percent too much" else 1)
        if self.fault == "steers nothing":
            return 0.0
        if vector.positions is None:
            return scale * values
        if self.fault == "positions of the chunk" and position < n:
            position %= CHUNK
        if self.fault == "decodes as position 0" and position >= n:
            position = 0
        if position not in vector.positions:
            return 0.0
        return scale * values[vector.positions.index(position)]

    def _key(self, ask: Ask) -> str:
        blocks = len(ask.prompt) // BLOCK * BLOCK
        steer = [(v.values.tobytes(), v.layers, v.scale) for v in ask.vectors]
        parts = [
            ask.prompt[:blocks],
            ask.salt,
            None if self.fault == "one cache for all" else steer,
        ]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _read_cache(self, ask: Ask) -> tuple[FloatArray | None, int]:
        key = self._key(ask)
        if key not in self.cached or ask.capture is not None or ask.vectors:
            return None, 0
        return self.cached[key], len(ask.prompt) // BLOCK * BLOCK

    def _write_cache(self, ask: Ask) -> None:
        self.cached.setdefault(self._key(ask), ask.vectors[0].values[0] if ask.vectors else None)

    def abort(self, asks: Sequence[Ask], *, concurrent: int) -> int:
        """Forget the requests."""
        self.held += len(asks) if self.fault == "slots leak" else 0
        self.descriptors += len(asks) if self.fault == "descriptors leak" else 0
        return len(asks)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes."""
        self.cached.clear()
        return self.fault != "cannot reset"

    def preemptions(self) -> int:
        """Pre-emptions so far."""
        return self.n_preemptions

    def leftovers(self) -> Mapping[str, int]:
        """Requests held."""
        return {"requests": self.held}

    def usage(self) -> Usage:
        """Descriptors."""
        return Usage(self.descriptors, 0)


@dataclass
class FakeBackend:
    """Starts fake engines; the second rank may drift or repeat."""

    model: Model
    fault: str = ""
    max_ranks: int = 2
    name: str = "fake"
    version: str = "0"
    environment: dict[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def engine(self, profile: Profile, *, tensor_parallel: int = 1) -> Iterator[Engine]:
        """Start an engine."""
        engine = FakeEngine(self.model, self.fault)
        if tensor_parallel > 1:
            answer = engine._one

            def second_rank(ask: Ask) -> Answer:
                found = answer(ask)
                lists = (1, 1) if self.fault == "lists of each rank" else (1,)
                rows = found.rows
                if rows is not None and self.fault == "ranks differ":
                    rows = rows * np.float32(1) + np.float32(2)
                return Answer(found.token_ids, found.logprobs, rows, hook_list=lists)

            engine._one = second_rank  # type: ignore[method-assign]
        else:
            answer_one = engine._one

            def one_rank(ask: Ask) -> Answer:
                found = answer_one(ask)
                if ask.hook_layer is None:
                    return found
                return Answer(found.token_ids, hook_list=(1,))

            engine._one = one_rank  # type: ignore[method-assign]
        yield engine

    @contextlib.contextmanager
    def server(self) -> Iterator[str]:
        """No server."""
        yield "http://fake"

    def rescore(self, command: Sequence[str]) -> dict[str, Any]:
        """Scores of a log that a test planted."""
        raise AssertionError("judged on its own")
