"""The garbage collector of a process that runs evals; each test has a process of its own."""

from __future__ import annotations

import functools
import gc
import json
import os
import subprocess
import sys

import pytest

PYTHONS = gc.get_threshold()

SAYS = """
import gc, json, weakref
{before}
class Node: pass
node = Node(); node.itself = node
gone = weakref.ref(node); del node
from inspect_lens.model._provider import collect_less
collect_less()
lost = gone() is None
later = Node(); later.itself = later
after = weakref.ref(later); del later
gc.collect()
frozen = gc.get_freeze_count() > 0
print(json.dumps([gc.get_threshold(), gc.isenabled(), frozen, lost, after() is None]))
"""


@functools.cache
def run(before: str = "", **environment: str) -> list[object]:
    done = subprocess.run(
        [sys.executable, "-c", SAYS.format(before=before)],
        env=os.environ | environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: list[object] = json.loads(done.stdout)
    return found


def test_cycles_of_before_are_freed_and_of_later_are_still_found() -> None:
    threshold, enabled, frozen, lost, found_later = run()
    assert threshold == [200_000, *PYTHONS[1:]]
    assert [enabled, frozen, lost, found_later] == [True, True, True, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "environment", "threshold", "enabled"),
    [
        ("gc.set_threshold(300_000, 5, 5)", {}, [300_000, 5, 5], True),
        ("gc.set_threshold(0)", {}, 0, True),
        ("gc.disable()", {}, None, False),
        ("", {"INSPECT_LENS_GARBAGE_THRESHOLD": "0"}, None, True),
    ],
    ids=["higher", "zero", "off", "asked"],
)
def test_what_somebody_chose_stays(
    before: str, environment: dict[str, str], threshold: object, enabled: bool
) -> None:
    found = run(before, **environment)
    pythons = run(INSPECT_LENS_GARBAGE_THRESHOLD="0")[0]
    if threshold == 0:
        assert isinstance(found[0], list)
        assert found[0][0] == 0
    else:
        assert found[0] == (threshold or pythons)
    assert found[1:3] == [enabled, False]


def test_the_provider_does_it() -> None:
    says = (
        "import gc; from inspect_ai.model import get_model; "
        "get_model('lens/x', base_url='http://127.0.0.1:9'); "
        "print(gc.get_threshold()[0])"
    )
    done = subprocess.run([sys.executable, "-c", says], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "200000"
