"""The garbage collector of evals and of a server; each case has a process of its own."""

from __future__ import annotations

import functools
import gc
import json

import pytest

from tests.kit.forks import run_python

PYTHONS = gc.get_threshold()
OFF = {"INSPECT_LENS_GARBAGE_THRESHOLD": "0"}
BEGINS = """
from fastapi import FastAPI
from inspect_lens._vllm.http.server import begin
begin(FastAPI())
"""
TURNS_OFF = "from inspect_lens._vllm.compat.features import turn_off; turn_off('http', 'x')"
CASES = {
    "untouched": ("spare_collector()", {}),
    "higher": ("gc.set_threshold(300_000, 5, 5); spare_collector()", {}),
    "zero": ("gc.set_threshold(0); spare_collector()", {}),
    "off": ("gc.disable(); spare_collector()", {}),
    "asked": ("spare_collector()", OFF),
    "server": (BEGINS, {}),
    "server asked": (BEGINS, OFF),
    "server off": (TURNS_OFF + BEGINS, {}),
    "provider": ("get_model('lens/x', base_url='http://127.0.0.1:9')", {}),
}
"""By name, what a process does, and its environment."""

# Imports take seconds, so there is one process, and each case runs in a fork of it.
SAYS = """
import gc, json, os, sys, weakref
from inspect_ai.model import get_model
from inspect_lens.model._provider import spare_collector

class Node: pass

def cycle():
    node = Node(); node.itself = node
    return weakref.ref(node)

for name, (does, environment) in json.loads(sys.argv[1]).items():
    if os.fork():
        assert os.wait()[1] == 0
        continue
    os.environ.update(environment)
    gone = cycle()
    exec(does)
    lost = gone() is None
    after = cycle()
    gc.collect()
    frozen = gc.get_freeze_count() > 0
    said = [gc.get_threshold(), gc.isenabled(), frozen, lost, after() is None]
    print(json.dumps([name, said]), flush=True)
    os._exit(0)
"""


@functools.cache
def said() -> dict[str, list[object]]:
    done = run_python("-c", SAYS, json.dumps(CASES))
    assert done.returncode == 0, done.stdout
    # Inspect says its version, too.
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


def test_cycles_of_before_are_freed_and_of_later_are_still_found() -> None:
    assert said()["untouched"] == [[200_000, *PYTHONS[1:]], True, True, True, True]


@pytest.mark.parametrize(
    ("case", "threshold", "enabled"),
    [
        ("higher", [300_000, 5, 5], True),
        ("zero", [0, *PYTHONS[1:]], True),
        ("off", [*PYTHONS], False),
        ("asked", [*PYTHONS], True),
    ],
)
def test_what_somebody_chose_stays(case: str, threshold: list[int], enabled: bool) -> None:
    assert said()[case][:3] == [threshold, enabled, False]


def test_the_provider_does_it() -> None:
    assert said()["provider"][0] == [200_000, *PYTHONS[1:]]


@pytest.mark.parametrize(
    ("case", "first"),
    [("server", 70_000), ("server asked", PYTHONS[0]), ("server off", PYTHONS[0])],
)
def test_a_server_that_has_the_lens_does_it_in_part(case: str, first: int) -> None:
    assert said()[case][0] == [first, *PYTHONS[1:]]
