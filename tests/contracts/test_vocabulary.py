"""One name for one idea across scorers, solvers, oracles, monitors, approvers and tools."""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Callable
from typing import Any

import pytest

ROOMS = (
    "scorer", "solver", "oracle", "agents", "agents.control", "agents.petri", "agents.sentinel",
    "agents.scout",
)  # fmt: skip


def written(component: Any, name: str) -> Any:
    """The function as it is written; Inspect's `approver` keeps it in a closure."""
    function = inspect.unwrap(component)
    cells = getattr(function, "__closure__", None) or ()
    found = [c.cell_contents for c in cells if inspect.isfunction(c.cell_contents)]
    return next((f for f in found if f.__name__ == name), function)


def parameters() -> dict[str, dict[str, Any]]:
    """Annotation of each parameter of each public function, by function."""
    found: dict[str, dict[str, Any]] = {}
    for room in ROOMS:
        module = importlib.import_module(f"inspect_lens.{room}")
        for name in module.__all__:
            function: Callable[..., Any] = written(getattr(module, name), name)
            if inspect.isfunction(function):
                hints = typing.get_type_hints(function)
                names = inspect.signature(function).parameters
                found[f"{room}.{name}"] = {n: hints[n] for n in names if n in hints}
    return found


PUBLIC = parameters()


def parts(annotation: Any) -> set[Any]:
    """The members of a union, flat, or the type alone; aliases are looked into."""
    members = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        return parts(members[0])
    is_union = members and typing.get_origin(annotation) not in (typing.Literal, list, tuple)
    if not is_union or isinstance(annotation, type(list[int])):
        return {annotation}
    return {one for member in members for one in parts(member)}


ONE = {int, type(None)}
"""One layer of a probe, or that of its card."""
MEANINGS: dict[str, Callable[[Any], bool]] = {
    # One layer; what may be several is `layers`.
    "layer": lambda hint: parts(hint) <= ONE,
    "layers": lambda hint: not parts(hint) <= ONE,
    # How much of a vector; in which unit a suspicion or a band is given is `unit`.
    "scale": lambda hint: hint is float,
    "unit": lambda hint: typing.get_origin(hint) is typing.Literal,
    # Which calls are read; what makes one value of several is `combine`.
    "over": lambda hint: set(typing.get_args(hint)) == {"last", "all"},
    "combine": lambda hint: {"mean"} < set(typing.get_args(hint)),
    # What happens where nothing was captured.
    "on_missing": lambda hint: "error" in typing.get_args(hint),
    # A number above which something acts, or an operating point of the card by name.
    "threshold": lambda hint: parts(hint) <= {float, str, type(None)},
    "check_model": lambda hint: hint is bool,
    "seed": lambda hint: int in parts(hint),
    "source": lambda hint: hint is str or "captured" in typing.get_args(hint),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_a_name_means_the_same_everywhere(name: str) -> None:
    used = {function: hints[name] for function, hints in PUBLIC.items() if name in hints}
    assert used, f"{name} is a parameter of nothing; take it out of the vocabulary"
    wrong = {function: hint for function, hint in used.items() if not MEANINGS[name](hint)}
    assert not wrong, f"{name} means something else there: {wrong}"


SYNONYMS = {
    "layer_indices": "layers", "layer_index": "layer", "cutoff": "threshold", "cut": "threshold",
    "on_error": "on_missing", "aggregate": "pool", "reduction": "pool", "aggregation": "pool",
    "strict_model": "check_model", "random_seed": "seed", "tokens_to_read": "positions",
    "multiplier": "scale", "norm_matched": "norm_match", "max_new_tokens": "max_tokens",
    "topk": "top_k", "k": "top_k", "sites": "site", "probe_name": "probe",
}  # fmt: skip
"""Names of other libraries for what has a name here."""


def test_no_idea_has_a_second_name() -> None:
    found = {
        f"{function}({name}=)": SYNONYMS[name]
        for function, hints in PUBLIC.items()
        for name in hints
        if name in SYNONYMS
    }
    assert not found, f"these have another name here: {found}"


def test_what_acts_on_a_card_s_threshold_takes_its_operating_points_by_name() -> None:
    acting = {
        "scorer.probe_score", "scorer.deception_probe", "scorer.monitor_alarm",
        "solver.probe_gate", "agents.probe_approver", "agents.petri.eval_awareness_approver",
        "agents.petri.read_probe", "agents.sentinel.probe_monitor",
    }  # fmt: skip
    assert acting <= PUBLIC.keys()
    missing = {name for name in acting if str not in parts(PUBLIC[name].get("threshold"))}
    assert not missing
