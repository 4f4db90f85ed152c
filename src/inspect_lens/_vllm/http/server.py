"""In the API server: what is wrapped there, and what is added to its application."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from inspect_lens._vllm.clients import NotesClient
from inspect_lens._vllm.compat.features import FEATURES, is_off, turn_off
from inspect_lens._vllm.compat.guard import pass_over
from inspect_lens._vllm.compat.monkeypatches import SERVER_PATCHES, verify, wrap
from inspect_lens._vllm.compat.off import reason_of
from inspect_lens.spec import LENS_KEYS

from .bodies import LensBodies, check_unread, has_lens_words
from .responses import payloads
from .routes import add_routes

logger = logging.getLogger("vllm.inspect_lens")

_SERVER_MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.launchers.api_server",
    "vllm.entrypoints.openai.chat_completion.serving",
)


class _Front:
    """The front-end of this process, once it has an engine."""

    end: Any = None


def is_serving() -> bool:
    main = getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", None)
    return any(name in sys.modules or name == main for name in _SERVER_MODULES)


def install_when_serving(front_end: Any = None, keys: Collection[str] = LENS_KEYS) -> None:
    """Wrap the HTTP layer where this process is an API server, or becomes one.

    Bodies are judged there in any case: while the lens is off, those with `keys` are refused.
    """
    if front_end is not None:
        _Front.end = front_end
    if not is_serving():
        return
    try:
        if is_off("http") is None:
            verify(SERVER_PATCHES)
    except Exception as error:  # noqa: BLE001 - vLLM's start must not end here
        reason = reason_of(error)
        logger.warning("inspect_lens: %s: off: %s", FEATURES["http"], reason)
        turn_off("http", reason)
    for item in SERVER_PATCHES:
        make = _routers if item.name == "routers" else _reading
        try:
            wrap(item, partial(make, keys))
        except Exception as error:  # noqa: BLE001 - nor here
            logger.error("inspect_lens: bodies with lens keys may be passed over: %s", error)


def _reading(keys: Collection[str], original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse lens keys of bodies that come by no route of ours, as those of `vllm run-batch`."""

    def to_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            check_unread(self, keys)
        except BaseException as error:  # noqa: BLE001 - the loop is everybody's
            pass_over(error, uses_lens=bool(has_lens_words(self, keys)))
        return original(self, *args, **kwargs)

    return to_params


def _routers(keys: Collection[str], original: Callable[..., Any]) -> Callable[..., Any]:
    def register(app: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(app, *args, **kwargs)
        try:
            if is_off("http") is None:
                add_routes(app, lambda: _Front.end, payloads)
        except Exception as error:  # noqa: BLE001 - vLLM's start must not end here
            turn_off("http", reason_of(error))
        try:
            app.add_middleware(LensBodies, front_end=lambda: _Front.end, keys=keys)
            app.add_middleware(NotesClient)  # the outer one: the other refuses
        except Exception as error:  # noqa: BLE001 - nor here
            logger.error("inspect_lens: bodies with lens keys are passed over: %s", error)
        return made

    return register
