"""How many entries the lists of a request may have: one table, looked at before anything is parsed.

A small edit costs 50 microseconds to read, so a hundred thousand of them hold a server for seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from inspect_lens.errors import SpecError

__all__ = ["check_counts", "check_size"]

MOST_OF: Final[dict[str, int]] = {
    # What is asked.
    "apply_steering_vectors": 256, "edits": 256, "edits_named": 256, "probes": 1024, "hooks": 256,
    "apply_hooks": 256,
    # Where: no model has so many layers, and no request so many tokens.
    "layers": 1024, "layer_indices": 1024, "output_residual_stream": 1024, "output_qk": 1024,
    "site": 64, "sites": 64, "positions": 1 << 19, "threshold_positions": 1 << 19,
    "position_indices": 1 << 19,
    "heads": 1024, "neurons": 1 << 16, "experts": 1024,
    # Which tokens.
    "token_ids": 4096, "tokens": 1024,
    # Prompts of a sweep, in token ids or messages.
    "clean": 1 << 19, "corrupted": 1 << 19,
    # By name.
    "tensors": 16, "columns": 256, "shape": 8, "prefetch_params": 4096, "params": 4096,
}  # fmt: skip
"""Entries of a list or mapping, by the name of its field."""

TENSORS: Final = {
    "activations", "direction", "weight", "bias", "w1", "b1", "w2", "b2", "query", "matrix",
}  # fmt: skip
"""Fields that may be lists of numbers: an engine knows how many it has a use for. Edits add theirs.
"""

MOST_ENTRIES: Final = 1 << 19
"""Of all lists and mappings of a body together, tensors as lists included: more take Python half a
second to parse, in which nobody else is served."""
_MOST_OTHERS: Final = 1024
"""Of a list or mapping whose name nobody knows."""
_MOST_DEPTH: Final = 32


def check_size(body: bytes) -> None:
    """Refuse JSON that would hold the interpreter while it is parsed."""
    # Commas of texts count too; a prompt that has a million is none.
    if len(body) > MOST_ENTRIES and (n := body.count(b",")) > MOST_ENTRIES:
        raise SpecError(
            f"the body has {n} entries, and {MOST_ENTRIES} is the most; send tensors in their JSON "
            "form (encode_tensor), not as lists of numbers, and prompts in several requests"
        )


def check_counts(value: object, *, field: str = "") -> None:
    """Refuse lists with more entries than anybody can use, before one of them is read."""
    total = 0
    waiting: list[tuple[str, str, object, int]] = [(field, field.rpartition(".")[2], value, 0)]
    while waiting:
        path, name, item, depth = waiting.pop()
        # Other containers are Python objects of a user's own.
        if not isinstance(item, list | tuple | dict):
            continue
        if name in TENSORS and not isinstance(item, dict):
            continue
        total += len(item)
        most = MOST_OF.get(name, _MOST_OTHERS)
        if len(item) > most:
            raise SpecError(f"{path or 'inspect_lens'}: has {len(item)} entries; {most} at most")
        if total > MOST_ENTRIES:
            raise SpecError(
                f"{field or 'inspect_lens'}: has more than {MOST_ENTRIES} entries in all its lists"
            )
        if depth >= _MOST_DEPTH:
            raise SpecError(f"{path[:200]}: is nested more than {_MOST_DEPTH} deep")
        if isinstance(item, dict):
            pairs = cast("Mapping[Any, object]", item).items()
            waiting += [
                (f"{path}.{key}" if path else str(key)[:80], str(key)[:80], inner, depth + 1)
                for key, inner in pairs
                if isinstance(inner, list | tuple | dict)
            ]
        elif not set(map(type, item)) <= {int, bool, float, str}:
            waiting += [
                (f"{path}[{i}]", name if isinstance(inner, list | tuple) else "", inner, depth + 1)
                for i, inner in enumerate(item)
                if isinstance(inner, list | tuple | dict) and inner
            ]
