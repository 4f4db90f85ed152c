"""How a call is made to capture, in words: one text for every error that needs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inspect_lens.model._host import (
    PrerequisiteError,
    RegistryType,
    registry_add,
    registry_has,
    registry_info,
    registry_lookup,
)

__all__ = ["capture_advice", "explain_none", "role_advice"]

_INSPECTS = ("model_name", "base_url", "api_key", "config")
"""What Inspect passes to every model."""


def role_advice(layers: Sequence[int] | None = None) -> str:
    """The option that makes a model in a role capture.

    Args:
        layers: to capture; `…` stands for them where they are not known.

    Returns:
        Part of a command line, in one way that Inspect passes on: `-M` reaches `--model` alone.
    """
    wanted = "…" if layers is None else list(layers)
    return f"--model-role 'ROLE={{model: vllm-lens/…, model_args: {{capture: {wanted}}}}}'"


def capture_advice(layers: Sequence[int]) -> str:
    """What to do where a call had to capture and did not.

    Args:
        layers: that are needed.

    Returns:
        Part of a sentence, for the model of the eval and for one in a role.
    """
    wanted = list(layers)
    return (
        f"run the eval with a vllm-lens/ model and -M capture={wanted}, or put "
        f"with_capture({wanted}) into the solver; for a model in a role write "
        f"{role_advice(wanted)}"
    )


def explain_none() -> None:
    """Make `--model none -M capture=…` an error that says what to do.

    Inspect passes `-M` to the model that `--model` names, and its `none` knows no arguments: the
    eval would end in a TypeError. Without arguments it is what it was.
    """
    kind: RegistryType = "modelapi"
    if not registry_has(kind, "none"):
        return
    plain: Any = registry_lookup(kind, "none")

    def none(*args: object, **options: object) -> object:
        given = [name for name in options if name not in _INSPECTS]
        if given:
            raise PrerequisiteError(
                f"--model none: takes no -M {given[0]}=…, which reaches the model of --model "
                f"alone, and there is none; for a model in a role write {role_advice()}"
            )
        return plain(*args, **options)

    registry_add(none, registry_info(plain))
