"""The seams to vLLM, whose names are in `seam_table.py`.

`verify` checks all of it first, and refuses a vLLM that lacks a name; `wrap` replaces one, once.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from inspect_lens.errors import CompatError

from .seam_table import EAGER_SEAMS, SEAMS, SERVE_SEAMS, Seam

__all__ = [
    "allowed_plugins",
    "is_engine_apart",
    "is_in_process",
    "resolve",
    "seam",
    "verify",
    "vllm_version",
    "wrap",
]

_MARK = "__inspect_lens_original__"


@functools.cache
def vllm_version() -> str:
    """Version of the vLLM that is imported."""
    return str(importlib.import_module("vllm").__version__)


def has_rust_front_end() -> bool:
    """Whether requests come by vLLM's front-end in Rust, which loads no plug-ins."""
    return bool(getattr(importlib.import_module("vllm.envs"), "VLLM_USE_RUST_FRONTEND", False))


def is_engine_apart() -> bool:
    """Whether engines run in processes of their own, which is vLLM's default."""
    return bool(importlib.import_module("vllm.envs").VLLM_ENABLE_V1_MULTIPROCESSING)


def allowed_plugins() -> list[str] | None:
    """Names of the plug-ins that vLLM loads; None where it loads all."""
    allowed: list[str] | None = importlib.import_module("vllm.envs").VLLM_PLUGINS
    return allowed


def is_in_process(engine: Any) -> bool:
    """Whether an `LLMEngine` steps in its caller's process, and so only when it is told to.

    vLLM gives it the executor then and only then (VLLM_ENABLE_V1_MULTIPROCESSING=0).
    """
    return hasattr(engine, "model_executor")


def seam(name: str) -> Seam:
    """Look a seam up by its name here."""
    for item in SEAMS + SERVE_SEAMS + EAGER_SEAMS:
        if item.name == name:
            return item
    raise KeyError(name)


def resolve(item: Seam) -> tuple[Any, str, Callable[..., Any]]:
    """Import a seam's target."""
    module, _, path = item.target.partition(":")
    try:
        owner: Any = importlib.import_module(module)
        *parents, attribute = path.split(".")
        for part in parents:
            owner = getattr(owner, part)
        current = getattr(owner, attribute)
    except (ImportError, AttributeError) as error:
        raise CompatError(
            f"vLLM {vllm_version()} has no {item.target} ({error}), which inspect_lens needs: "
            f"{item.reason}. Install a vLLM that docs/reference/compatibility.md lists, or set "
            "INSPECT_LENS_DISABLE=1 to run without the lens"
        ) from error
    return owner, attribute, getattr(current, _MARK, current)


def verify(items: tuple[Seam, ...]) -> None:
    """Check that every seam exists with the parameters that its wrapper relies on."""
    for item in items:
        _, _, original = resolve(item)
        names = tuple(inspect.signature(original).parameters)
        found = names[: len(item.parameters)]
        if found != item.parameters or not set(item.keywords) <= set(names):
            raise CompatError(
                f"vLLM {vllm_version()}: {item.target} takes {names} and inspect_lens knows it "
                f"with {item.parameters + item.keywords}. Install a vLLM that "
                "docs/reference/compatibility.md lists, or set INSPECT_LENS_DISABLE=1 to run "
                "without the lens"
            )


def wrap(item: Seam, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a seam's target by `make(original)`, once."""
    owner, attribute, original = resolve(item)
    if hasattr(getattr(owner, attribute), _MARK):
        return
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, _MARK, original)
    setattr(owner, attribute, wrapper)


def add_method(item: Seam, name: str, function: Callable[..., Any]) -> None:
    """Add a method of ours to the class that holds a seam; RPCs find it by name."""
    owner, _, _ = resolve(item)
    setattr(owner, name, function)
