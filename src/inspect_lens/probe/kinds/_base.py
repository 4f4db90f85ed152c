"""What every probe has, whatever it computes: facts of its card, a hash, a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens.probe.card._card import ProbeCard, Threshold
from inspect_lens.probe.card._files import write_probe_files
from inspect_lens.spec import Positions, Site


class CardProbe:
    """Base of `Probe` and `NeuralProbe`, which hold a card and tensors."""

    card: ProbeCard
    path: Path | None

    @property
    def name(self) -> str:
        """`<model>/<name>`."""
        return self.card.name

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that the probe reads, ascending."""
        return self.card.layers

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.card.hidden

    @property
    def site(self) -> Site:
        """Place in the block."""
        return self.card.site

    @property
    def positions(self) -> Positions:
        """Tokens that the probe reads."""
        return self.card.positions

    @property
    def pool(self) -> str:
        """How tokens become one score, such as `mean` or `attention`."""
        return self.card.pool

    @property
    def threshold(self) -> Threshold | None:
        """The first stored threshold for the probe's score of a whole answer."""
        return next(iter(self.card.thresholds_for(self.card.answer)), None)

    def running_scores(
        self, acts: ArrayLike, layers: Sequence[int] | None = None, *, pool: str | None = None
    ) -> NDArray[np.float64]:
        """What `Statistic.of` makes its number of, for the pool of the statistic.

        It is the score of each token, and for a pool that a probe has learned, such as attention,
        the score of the text up to each token.

        Args:
            acts: (layers, tokens, hidden) float, as `score_tokens` takes them.
            layers: of the first axis; the probe's own by default.
            pool: of the statistic; the probe's own by default.

        Returns:
            (tokens,) float64.
        """
        return self.score_tokens(acts, layers)

    def score_tokens(
        self, acts: ArrayLike, layers: Sequence[int] | None = None
    ) -> NDArray[np.float64]:
        """Score of every token (tokens,); see the class."""
        raise NotImplementedError

    @cached_property
    def sha256(self) -> str:
        """Hash of `probe.safetensors`: weights, scaler and all that decides a score."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """Content of `probe.safetensors`; equal probes give equal bytes."""
        raise NotImplementedError

    def save(self, folder: str | Path) -> Path:
        """Write `probe.safetensors`, `card.json` and `card.md`, each whole or not at all.

        Args:
            folder: made when missing; `probes/<model>/<name>` by custom.

        Returns:
            The folder.
        """
        return write_probe_files(Path(folder), self.to_bytes(), self.card)

    def _repr_params_(self) -> str | dict[str, str]:
        """What Inspect logs for this object: a path that it can load again, else its identity."""
        if self.path is not None:
            return str(self.path)
        return {"name": self.name, "sha256": self.sha256}
