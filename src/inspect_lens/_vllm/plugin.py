"""What vLLM loads in every process: checks the names of vLLM, then installs the wrappers, once."""

from __future__ import annotations

import logging
import sys
from multiprocessing import parent_process

from inspect_lens._settings import Settings, drop, flag, is_lens_required, text
from inspect_lens.errors import CompatError

from .compat.monkeypatches import RivalError

logger = logging.getLogger("vllm.inspect_lens")


_INSPECTING = "vllm.model_executor.models.registry"


def register() -> None:
    """Entry point of `vllm.general_plugins`.

    Where the lens cannot be served, it is off, with one line in the log, and vLLM starts as ever:
    whoever starts it may not have asked for us. What one engine cannot have is found out later, see
    `compat.features.off`; wrong settings are such a thing, too, unless INSPECT_LENS_REQUIRED or
    INSPECT_LENS_SERVER is set, which has them read at once.
    """
    try:
        if (parent := text("parent")).isdecimal() and int(parent) and parent_process() is None:
            from inspect_lens._engine.protocol.processes import end_with

            # The server; engines and workers, which it starts, are not that process's children.
            drop("parent")
            end_with(int(parent))
        if not flag("disable") and not _only_looks_at_a_model():
            if is_lens_required():
                _check_settings()
            _install()
        elif flag("disable") and text("server"):
            logger.warning(
                "inspect_lens: INSPECT_LENS_DISABLE is set, so what INSPECT_LENS_SERVER asks for "
                "acts on no request"
            )
    except Exception as error:
        if is_lens_required():
            raise
        _leave_off(error)


def _check_settings() -> None:
    """Raise what is wrong with the settings before anything is started."""
    if file := Settings.load().server:
        from .registered.contents import read_server_file

        read_server_file(file)


def _install() -> None:
    # Imported here: the entry point itself has to stay light.
    from .compat.features import FEATURES, is_required, problems, turn_off
    from .compat.monkeypatches import (
        PATCHES,
        add_method,
        has_rust_front_end,
        monkeypatch,
        verify,
        wrap,
    )

    if has_rust_front_end():
        # Nobody would judge and seal requests there, and collect their results.
        reason = (
            "the front-end in Rust loads no plug-ins, and passes over lens requests. Start without "
            "VLLM_USE_RUST_FRONTEND"
        )
        if is_lens_required():
            raise CompatError(f"INSPECT_LENS_REQUIRED or INSPECT_LENS_SERVER is set, but {reason}")
        logger.warning("inspect_lens: not active: %s", reason)
        return
    from .cache_salt import SALT_WRAPPERS
    from .compat.monkeypatches import refuse_rivals
    from .engine_core import SCHEDULER_WRAPPERS
    from .frontend.state import RESET_WRAPPERS
    from .frontend.wrappers import FRONT_END_WRAPPERS
    from .http.server import install_when_serving
    from .worker.worker import exported_taps, manage_hooks, refusal_here, stats, wrap_load_model
    from .worker.worker import register as register_probe

    refuse_rivals()
    for feature, reason in problems().items():
        if feature == "lens" or is_required():
            raise CompatError(f"{reason}, which inspect_lens needs for {FEATURES[feature]}")
        logger.warning("inspect_lens: %s: off: %s", FEATURES[feature], reason)
        turn_off(feature, reason)
    verify(PATCHES)
    wrap(monkeypatch("load_model"), wrap_load_model)
    add_method(monkeypatch("load_model"), "inspect_lens_refusal", refusal_here)
    add_method(monkeypatch("load_model"), "inspect_lens_stats", stats)
    add_method(monkeypatch("load_model"), "inspect_lens_register", register_probe)
    add_method(monkeypatch("load_model"), "inspect_lens_taps", exported_taps)
    add_method(monkeypatch("load_model"), "inspect_lens_hooks", manage_hooks)
    wrappers = SCHEDULER_WRAPPERS | SALT_WRAPPERS | FRONT_END_WRAPPERS | RESET_WRAPPERS
    for name, make in wrappers.items():
        wrap(monkeypatch(name), make)
    install_when_serving()


def _leave_off(error: Exception) -> None:
    """Go on without the lens, and have requests for it refused where that can be done."""
    logger.error(
        "inspect_lens: not active in this process: %s: %s. vLLM runs as without it. See "
        "`inspect-lens doctor`; INSPECT_LENS_REQUIRED=1 refuses to start instead",
        type(error).__name__,
        error,
    )
    try:
        from .compat.features import turn_off, without_files
        from .frontend.admission import refuse_requests

        turn_off("lens", without_files(error))
        refuse_requests(own_only=isinstance(error, RivalError))
    except Exception as further:  # noqa: BLE001 - vLLM's start must not end here
        logger.error("inspect_lens: requests for the lens are passed over: %s", further)


def _only_looks_at_a_model() -> bool:
    """Whether this is the process in which vLLM asks a model's class what it can do."""
    # It loads plug-ins, as models may be theirs, and runs no engine; vLLM's start waits for it.
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name == _INSPECTING
