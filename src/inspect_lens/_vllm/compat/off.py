"""Why the lens is off in an engine: the one answer to whatever goes wrong while it gets ready.

Nobody may have asked for the lens, so vLLM starts as without it: one line in the log, and requests
for the lens get the reason. INSPECT_LENS_REQUIRED=1 stops the start instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from inspect_lens._engine.protocol.processes import ends_process
from inspect_lens._settings import flag
from inspect_lens.errors import CompatError, LensError, UnsupportedError

logger = logging.getLogger("vllm.inspect_lens")

_KEY = "inspect_lens_off"
_listeners: list[tuple[Any, Callable[[str], None]]] = []


def is_required() -> bool:
    """Whether whoever started vLLM wants it only with the lens."""
    return flag("required", wrong=True)


def off(vllm_config: Any) -> str | None:
    """Why the lens is off in an engine, as far as this process knows; None where it is not."""
    reason: str | None = vars(vllm_config).get(_KEY)
    return reason


def when_off(vllm_config: Any, tell: Callable[[str], None]) -> None:
    """Have somebody of this process told when the lens is turned off in an engine."""
    _listeners.append((vllm_config, tell))


def reason_of(error: BaseException) -> str:
    """What a refusal or a fault of ours means for the engine, in words for its clients."""
    if ends_process(error) or is_required():
        raise error
    if isinstance(error, LensError):
        return str(error)
    logger.warning("inspect_lens: a fault at start; please report it", exc_info=error)
    text = " ".join(str(error).split())
    return f"a fault at start ({type(error).__name__}: {text}); the log has its traceback"


def not_served(reason: str) -> UnsupportedError:
    """The error for a lens request to an engine that the lens does not serve."""
    return UnsupportedError(f"the lens does not serve this engine: {reason}")


def turn_off(vllm_config: Any, reason: str, *, is_told: bool = False) -> None:
    """Note why the lens is off in an engine."""
    if is_required():
        raise CompatError(f"INSPECT_LENS_REQUIRED is set, and the lens is off: {reason}")
    for config, tell in _listeners:
        if config is vllm_config:
            tell(reason)
    if off(vllm_config) is not None:
        return
    # Processes that get the configuration from this one hear of it, too.
    vars(vllm_config)[_KEY] = reason
    if not is_told:
        logger.warning(
            "inspect_lens: off in this engine: %s. vLLM runs as without the lens, and requests for "
            "it get this reason; INSPECT_LENS_REQUIRED=1 stops the start instead",
            reason,
        )
