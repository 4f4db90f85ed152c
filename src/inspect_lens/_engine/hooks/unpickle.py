"""The one place where bytes of a client become code: cloudpickle is read here and nowhere else.

It runs in workers of engines that were started with INSPECT_LENS_ALLOW_CODE=1.
"""

from __future__ import annotations

import io
import pickle  # noqa: TID251 - see the head of this file
from collections.abc import Callable
from typing import Any

from inspect_lens._engine.protocol.processes import ends_process
from inspect_lens.errors import SpecError

from .request import HookContext


class _Unpickler(pickle.Unpickler):
    """Reads functions that were written beside another package."""

    def find_class(self, module: str, name: str) -> Any:
        # Hooks of vllm-lens name its context in their annotations; the server need not have it.
        if module.partition(".")[0] == "vllm_lens" and name == "HookContext":
            return HookContext
        return super().find_class(module, name)


def load_function(data: bytes, *, name: str, allowed: bool) -> Callable[..., Any]:
    """Make a function of the bytes that cloudpickle made of it. This runs code."""
    if not allowed:
        raise SpecError("hooks: this engine was started without INSPECT_LENS_ALLOW_CODE=1")
    try:
        # What it makes of a function needs cloudpickle to be there.
        import cloudpickle  # type: ignore[import-untyped,unused-ignore]  # noqa: F401, TID251

        function = _Unpickler(io.BytesIO(data)).load()
    except BaseException as error:
        if ends_process(error, in_user_code=True):
            raise
        raise SpecError(
            f"hook {name}: cannot be read in the server ({type(error).__name__}: {error}); what it "
            "refers to has to be installed there, and client and server need the same Python"
        ) from error
    if not callable(function):
        raise SpecError(f"hook {name}: is {type(function).__name__} and not a function")
    made: Callable[..., Any] = function
    return made
