"""Reading a page of `inspect_lens.view` without a browser: its own layout, decoded once more."""

from __future__ import annotations

import base64
import gzip
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Block", "Page", "read_page"]


@dataclass(frozen=True)
class Block:
    """One sample of a page."""

    calls: list[dict[str, Any]]
    tokens: list[str]
    ids: list[int]
    scores: NDArray[np.float64]
    """(series, tokens), NaN where there is none."""
    read: NDArray[np.bool_]
    """(series, tokens), the tokens whose scores make the score of a call."""


@dataclass(frozen=True)
class Page:
    """A page."""

    html: str
    facts: dict[str, Any]
    blocks: list[Block]

    def step(self, series: int = 0) -> float:
        """Distance of two neighbouring levels."""
        found = self.facts["series"][series]
        return float((found["high"] - found["low"]) / (self.facts["levels"] - 1))


def read_page(path: Path) -> Page:
    """Decode a page, as its script does."""
    html = path.read_text(encoding="utf-8")
    facts = json.loads(_script(html, "page-facts"))
    lines = _script(html, "page-blocks").split("\n") if facts["samples"] else []
    return Page(html, facts, [_block(line, facts) for line in lines])


def _script(html: str, name: str) -> str:
    found = re.search(rf'<script id="{name}" type="[^"]+">(.*?)</script>', html, re.DOTALL)
    assert found is not None, name
    return found[1]


def _block(line: str, facts: dict[str, Any]) -> Block:
    data = gzip.decompress(base64.b64decode(line, validate=True))
    size, n = (int.from_bytes(data[i : i + 4], "little") for i in (0, 4))
    header = json.loads(data[8 : 8 + size])
    n_planes = 3 + 2 * len(facts["series"])
    planes = np.frombuffer(data[8 + size :], np.uint8).reshape(n_planes, n).astype(np.int64)
    index = planes[0] + 256 * planes[1] + 65536 * planes[2]
    scores = []
    for k, series in enumerate(facts["series"]):
        level = planes[3 + 2 * k] + 256 * planes[4 + 2 * k]
        step = (series["high"] - series["low"]) / (facts["levels"] - 1)
        scores.append(np.where(level == 0, np.nan, series["low"] + (level - 1) * step))
    read = np.zeros((len(scores), n), np.bool_)
    for row, runs in zip(read, header["read"], strict=True):
        for start, stop in runs:
            row[start:stop] = True
    table = facts["tokens"]
    return Block(
        header["calls"], [table["texts"][i] for i in index], [table["ids"][i] for i in index],
        np.array(scores), read,
    )  # fmt: skip
