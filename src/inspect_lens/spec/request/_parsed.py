"""Requests that were parsed before, by content: a batch asks for one thing a thousand times."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from inspect_lens.spec.asks._hook import Hook
from inspect_lens.spec.edits._base import EditBase

if TYPE_CHECKING:
    from ._request import LensRequest

__all__ = []

Key = tuple[object, ...]

_BYTES_BESIDE = 4096
_BYTES_OF_A_PART = 96
_PLAIN = frozenset({int, bool, str, type(None)})
_MOST_PARTS = 1024
_MOST_TEXT = 1 << 16
_MOST_DEPTH = 16


class Parsed:
    """As many requests as have room, all that they hold counted: text, tensors and functions.

    Equal requests are one object, and others know what they did for it by its identity.
    """

    def __init__(self, most_bytes: int) -> None:
        """Start empty."""
        self._most = most_bytes
        self._lock = threading.Lock()
        self._known: OrderedDict[Key, tuple[list[object], LensRequest | None, int]] = OrderedDict()
        self._keys: dict[int, Key] = {}
        self.n_bytes = 0
        """Of what is kept."""

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._known)

    def get(self, key: Key) -> tuple[LensRequest | None] | None:
        """A request that was parsed before, or None in a tuple where there was none in it."""
        with self._lock:
            known = self._known.get(key)
            if known is None:
                return None
            self._known.move_to_end(key)
            return (known[1],)

    def keep(self, key: Key, kept: list[object], request: LensRequest | None) -> None:
        """Keep a request, and let go of those that were not asked for the longest."""
        size = _BYTES_BESIDE + sum(map(_part_bytes, key)) + _held_bytes(kept, request)
        if size > self._most // 4:
            return
        with self._lock:
            self._drop(key)
            self._known[key] = kept, request, size
            if request is not None:
                self._keys[id(request)] = key
            self.n_bytes += size
            while self.n_bytes > self._most:
                self._drop(next(iter(self._known)))

    def forget(self, request: LensRequest) -> None:
        """Keep nothing of a request that was refused."""
        with self._lock:
            if (key := self._keys.get(id(request))) is not None:
                self._drop(key)

    def _drop(self, key: Key) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._keys.pop(id(known[1]), None)
            self.n_bytes -= known[2]


def _part_bytes(part: object) -> int:
    if isinstance(part, tuple):
        return sum(map(_part_bytes, cast("tuple[object, ...]", part)))
    return _BYTES_OF_A_PART + (len(part) if isinstance(part, str) else 0)


def _held_bytes(kept: Iterable[object], request: LensRequest | None) -> int:
    """Bytes of tensors and functions that a key and its request hold."""
    holders: dict[int, int] = {}
    for item in (*kept, request):
        edits: Sequence[EditBase] = getattr(item, "edits", ())
        hooks: Sequence[Hook] = getattr(item, "hooks", ())
        for edit in (item, *edits):
            if isinstance(edit, EditBase):
                holders |= {id(tensor): tensor.nbytes for tensor in edit.all_tensors}
        for hook in (item, *hooks):
            if isinstance(hook, Hook):
                holders[id(hook.fn)] = len(hook.fn.data)
    return sum(holders.values())


def fingerprint(
    extra_args: Mapping[str, Any], shared: type[Any]
) -> tuple[Key | None, list[object]]:
    """Names the content of plain requests exactly; None where it is large, deep, or arrays.

    With it come the objects that are named by their identity: whoever keeps the name has to
    keep them, so that no other object can get it.
    """
    parts: list[object] = []
    kept: list[object] = []
    kinds = (EditBase, Hook, shared)
    return (
        (tuple(parts), kept) if _describe(dict(extra_args), parts, kept, kinds, 0) else (None, [])
    )


def _describe(
    value: object,
    parts: list[object],
    kept: list[object],
    frozen: tuple[type[Any], ...],
    depth: int,
) -> bool:
    """Append the content of a value; False where it cannot be named in a few words."""
    kind = type(value)
    if len(parts) > _MOST_PARTS or depth > _MOST_DEPTH:
        return False
    if kind is str:
        parts += kind, value
        return len(cast("str", value)) <= _MOST_TEXT
    if kind in _PLAIN:
        parts += kind, value
        return True
    if kind is float:
        parts += kind, repr(value)  # 0.0 is -0.0 to Python
        return True
    if kind in (list, tuple):
        items = cast("Sequence[object]", value)
        kinds = tuple(map(type, items))
        if _PLAIN.issuperset(kinds):
            parts += kind, kinds, tuple(items)
            return (
                len(items) <= _MOST_PARTS
                and sum(len(item) for item in items if isinstance(item, str)) <= _MOST_TEXT
            )
        parts += kind, len(items)
        return all(_describe(item, parts, kept, frozen, depth + 1) for item in items)
    if kind is dict:
        pairs = cast("dict[object, object]", value)
        parts += kind, len(pairs)
        return all(
            _describe(key, parts, kept, frozen, depth + 1)
            and _describe(item, parts, kept, frozen, depth + 1)
            for key, item in pairs.items()
        )
    if isinstance(value, frozen):
        parts += kind, id(value)  # they never change
        kept.append(value)
        return True
    return False
