"""Alarms that end a generation, in the loop that hands out the outputs of all requests."""

from __future__ import annotations

import functools
from typing import Any

from inspect_lens._engine.protocol.processes import ends_process

from .attach import Results

__all__ = ["stop_at_alarm"]


def stop_at_alarm(state: Any, results: Results) -> None:
    """End a request as a stop string would, once an alarm is raised.

    vLLM then finishes it with the reason `stop`, and tells the engine to give it up.
    """
    detokenizer, key = state.detokenizer, state.request_id
    update = detokenizer.update

    @functools.wraps(update)
    def update_or_stop(*args: Any, **kwargs: Any) -> Any:
        stop = update(*args, **kwargs)
        if stop is not None:
            return stop
        try:
            name = results.alarm(key, detokenizer.num_output_tokens())
        except BaseException as error:
            if ends_process(error):
                raise
            results.spoil(key, error)
            return "inspect_lens:fault"  # its text is nobody's any more
        return None if name is None else f"inspect_lens:alarm:{name}"

    detokenizer.update = update_or_stop
