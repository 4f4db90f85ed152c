"""What every probe has, whatever it computes: facts of its card, a hash, a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe.card._card import ProbeCard, Threshold
from inspect_lens.probe.card._files import write_probe_files
from inspect_lens.probe.pooling._pool import pool_scores
from inspect_lens.spec import EngineProbe, Positions, Site


def frozen(name: str, given: ArrayLike) -> NDArray[np.float32]:
    """A tensor of a probe as float32 that nobody writes to; SpecError where it is not finite."""
    array = np.array(given, dtype=np.float32)
    if not np.isfinite(array).all():
        raise SpecError(
            f"{name}: holds NaN or infinity; allowed are finite numbers; check the data that the "
            "probe was fitted on, and the learning rate"
        )
    array.setflags(write=False)
    return array


def require_finite(scores: NDArray[np.float64]) -> None:
    """Refuse scores (tokens, ...) of activations that hold NaN or infinity."""
    if not np.isfinite(scores).all():
        wrong = ~np.isfinite(scores.reshape(len(scores), -1)).all(axis=1)
        raise SpecError(
            f"acts: {int(wrong.sum())} of {wrong.size} tokens hold NaN or infinity; allowed are "
            "finite numbers; rows that were not captured must be left out, not filled"
        )


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
        """Score every token; larger means more of the concept.

        Args:
            acts: (layers, tokens, hidden), or (tokens, hidden) for one layer; the raw residual
                stream, unscaled.
            layers: layer of each row of the first axis (one layer for two axes); by default
                the layers of the probe, in order. More layers than the probe reads are fine.

        Returns:
            (tokens,) float64.

        Raises:
            SpecError: wrong number of axes, wrong width, a layer is missing, or NaN.
        """
        raise NotImplementedError

    def score(
        self,
        acts: ArrayLike,
        layers: Sequence[int] | None = None,
        *,
        pool: str | None = None,
        ends: ArrayLike | None = None,
    ) -> float:
        """Score a sample: its tokens, then the pool.

        Args:
            acts: as in `score_tokens`, already cut to the positions to read.
            layers: as in `score_tokens`.
            pool: another pool than the probe's own; its thresholds do not hold for that.
            ends: (tokens,) bool, sentence ends, for the pool `sentence_mean_max`; see
                `sentence_ends`.

        Returns:
            One number.

        Raises:
            SpecError: as `score_tokens`, there is no token, or no sentence ends where they are
                needed.
        """
        return pool_scores(self.score_tokens(acts, layers), pool or self.pool, ends=ends)

    def at(self, layer: int) -> Self:
        """The probe of one of its layers; what was set for several layers is dropped.

        Args:
            layer: one of `layers`.

        Returns:
            A one-layer probe.

        Raises:
            ArtifactError: the probe does not read that layer.
        """
        if layer not in self.layers:
            raise ArtifactError(
                f"layer={layer}: probe {self.name!r} has directions at {list(self.layers)} only; "
                "they mean nothing elsewhere; choose one of these, or train a probe at that "
                "layer"
            )
        return self

    def for_engine(self) -> EngineProbe:
        """The same probe as the engine runs it, its scaler folded into the weights.

        Returns:
            An `EngineProbe` with the card's site and layers, whose aggregated score is that of this
            probe, and the card's threshold for an alarm on its pool, where it has one
            (`inspect-lens probe calibrate --for alarm`); without it a request's alarm has to bring
            a number.

        Raises:
            UnsupportedError: the engine has no form for it: a gate, more than one ReLU layer,
                attention behind a ReLU layer or with a slope over positions, or the pools
                `rolling_attention` and, with several heads, `multimax`.
        """
        raise NotImplementedError

    def engine_forms(self) -> tuple[EngineProbe, EngineProbe | None]:
        """The engine's forms of the score of each token, and of the text up to each.

        Returns:
            One whose token scores are those of `score_tokens`, and for the pool `attention`
            another, whose score at a token is that of the text up to it; else None.

        Raises:
            UnsupportedError: the engine has no form for the tokens, or none for the pool.
        """
        return self.for_engine(), None

    def _picked(
        self, acts: ArrayLike, layers: Sequence[int] | None
    ) -> tuple[NDArray[Any], list[int]]:
        """Activations (layers, tokens, hidden), and the place of each layer of the probe there."""
        array = np.asarray(acts)
        if array.ndim == 2:
            array = array[None]
        if array.ndim != 3 or array.shape[2] != self.hidden:
            raise SpecError(
                f"acts: shape {np.shape(acts)}; probe {self.name!r} allows (layers, tokens, "
                f"{self.hidden}) or (tokens, {self.hidden}); use activations of "
                f"{self.card.model.name if self.card.model else 'the model it was trained on'}"
            )
        n = len(array)
        if layers is None and n == len(self.layers):
            return array, list(range(n))
        if layers is None or len(layers) != n:
            raise SpecError(
                f"layers={None if layers is None else list(layers)}: the activations have {n} "
                f"layers and probe {self.name!r} reads {list(self.layers)}; allowed is one layer "
                "number per row; pass layers="
            )
        missing = [layer for layer in self.layers if layer not in layers]
        if missing:
            raise SpecError(
                f"layers={list(layers)}: layer {missing[0]} is missing; probe {self.name!r} reads "
                f"{list(self.layers)}; capture these layers"
            )
        return array, [list(layers).index(layer) for layer in self.layers]

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
