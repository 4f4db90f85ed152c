"""What caches on the way of a request save: `python -m tests.kit.cache_times`.

Times are medians, in microseconds, of a request that captures one layer and adds one vector.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from inspect_lens._engine.protocol import messages
from inspect_lens.spec import (
    Add,
    CaptureSpec,
    LensRequest,
    check_request,
    forget_parsed,
    parse_extra_args,
)
from inspect_lens.spec._request import PROCESS
from tests.kit.facts import engine_facts

HIDDEN, LAYERS = 4096, tuple(range(32))


def microseconds(call: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> int:
    """Median time of a call; `before` is not counted."""
    times = []
    for _ in range(300):
        before()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e6)


def forget_sealed() -> None:
    """Empty what this process keeps of requests that were made ready for workers."""
    while PROCESS.order:
        PROCESS.drop(next(iter(PROCESS.order)))
    for value in vars(messages).values():
        getattr(value, "cache_clear", lambda: None)()


def measure() -> dict[str, int]:
    """The times, by what is done."""
    row = np.random.default_rng(0).standard_normal(HIDDEN).astype(np.float32)
    facts = engine_facts(
        n_layers=len(LAYERS), hidden=HIDDEN, dtype="bfloat16", layers=LAYERS, max_step_tokens=8192,
        ring_rows=8192, bank_rows=512,
    )  # fmt: skip
    asked = LensRequest(capture=CaptureSpec(layers=(16,)), edits=(Add(vector=row, layers=(16,)),))
    args = json.loads(json.dumps({"inspect_lens": asked.model_dump(mode="json")}))

    def parse() -> LensRequest:
        request = parse_extra_args(args)
        assert request is not None
        return request

    def seal() -> Any:
        return messages.seal(parsed, facts, reply="", n_prompt=200, max_tokens=100)

    parsed = parse()
    return {
        "parse again": microseconds(parse),
        "parse first": microseconds(parse, lambda: forget_parsed(parse())),
        "judge": microseconds(lambda: check_request(parsed, facts, {})),
        "seal again": microseconds(seal),
        "seal first": microseconds(seal, forget_sealed),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(), indent=1) + "\n")
