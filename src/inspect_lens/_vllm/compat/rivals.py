"""Plug-ins that take the same request keys: what both would serve, neither does right."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

from inspect_lens.errors import CompatError


class RivalError(CompatError):
    """Another plug-in takes the same keys: to go on would answer requests wrongly."""


def refuse_rivals() -> None:
    """Refuse to run beside vllm-lens.

    vLLM imports all its plug-ins before it calls one, so whichever is called here sees the others.
    """
    # Imported here: vLLM's entry point loads this file, and has to stay light.
    from .monkeypatches import allowed_plugins

    # One that could not be imported is not loaded.
    if others := [name for name, module in rivals(allowed_plugins()) if module in sys.modules]:
        names = ",".join(others)
        raise RivalError(
            f"inspect_lens: vLLM also loads vllm-lens (plug-in {names}), which takes the same "
            "request keys and forces eager mode. Choose one: VLLM_PLUGINS=inspect_lens, or "
            f"VLLM_PLUGINS={names} (with what else you load, separated by commas), or uninstall "
            "vllm-lens"
        )


def rivals(allowed: list[str] | None) -> list[tuple[str, str]]:
    """Plug-ins of vllm-lens that vLLM would load."""
    return [
        (plugin.name, plugin.module)
        for plugin in entry_points(group="vllm.general_plugins")
        if plugin.module.partition(".")[0] == "vllm_lens"
        and (allowed is None or plugin.name in allowed)
    ]
