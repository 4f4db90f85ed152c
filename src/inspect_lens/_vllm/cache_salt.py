"""By what cache blocks of a steered request are found: from the first edited token on, its own.

vLLM puts a request's salt into the hash of its first block, and so into all. Steering that begins
later has the blocks in front of it in common with everybody: with plain requests, and with the same
prompt steered otherwise. So a salt says where it begins, and the engine's hash of a block has it
there. An engine that does not know of this takes the salt as it is, for all blocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

_MARK = "|inspect_lens@"
_OURS = re.compile(rf"(.*){re.escape(_MARK)}([0-9]{{1,9}}):(.*)", re.DOTALL)
"""Greedy, so that a caller's own salt may hold whatever it likes."""


class Salt(NamedTuple):
    """A salt of ours, taken apart."""

    callers: str | None
    """What the request has beside, from its first block on."""
    first: int
    """Position of the first token that is edited."""
    own: str
    """Who steers, and how."""


def salted(callers: str | None, first: int, own: str) -> str:
    """The salt of a request."""
    return f"{callers or ''}{_MARK}{first}:{own}"


_LONGEST = 4096
"""Characters: a longer salt, which somebody has sent, is neither looked through nor kept."""


def salt_of(salt: str) -> Salt | None:
    """Take a salt apart; None of one that is not ours, or too long: it then counts as a whole."""
    return _parts_of(salt) if len(salt) <= _LONGEST else None


@lru_cache(maxsize=4096)
def _parts_of(salt: str) -> Salt | None:
    found = _OURS.fullmatch(salt)
    return None if found is None else Salt(found[1] or None, int(found[2]), found[3])


def _block_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    def generate_block_hash_extra_keys(
        request: Any, start_token_idx: int, end_token_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        whole = request.cache_salt
        salt = None if whole is None else salt_of(whole)
        if salt is None:
            return original(request, start_token_idx, end_token_idx, *args, **kwargs)
        request.cache_salt = salt.callers
        try:
            keys, *rest = original(request, start_token_idx, end_token_idx, *args, **kwargs)
        finally:
            request.cache_salt = whole
        if start_token_idx <= salt.first < end_token_idx:
            # In the blocks behind this one, too: the hash of each has that of the one before.
            keys = (*(keys or ()), ("cache_salt", salt.own))
        return (keys, *rest)

    return generate_block_hash_extra_keys


SALT_WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "block_keys": _block_keys
}
"""Wrapper by name of the monkeypatch."""
