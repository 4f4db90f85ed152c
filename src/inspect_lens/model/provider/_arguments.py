"""Arguments of a model (`-M`): what nobody would read is refused, before a server is asked."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any, Final

from inspect_lens.errors import did_you_mean
from inspect_lens.model._host import VLLMAPI, PrerequisiteError

__all__ = ["refuse_unknown_arguments"]

logger = logging.getLogger(__name__)

_INSTEAD: Final = {
    "hooks": "lens_config(hooks=…)",
    "lens": "with_lens(lens=…)",
    "qk": "lens_config(qk=…)",
    "sink": "lens_config(sink=…)",
}
"""What calls ask for and no argument says, and what does."""
_OF_INSPECT: Final = frozenset(inspect.signature(VLLMAPI.__init__).parameters) - {
    "self", "model_name", "config", "server_args",
}  # fmt: skip


def refuse_unknown_arguments(
    given: Mapping[str, Any], own: Collection[str], *, attached: str | None
) -> None:
    """Refuse arguments that no one reads.

    A server that is started gets what is left over, and refuses what it does not know. One that
    runs has its arguments already: a log that is scored again brings those of its own server, so
    these are named in a warning.
    """
    for name, value in given.items():
        if name in _OF_INSPECT or value is None:
            continue
        if (instead := _INSTEAD.get(name)) is not None:
            why = f"is no argument of the model; put {instead} into the task's solver"
        elif get_close_matches(name, own, n=1, cutoff=0.8):
            why = f"is no argument of the model; {did_you_mean(name, own)}"
        else:
            if attached is not None:
                logger.warning(
                    "vllm-lens: -M %s has no effect: the server at %s is running already",
                    name, attached,
                )  # fmt: skip
            continue
        raise PrerequisiteError(f"vllm-lens: -M {name}={value}: {why}")
