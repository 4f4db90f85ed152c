"""What vLLM loads in every process: checks the seams, then installs the wrappers, once."""

from __future__ import annotations

import logging
import sys
from multiprocessing import parent_process

from inspect_lens._settings import Settings, drop

__all__ = ["register"]

logger = logging.getLogger("vllm.inspect_lens")


_INSPECTING = "vllm.model_executor.models.registry"


def register() -> None:
    """Entry point of `vllm.general_plugins`.

    Raises:
        CompatError: this vLLM is not one that the lens knows, or it loads vllm-lens as well;
            nothing was changed.
    """
    settings = Settings.load()
    if settings.parent and parent_process() is None:
        from ._with_parent import end_with

        # The server; engines and workers, which it starts, are not the named process's children.
        drop("parent")
        end_with(settings.parent)
    if settings.disable or _only_looks_at_a_model():
        return
    # Imported here: the entry point itself has to stay light.
    from ._compat import SEAMS, add_method, has_rust_front_end, seam, verify, wrap

    if has_rust_front_end():
        # Nobody would judge and seal requests there, and collect their results.
        logger.warning(
            "inspect_lens: not active: the front-end in Rust loads no plug-ins, and passes over "
            "lens requests. Start without VLLM_USE_RUST_FRONTEND"
        )
        return
    from ._frontend import FRONT_END_WRAPPERS
    from ._hooks import manage_hooks
    from ._rivals import refuse_rivals
    from ._serve import install_when_serving
    from ._worker import exported_taps, stats, wrap_load_model
    from ._worker import register as register_probe

    refuse_rivals()
    verify(SEAMS)
    wrap(seam("load_model"), wrap_load_model)
    add_method(seam("load_model"), "inspect_lens_stats", stats)
    add_method(seam("load_model"), "inspect_lens_register", register_probe)
    add_method(seam("load_model"), "inspect_lens_taps", exported_taps)
    add_method(seam("load_model"), "inspect_lens_hooks", manage_hooks)
    for name, make in FRONT_END_WRAPPERS.items():
        wrap(seam(name), make)
    install_when_serving()


def _only_looks_at_a_model() -> bool:
    """Whether this is the process in which vLLM asks a model's class what it can do.

    It loads plug-ins, as models may be theirs, and runs no engine; vLLM's start waits for it.
    """
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name == _INSPECTING
