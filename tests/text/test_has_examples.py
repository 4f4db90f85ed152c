"""What a user builds with has an example in its docstring; `tests/docs` runs them all."""

from __future__ import annotations

from inspect_lens import _registry
from tests.kit.components import components
from tests.kit.docstrings import has_example
from tests.kit.examples import examples, required
from tests.kit.repository import ROOT


def test_components_have_an_example() -> None:
    missing = [path for path, doc in required().items() if not has_example(doc)]
    assert not missing, (
        "give each docstring a section `Example:` with a ```python block; "
        "docs/contributing.md says how"
    )


def test_the_example_of_a_function_calls_it() -> None:
    # The name of a provider is part of the name of a model, with a hyphen.
    shown = [(e.path, e.path.rpartition(".")[2], e.block.code) for e in examples()]
    unused = [path for path, name, code in shown if name not in code.replace("-", "_")]
    # An instance of a class may come out of a function.
    assert [path for path in unused if path.rpartition(".")[2].islower()] == []


def test_what_is_registered_has_to_have_one() -> None:
    wanted = set(required())
    names = {path.rpartition(".")[2] for path in wanted}
    assert {*_registry.__all__, *(c.name for c in components() if c.kind != "modelapi")} <= names
    lazily = {f"inspect_lens.agents.{room}.{name}" for _, room, _, name in _registry._LAZY}
    assert lazily <= wanted


def test_examples_are_found() -> None:
    found = {example.path: example.block for example in examples()}
    block = found["inspect_lens.view.sparkline"]
    assert block.page.name == "_viewer.py"
    assert block.mode == "run"
    lines = (ROOT / block.page).read_text(encoding="utf-8").splitlines()
    assert lines[block.line - 1].strip() == "```python"
    assert lines[block.line].strip() == block.code.splitlines()[0]
