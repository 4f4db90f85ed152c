"""No more prefix-cache hits than there are rows of the cached tokens.

A request that captures prompt tokens reads the prefix cache as far as its front-end has rows of
the same tokens from before, see `RowCache`. Behind that they have to be computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from inspect_lens._engine.protocol.envelope import CACHED_KEY
from inspect_lens._engine.protocol.processes import ends_process
from inspect_lens.spec import ENVELOPE_KEY

logger = logging.getLogger("vllm.inspect_lens")


class _Bounded:
    """A coordinator of key-value caches that finds hits only up to a limit."""

    def __init__(self, coordinator: Any, limit: int) -> None:
        self._coordinator, self._limit = coordinator, limit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coordinator, name)

    def find_longest_cache_hit(self, block_hashes: Any, max_cache_hit_length: int) -> Any:
        most = min(max_cache_hit_length, self._limit)
        return self._coordinator.find_longest_cache_hit(block_hashes, most)


def _get_computed_blocks(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_computed_blocks(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            extra = getattr(request.sampling_params, "extra_args", None)
            limit = (extra.get(ENVELOPE_KEY) or {}).get(CACHED_KEY) if extra else None
        except BaseException as error:
            if ends_process(error):
                raise
            # What is computed for nothing has rows; what is not has none.
            logger.exception("inspect_lens: it is not known how much of a prompt may be cached")
            limit = 0
        if limit is None:
            return original(self, request, *args, **kwargs)
        coordinator = self.coordinator
        self.coordinator = _Bounded(coordinator, limit)
        try:
            return original(self, request, *args, **kwargs)
        finally:
            self.coordinator = coordinator

    return get_computed_blocks


CACHE_WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "cached_blocks": _get_computed_blocks,
}
"""Wrapper by name of the monkeypatch."""
