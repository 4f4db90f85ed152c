"""Every component is used by a test that runs it through Inspect on a real engine."""

from __future__ import annotations

import ast
import functools

import yaml
from inspect_ai._util.registry import registry_find, registry_info

from inspect_lens import _registry, agents, scorer, solver
from inspect_lens._base.shipped import EVALS
from inspect_lens.agents import control, petri, scout, sentinel
from tests.kit.components import Component, components, uses
from tests.kit.repository import ROOT

ROOMS = (agents, scorer, solver, petri, control, sentinel, scout)
# `lens_target` is what logs call `lens_target_agent`.
OTHERS = {"lens_target", *(name for names in EVALS.values() for _, name in names)}
REGISTERED = {
    *_registry.__all__,
    *(
        name
        for found in registry_find(
            lambda info: info.name.startswith("inspect_lens/") and info.type != "hooks"
        )
        if (name := registry_info(found).name.partition("/")[2]) not in OTHERS
    ),
}
FUNCTIONS = {
    Component(name, "function", room.__name__)
    for room in ROOMS
    for name in room.__all__
    if name.islower() and callable(getattr(room, name))
}
"""Everything that may stand in a task, and what reads its log, registered or not."""


def is_used(component: Component, found: set[str]) -> bool:
    """Whether a file uses it: imported from its room, or by the name that users write."""
    if component.kind == "modelapi":
        return any(text.startswith(f"{component.name}/") for text in found)
    return bool({f"{component.room}.{component.name}", f"inspect_lens/{component.name}"} & found)


@functools.cache
def used() -> dict[str, set[str]]:
    """What each end-to-end test file uses; those that ask for no engine do not count."""
    files = sorted((ROOT / "tests/e2e").glob("test_*.py"))
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    return {
        path.name: uses(path)
        for path, text in texts.items()
        if "pytestmark = pytest.mark.engine" in text and "lens_server_url" in text
    }


NAMES = {c.name for c in components()}
ALL = (*components(), *sorted(c for c in FUNCTIONS if c.name not in NAMES))


def test_an_end_to_end_test_uses_each_component() -> None:
    unused = [c for c in ALL if not any(is_used(c, found) for found in used().values())]
    assert not unused, (
        "run these in tests/e2e through inspect_ai.eval on the organism, against what was planted"
    )


RESCORED_ELSEWHERE = {
    "oracle_answer": "test_oracle.py",
    "attention_tracker": "test_evals.py",
    "document_rank": "test_document_rank.py",
    "follow_up_score": "test_follow_up.py",
    "reconstruction_score": "test_nla.py",
}
"""Four ask a server while they score, so they cannot be scored again without one; one reads
queries and keys, which a steering sweep does not capture."""


def test_inspect_score_says_the_same_again() -> None:
    """The scorers of one log, each of which is run again from the command line."""
    for component in (c for c in components() if c.kind == "scorer"):
        file = RESCORED_ELSEWHERE.get(component.name, "test_finished_logs.py")
        assert f"{component.room}.{component.name}" in used()[file], (
            f"{component.name} is not scored again by `inspect score`; add it to the scorers of "
            "tests/e2e/test_finished_logs.py"
        )


def test_each_eval_is_run_and_scored_again() -> None:
    """By one file, on the organism; `rescore_each` of `tests.kit` runs `inspect score`."""
    again: set[str] = set()
    for path in sorted((ROOT / "tests/e2e").glob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        called = {
            n.func.id
            for n in ast.walk(tree)
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        }
        if "rescore_each" in called:
            # By name, or out of a table of tasks.
            again |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    tasks = {
        entry["name"]
        for path in (ROOT / "evals").glob("*/eval.yaml")
        for entry in yaml.safe_load(path.read_text(encoding="utf-8"))["tasks"]
    }
    assert not tasks - again, (
        "no file of tests/e2e scores their logs again; add them to tests/e2e/test_evals.py, or to "
        "test_evals_with_data.py with a file of its data"
    )


def test_what_is_listed_is_what_the_source_registers() -> None:
    """A component that a decorator of another name registers would be overlooked above."""
    listed = {name.replace("_", "-") for name in NAMES}
    # In logs a metric is called what it measures: `auroc`, of `auroc_metric`.
    assert {
        name
        for each in REGISTERED
        if not {name := each.replace("_", "-"), f"{name}-metric"} & listed
    } == set()
    offered = {c.name for c in components() if c.kind != "modelapi"}
    assert offered <= {c.name for c in FUNCTIONS}
