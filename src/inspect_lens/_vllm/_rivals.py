"""Plug-ins that take the same request keys: what both would serve, neither does right."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

from inspect_lens.errors import CompatError

from ._compat import allowed_plugins

__all__ = ["refuse_rivals"]


def refuse_rivals() -> None:
    """Refuse to run beside vllm-lens.

    vLLM imports all its plug-ins before it calls one, so whichever is called here sees the others.

    Raises:
        CompatError: vLLM loads vllm-lens, too.
    """
    allowed = allowed_plugins()
    others = [
        plugin.name
        for plugin in entry_points(group="vllm.general_plugins")
        if plugin.module.partition(".")[0] == "vllm_lens"
        # One that could not be imported is not loaded.
        and plugin.module in sys.modules
        and (allowed is None or plugin.name in allowed)
    ]
    if others:
        names = ",".join(others)
        raise CompatError(
            f"inspect_lens: vLLM also loads vllm-lens (plug-in {names}), which takes the same "
            "request keys and forces eager mode. Choose one: VLLM_PLUGINS=inspect_lens, or "
            f"VLLM_PLUGINS={names} (with what else you load, separated by commas), or uninstall "
            "vllm-lens"
        )
