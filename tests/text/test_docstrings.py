"""Docstrings of public functions name the arguments of the signature; private ones are a line."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys

import griffe

from tests.kit.docstrings import documented_arguments, refers_to_twin, signature_arguments
from tests.kit.public_objects import public_functions, public_objects
from tests.kit.repository import ROOT

# Methods whose one sentence covers two arguments or three. The list only shrinks.
SHORT = {
    "inspect_lens.model.Activations.get",
    "inspect_lens.model.Activations.of",
    "inspect_lens.train.ActivationSet.subset",
}


def test_arguments_are_documented() -> None:
    wrong = {}
    for path, function in public_functions():
        doc = function.docstring.value if function.docstring else ""
        documented, parameters = documented_arguments(doc), signature_arguments(function)
        is_method = function.parent is not None and function.parent.is_class
        # One sentence can say what one argument of a method is.
        if not documented and (refers_to_twin(doc) or (is_method and len(parameters) <= 1)):
            continue
        if (documented == parameters) == (path in SHORT):
            wrong[path] = {"documented": documented, "in the signature": parameters}
    assert not wrong


def test_private_functions_have_a_line_at_most() -> None:
    long = []
    for folder in ("src", "gallery", "benchmarks", "evals", "organism", "tests/kit"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    is_private = node.name.startswith("_") and not node.name.startswith("__")
                    if is_private and "\n" in (ast.get_docstring(node) or ""):
                        long.append(f"{file.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not long


def test_everything_public_has_a_docstring() -> None:
    documented: dict[str, griffe.Object | griffe.Alias] = {
        **dict(public_objects()), **dict(public_functions()),
    }  # fmt: skip
    assert not [path for path, found in documented.items() if not found.docstring]


def test_pages_show_what_the_description_of_a_field_says() -> None:
    said = {
        f"{path}.{name}": (field.description, member.docstring and member.docstring.value)
        for path, found in public_objects()
        for name, field in getattr(
            getattr(importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2]),
            "model_fields", {},
        ).items()
        if field.description and (member := found.members.get(name)) is not None
    }  # fmt: skip
    assert "inspect_lens.spec.CaptureSpec.reduce" in said
    lost = {
        path: text
        for path, (text, shown) in said.items()
        if " ".join((shown or "").split()) != " ".join(text.split())
    }
    assert not lost


def test_the_first_line_is_a_whole_sentence_for_summaries() -> None:
    """Summaries of pages show the first line; `PublicObjects` puts the whole sentence there."""
    first = {
        path: found.docstring.value.partition("\n")[0]
        for path, found in public_objects()
        if found.docstring
    }
    assert not {path: line for path, line in first.items() if not line.endswith((".", ":", "?"))}


def test_the_prompt_tells_what_fields_are() -> None:
    code = """
import sys
sys.ps1 = ">>> "
import pydoc
from inspect_lens.probe import Threshold
from inspect_lens.spec import CaptureSpec
for one in (CaptureSpec, Threshold):
    print(pydoc.render_doc(one, renderer=pydoc.plaintext))
"""
    made = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    assert "phase: Keep only those of the positions that are `prefill`" in made
    assert "fpr: False positive rate that it was set for." in made
    assert "Example:" in made
