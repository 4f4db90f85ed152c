"""A transformer of a few numbers, as patching sees an engine; what it should find is arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from inspect_lens.patch import Prompt
from inspect_lens.patch._runs import Rows, Run
from inspect_lens.spec import Replace, Site

__all__ = ["ToyRuns"]

WORDS = (
    "<s>", "The", " river", " town", " Tal", " Talk", "mo", " Vel", "osh", " is", " in", " Verun",
    " Sar",
)  # fmt: skip


class ToyRuns:
    """Adds the mean of all tokens up to each, squashed; the last row times a matrix is the logits.

    Args:
        layers: of the model.
        width: of its stream.
    """

    def __init__(self, layers: int = 3, width: int = 6) -> None:
        rng = np.random.default_rng(0)
        self.layers = layers
        self.embedding = rng.standard_normal((len(WORDS), width))
        self.mix = rng.standard_normal((layers, width, width))
        self.unembed = rng.standard_normal((width, len(WORDS)))
        self.asked: list[Run] = []

    def tokens(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return [int(i) for i in prompt]  # type: ignore[arg-type]
        rest, found = prompt, [0]
        while rest:
            word = max((w for w in WORDS if rest.startswith(w)), key=len)
            found.append(WORDS.index(word))
            rest = rest.removeprefix(word)
        return found

    def texts(self, ids: Sequence[int]) -> list[str]:
        return [WORDS[i] for i in ids]

    def capture(self, ids: Sequence[int], layers: Sequence[int] | None, site: Site) -> Rows:
        rows = self.run(Run(ids))
        if site == "resid_pre":
            rows = np.concatenate([self.embedding[None, list(ids)], rows[:-1]])
        at = tuple(range(self.layers)) if layers is None else tuple(layers)
        return Rows(at, rows[list(at)].astype(np.float32))

    def logprobs(
        self, runs: Sequence[Run], tokens: Sequence[int], in_flight: int
    ) -> Iterator[tuple[int, tuple[float, ...]]]:
        self.asked += runs
        # As a server answers: in another order.
        for i in reversed(range(len(runs))):
            found = self.logits(runs[i])
            found = found - np.log(np.exp(found).sum())
            yield i, tuple(float(found[token]) for token in tokens)

    def logits(self, run: Run) -> NDArray[np.float64]:
        """Logits behind the last token, (words,)."""
        made: NDArray[np.float64] = self.run(run)[-1, -1] @ self.unembed
        return made

    def run(self, run: Run) -> NDArray[np.float64]:
        """(layers, tokens, width) after each block, with the run's edits."""
        h = _edited(self.embedding[list(run.ids)], run, "resid_pre", 0)
        rows = []
        for layer in range(self.layers):
            seen = np.cumsum(h, axis=0) / np.arange(1, len(h) + 1)[:, None]
            h = _edited(h + np.tanh(seen @ self.mix[layer]), run, "resid_post", layer)
            rows.append(h)
        return np.stack(rows)


def _edited(h: NDArray[np.float64], run: Run, site: Site, layer: int) -> NDArray[np.float64]:
    made = h.copy()
    for edit in run.edits:
        assert isinstance(edit, Replace)
        if edit.site == site and layer in edit.layers:
            rows = edit.rows.to_float32()[edit.layers.index(layer)]
            at = [int(p) for p in edit.positions]
            made[at] = (1 - edit.alpha) * made[at] + edit.alpha * rows
    return made
