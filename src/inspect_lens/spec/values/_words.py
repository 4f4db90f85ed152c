"""The words of a body that are ours, and what is to be said where they are not read."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import lru_cache

from inspect_lens.errors import SpecError

from ._strict import shown

__all__ = [
    "ENVELOPE_KEY",
    "LENS_KEYS",
    "NATIVE_KEY",
    "OWN_WORDS",
    "PLACES",
    "refuse_misspelled",
    "refuse_own_word",
]

NATIVE_KEY = "inspect_lens"
"""Key of `extra_args` that takes a whole `LensRequest`."""
ENVELOPE_KEY = "_inspect_lens"
"""Where the front-end puts what the worker reads; users may not set it."""
LENS_KEYS = (
    NATIVE_KEY,
    "output_residual_stream",
    "apply_steering_vectors",
    "skip_reading_prefix_cache",
    "activations_transport",
    "apply_hooks",
    "output_qk",
)
"""Keys of a request that belong to the lens."""
PLACES = ("vllm_xargs", "extra_args")
"""Fields of a request body that may hold lens keys, beside its top level."""
VLLM_KEYS = ("kv_transfer_params", "ec_transfer_params")

_FIELDS = (
    "capture", "edits", "edits_named", "probes", "hooks", "qk", "lens", "sink",
)  # fmt: skip
OWN_WORDS = {name: f'put it into {{"{NATIVE_KEY}": {{"{name}": ...}}}}' for name in _FIELDS} | {
    "steer": "it is an argument of clients; the key is 'apply_steering_vectors'",
    "steer_named": "the names of vectors stand in 'edits_named', as those of other edits do",
    "capture_layers": "it is an argument of clients; the key is 'output_residual_stream'",
    "steering_vectors": "it is an argument of clients; the key is 'apply_steering_vectors'",
    "capture_qk": "it is an argument of clients; the key is 'output_qk'",
    "extra_body": "it is an argument of clients, which send its content at the top of the body",
}
"""Words that are no keys of a request, and what to use instead."""

_LONGEST = 64


def refuse_own_word(key: object, where: str) -> None:
    """Raise an error for a lens key in a place where it has no effect."""
    if key == ENVELOPE_KEY:
        raise SpecError(f"{where}: {ENVELOPE_KEY!r} is reserved for the engine")
    if isinstance(key, str) and key in OWN_WORDS:
        raise SpecError(f"{where}.{key}: nobody reads it there; {OWN_WORDS[key]}")


def refuse_misspelled(
    key: str, where: str, *, known: Sequence[str] = (*LENS_KEYS, *PLACES), cutoff: float = 0.8
) -> None:
    """Raise an error for a key that looks like a misspelled lens key."""
    if not isinstance(key, str) or len(key) > _LONGEST:
        return
    near = _nearest(key, tuple(known), cutoff)
    if near is not None:
        raise SpecError(f"{where}: unknown key {shown(key)}; did you mean {near!r}?")


@lru_cache(maxsize=1024)  # of short keys: clients send the same ones again and again
def _nearest(key: str, known: tuple[str, ...], cutoff: float) -> str | None:
    """The most similar of some keys; most are told apart by length and letters alone."""
    text = key.encode(errors="replace")
    alike = [
        word
        for word, letters, enough in _of_length(len(key), known, cutoff)
        if len(text) - len(text.translate(None, letters)) >= enough and _shared(key, word) >= enough
    ]
    near = difflib.get_close_matches(key, alike, n=1, cutoff=cutoff) if alike else []
    return near[0] if near else None


@lru_cache(maxsize=256)
def _of_length(n: int, known: tuple[str, ...], cutoff: float) -> list[tuple[str, bytes, float]]:
    """Keys that one of `n` letters may be meant for, their letters, and how many it has to have.

    Of as many is made what difflib calls the ratio: twice the shared ones by all.
    """
    found = [(word, word.encode(), cutoff * (n + len(word)) / 2) for word in known]
    return [item for item in found if min(n, len(item[0])) >= item[2]]


def _shared(key: str, word: str) -> int:
    """Letters that both have, each as often as the one that has it less often."""
    return sum(min(key.count(letter), word.count(letter)) for letter in set(word))
