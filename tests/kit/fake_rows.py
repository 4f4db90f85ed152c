"""Tokens and rows of the fake server's model: formulas, so that a test knows every number."""

from __future__ import annotations

import zlib

import numpy as np

from inspect_lens.spec import SITES, Site, TensorData

__all__ = ["at_site", "residual", "tokens_of"]


def tokens_of(text: str) -> list[int]:
    """One token per word, the same in every process."""
    return [zlib.crc32(word.encode()) % 1000 for word in text.split()]


def at_site(tensor: TensorData, site: Site) -> TensorData:
    """What the fake model has at another site: the stream, turned along its last axis."""
    turns = SITES[::-1].index(site)
    return TensorData(np.roll(tensor.storage, turns, axis=-1), tensor.dtype)


def residual(
    tokens: list[int], layers: tuple[int, ...], positions: list[int], hidden: int = 8
) -> TensorData:
    """What the server captures: (layers, positions, hidden) bfloat16.

    A row is `token + layer / 8` in every component but the first, which holds the position.
    """
    rows = np.zeros((len(layers), len(positions), hidden), dtype=np.float32)
    for i, layer in enumerate(layers):
        for j, position in enumerate(positions):
            rows[i, j] = tokens[position] % 16 + layer / 8
            rows[i, j, 0] = position
    # Every value above is exact in bfloat16, so cutting the low half loses nothing.
    return TensorData((rows.view(np.uint32) >> 16).astype(np.uint16), "bfloat16")
