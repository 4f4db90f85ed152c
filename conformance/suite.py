"""Runs every test on one backend and writes the result."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.kit.process_tree import cpu_model

from .alignment import alignment_under_batching, preemption
from .edits import chunked_prefill, decode_phase, dose_response
from .isolation import aborts, kv_contamination
from .parallel import tensor_parallel
from .protocol import Engine, NotSupported, Profile, Suite, Verdict
from .refusals import hook_failure
from .round_trip import log_round_trip

__all__ = ["ENGINE_TESTS", "NAMES", "run_suite"]

EngineTest = Callable[[Engine, Suite], Verdict]

# On one engine in this order: what could harm it comes last.
ENGINE_TESTS: dict[Profile, tuple[tuple[int, EngineTest], ...]] = {
    "wide": (
        (5, kv_contamination),
        (1, alignment_under_batching),
        (3, decode_phase),
        (10, dose_response),
        (7, aborts),
        (6, hook_failure),
    ),
    "chunked": ((2, chunked_prefill),),
    "tight": ((4, preemption),),
}
WHOLE_TESTS: tuple[tuple[int, Callable[[Suite], Verdict]], ...] = (
    (8, tensor_parallel),
    (9, log_round_trip),
)
NAMES = {
    1: "1 alignment under batching",
    2: "2 chunked prefill",
    3: "3 decode phase",
    4: "4 pre-emption",
    5: "5 KV contamination",
    6: "6 hook failure",
    7: "7 abort",
    8: "8 TP parity",
    9: "9 log round-trip",
    10: "10 dose-response",
}


def _judge(number: int, test: Callable[[], Verdict]) -> Verdict:
    started = time.monotonic()
    try:
        verdict = test()
    except NotSupported as reason:
        verdict = Verdict(NAMES[number], None, None, "", str(reason))
    except Exception as error:  # noqa: BLE001 (a backend may fail in any way; that is its result)
        detail = f"{type(error).__name__}: {error}"[:3000]
        verdict = Verdict(NAMES[number], False, None, "", detail)
    state = {True: "pass", False: "FAIL", None: "not run"}[verdict.passed]
    took = time.monotonic() - started
    sys.stderr.write(
        f"{verdict.test}: {state} {verdict.measured} {verdict.detail} ({took:.0f} s)\n"
    )
    return verdict


def run_suite(
    suite: Suite, numbers: Sequence[int], keep: Callable[[dict[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """Run tests on a backend.

    Args:
        suite: backend, truth and folder.
        numbers: which tests, of 1 to 10.
        keep: called with what there is after each test, so that a run which is cut short leaves
            what it has.

    Returns:
        What is written: environment, backend, and one row per test in their order.
    """
    verdicts: dict[int, Verdict] = {}

    def judge(n: int, test: Callable[[], Verdict]) -> None:
        verdicts[n] = _judge(n, test)
        keep(_result(suite, verdicts))

    for profile, tests in ENGINE_TESTS.items():
        wanted = [(n, test) for n, test in tests if n in numbers]
        if not wanted:
            continue
        try:
            with suite.backend.engine(profile) as engine:
                for n, test in wanted:
                    judge(n, lambda test=test: test(engine, suite))  # type: ignore[misc]
        except Exception as error:  # noqa: BLE001 (no engine: its tests say why)
            state = None if isinstance(error, NotSupported) else False
            detail = str(error)[:3000]
            for n, _ in wanted:
                verdicts.setdefault(n, Verdict(NAMES[n], state, None, "", detail))
    for n, whole in WHOLE_TESTS:
        if n in numbers:
            judge(n, lambda whole=whole: whole(suite))  # type: ignore[misc]
    return _result(suite, verdicts)


def _result(suite: Suite, verdicts: dict[int, Verdict]) -> dict[str, Any]:
    backend = suite.backend
    result = {
        "environment": {"cpu": cpu_model(), "cpus": os.cpu_count()} | dict(backend.environment),
        "backend": {"name": backend.name, "version": backend.version},
        "results": [verdicts[n].row() for n in sorted(verdicts)],
    }
    # Messages name files; where they lay on this machine says nothing to others.
    told: dict[str, Any] = json.loads(json.dumps(result).replace(str(suite.work), "WORK"))
    return told
