"""Docstrings of public functions name the arguments that the signature has."""

from __future__ import annotations

import griffe

from tests.kit.docstrings import documented_arguments, refers_to_twin, signature_arguments
from tests.kit.repository import public_functions, public_objects

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


def test_everything_public_has_a_docstring() -> None:
    documented: dict[str, griffe.Object | griffe.Alias] = {
        **dict(public_objects()), **dict(public_functions()),
    }  # fmt: skip
    assert not [path for path, found in documented.items() if not found.docstring]
