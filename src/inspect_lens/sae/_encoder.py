"""`SparseEncoder` and `SparseAutoencoder`: latents of rows, and edits of latents, in numpy."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens._base.arguments import judged_arguments, judged_value
from inspect_lens.errors import SpecError
from inspect_lens.spec import (
    RESID_POST,
    WEIGHTS,
    AutoencoderKind,
    Cache,
    EngineAutoencoder,
    Gate,
    LatentMode,
    Latents,
    Positions,
    Reconstruct,
    Site,
    Splice,
    SpliceMode,
    as_array,
    as_indices,
    as_tensor_data,
    several,
    shown,
)

__all__ = ["MatchedLatents", "SparseAutoencoder", "SparseEncoder", "matched_latents"]

Floats = NDArray[np.float32]
_NUMBERS: Final = 1 << 24
"""Activations that are computed at once."""
_TRANSFORMER_LENS: Final = re.compile(r"blocks\.(\d+)\.([\w.]+)")
_MODULE: Final = re.compile(r"(?:\w+\.)*(?:layers|h)\.(\d+)\.?([\w.]*)")
_SITES: Final[dict[str, Site]] = {
    "hook_resid_pre": "resid_pre", "hook_resid_mid": "resid_mid", "hook_resid_post": RESID_POST,
    "attn.hook_z": "z", "hook_attn_out": "attn_out", "hook_mlp_out": "mlp_out",
    "mlp.hook_post": "mlp_hidden",
}  # fmt: skip
"""By the name of a hook point of TransformerLens."""
_MODULES: Final[dict[str, Site]] = {
    "input": "resid_pre", "": RESID_POST, "output": RESID_POST,
    "self_attn": "attn_out", "self_attn.output": "attn_out", "self_attn.o_proj.input": "z",
    "mlp": "mlp_out", "mlp.output": "mlp_out", "mlp.down_proj.input": "mlp_hidden",
}  # fmt: skip
"""By the name of a module of transformers, whose output is read where no other end is named."""


BY_CONTENT_NAME: Final[Cache[str, EngineAutoencoder]] = Cache(1 << 20, WEIGHTS)
"""What edits of this process name by content, for whoever registers it with a server."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SparseEncoder:
    """Encoder of a sparse autoencoder: computes its features from activations.

    A feature is `relu(weight · x + bias)`; 0 where that is not above its `threshold` (JumpReLU),
    or where it is not among the `top_k` largest of its token (TopK).

    Source:
        JumpReLU: arXiv:2407.14435; TopK: arXiv:2406.04093.

    Example:
        ```python
        import numpy as np

        from inspect_lens.sae import SparseEncoder

        encoder = SparseEncoder(
            weight=np.eye(3, dtype=np.float32),
            bias=np.zeros(3, dtype=np.float32),
            threshold=np.full(3, 0.5, dtype=np.float32),
            hook="blocks.9.hook_resid_post",
        )
        assert encoder.place == (9, "resid_post")
        assert encoder.activations([[2.0, 0.25, -1.0]]).tolist() == [[2.0, 0.0, 0.0]]
        ```
    """

    weight: Floats
    """(features, hidden)."""
    bias: Floats
    """(features,), with what is subtracted from the input folded in."""
    threshold: Floats | None = None
    """(features,) of a JumpReLU."""
    top_k: int = 0
    """Features that a token keeps; 0 keeps all that are positive. Of features that tie for the last
    places those with lower numbers are kept, here and in an engine."""
    hook: str = ""
    """Where it reads, as its file says; `place` translates it."""

    @property
    def hidden(self) -> int:
        """Width of the rows that it reads."""
        return int(self.weight.shape[1])

    @property
    def place(self) -> tuple[int, Site] | None:
        """Our layer and site, where the file names a place that is served.

        `blocks.9.hook_resid_post` and `model.layers.9.output` are our layer 9, and
        `blocks.9.hook_resid_pre` is the same stream as the output of layer 8. Attention and
        feed-forward outputs, heads (`hook_z`) and neurons are sites of their own.
        """
        named = self._named
        if named is not None and named[1] == "resid_pre" and named[0]:
            return named[0] - 1, RESID_POST
        return named

    @property
    def _named(self) -> tuple[int, Site] | None:
        for pattern, sites in ((_TRANSFORMER_LENS, _SITES), (_MODULE, _MODULES)):
            found = pattern.fullmatch(self.hook)
            if found is not None and (site := sites.get(found[2])) is not None:
                return int(found[1]), site
        return None

    def settle(self, layer: int | None = None, site: Site | None = None) -> tuple[int, Site]:
        """Find the layer and the site at which to use the encoder.

        Args:
            layer: as a user gave it; None takes that of the file.
            site: likewise, and over the file; the stream behind the block where the file names
                no place.

        Raises:
            SpecError: no layer is known, the file names another one, or a place that is not
                served.
        """
        known = self.place
        if self.hook and known is None and site is None:
            raise SpecError(
                f"site: this sparse autoencoder reads {self.hook!r}, which is not served; allowed "
                f"are {', '.join([*_SITES, *filter(None, _MODULES)])}; choose one of these, or "
                "pass site= and layer= where the rows are the same"
            )
        if layer is None and known is None:
            raise SpecError(
                f"layer: the file of this sparse autoencoder names {self.hook or 'no place'!r}; "
                "allowed is a 0-based layer number, whose output it reads; pass layer="
            )
        if site is not None or known is None:
            return known[0] if layer is None and known else layer or 0, site or RESID_POST
        if (
            layer is not None
            and self._named is not None
            and layer not in (known[0], self._named[0])
        ):
            raise SpecError(
                f"layer={layer}: this sparse autoencoder reads {self.hook!r}; leave layer= out, or "
                "pass site=, too, to use it elsewhere"
            )
        return known

    @cached_property
    def sha256(self) -> str:
        """Hash of all that decides an activation."""
        digest = hashlib.sha256(f"{self.weight.shape}:{self.top_k}:".encode())
        for part in (self.weight, self.bias, self.threshold):
            digest.update(b"" if part is None else np.ascontiguousarray(part, np.float32).data)
        return digest.hexdigest()

    def activations(
        self,
        rows: ArrayLike,
        latents: Sequence[int] | NDArray[np.integer[Any]] | None = None,
        *,
        smallest: NDArray[np.float64] | None = None,
    ) -> NDArray[np.float64]:
        """Activations of latents on rows.

        Args:
            rows: (rows, hidden) float.
            latents: numbers of the features, from 0 on, or a mask of all; all by default.
            smallest: what `top_k_limit(rows)` gave for the same rows, to save that work for further
                latents.

        Returns:
            (rows, latents) float64, 0 where a latent is not active.

        Raises:
            SpecError: another width, no such latent, or NaN or infinity in a row.
        """
        x = self._rows(rows)
        chosen = np.arange(len(self.weight)) if latents is None else self._latents(latents)
        last = self.top_k_limit(x) if smallest is None else smallest
        weight, bias = (part[chosen].astype(np.float64) for part in (self.weight, self.bias))
        inner = x.astype(np.float64) @ weight.T + bias
        least = 0.0 if self.threshold is None else np.maximum(self.threshold[chosen], 0.0)
        counts = inner > least
        if last is not None:
            limit, number = last.T[:, :, None]
            counts &= (inner > limit) | ((inner == limit) & (chosen <= number))
        return np.where(counts, inner, 0.0)

    def top_k_limit(self, rows: ArrayLike) -> NDArray[np.float64] | None:
        """What a feature must exceed to be among the largest of its row.

        Args:
            rows: (rows, hidden) float.

        Returns:
            (rows, 2) float64: a value, and the last feature that counts of those that have just
            this value; None where `top_k` leaves nothing out.

        Raises:
            SpecError: another width, or NaN or infinity in a row.
        """
        x, n = self._rows(rows), len(self.weight)
        if not self.top_k or self.top_k >= n:
            return None
        limits, some = [], max(1, _NUMBERS // max(1, x.shape[1]))
        step = max(1, _NUMBERS // n)
        for first in range(0, len(x), step):
            part = x[first : first + step].astype(np.float64)
            # Some features at a time: all weights as float64 are twice the file.
            inner = np.hstack([
                part @ self.weight[at : at + some].astype(np.float64).T for at in range(0, n, some)
            ]) + self.bias  # fmt: skip
            last, next_ = n - self.top_k, n - self.top_k - 1
            parts = np.partition(inner, (next_, last), axis=1)
            # Between the last that counts and the next: sums of other sizes round otherwise.
            limit = (parts[:, [last]] + parts[:, [next_]]) / 2.0
            left = self.top_k - np.sum(inner > limit, axis=1, keepdims=True)
            ties = np.cumsum(inner == limit, axis=1)
            number = np.where(left > 0, np.argmax(ties == left, axis=1, keepdims=True), -1)
            limits.append(np.hstack([limit, number]))
        return np.concatenate(limits) if limits else np.zeros((0, 2))

    def _rows(self, rows: ArrayLike) -> NDArray[np.floating[Any]]:
        x = as_array(rows)
        if x.ndim != 2 or x.shape[1] != self.hidden:
            raise SpecError(
                f"rows: shape {x.shape}; allowed is (rows, {self.hidden}); take activations of the "
                "model, layer and site that the sparse autoencoder was trained on"
            )
        if not np.isfinite(x).all():
            raise SpecError("rows: hold NaN or infinity; allowed are finite numbers")
        return x

    def _latents(self, latents: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        return as_indices("latents", latents, len(self.weight))

    def _repr_params_(self) -> dict[str, Any]:
        """What Inspect logs for this object: its identity, and no tensor."""
        return {"hook": self.hook, "shape": list(self.weight.shape), "sha256": self.sha256}


@dataclass(frozen=True, eq=False, kw_only=True)
class SparseAutoencoder(SparseEncoder):
    """A sparse autoencoder with its decoder, so that its latents can be edited."""

    decoder: Floats
    """(features, hidden)."""
    decoder_bias: Floats
    """(hidden,)."""

    def reconstruct(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Reconstruct rows from their latents.

        Args:
            rows: (rows, hidden) float.

        Returns:
            (rows, hidden) float64; the rows less this are what it does not explain.

        Raises:
            SpecError: as for `activations`.
        """
        x, made = self._rows(rows), []
        decoder = self.decoder.astype(np.float64)
        step = max(1, _NUMBERS // len(self.weight))
        for first in range(0, max(len(x), 1), step):
            made.append(self.activations(x[first : first + step]) @ decoder + self.decoder_bias)
        return np.concatenate(made)

    @judged_arguments
    def latents(
        self,
        values: Mapping[int, float],
        *,
        mode: LatentMode = "set",
        only_if_active: bool = False,
        layers: Sequence[int] | None = None,
        site: Site | None = None,
        positions: Positions = "all",
        threshold: float | None = None,
    ) -> Latents:
        """The edit that sets, raises or increases up to 63 latents, all read from one stream.

        Args:
            values: by number of the feature: the activation afterwards, its minimum, or what is
                added to it.
            mode: `set`, `add`, or `at_least` for a minimum.
            only_if_active: leave each latent alone where it is not active.
            layers: at which it acts; by default the layer of the file.
            site: where in these layers; by default that of the file.
            positions: tokens that it acts on.
            threshold: above which all of them are active; by default those of the file. A TopK
                autoencoder has none: give the smallest activation that its latents have on your
                data.

        Raises:
            SpecError: no such latent, no layer is known, or a TopK without threshold.
        """
        changed = _by_number("values", values)
        where = self._chosen(list(changed), layers, site, threshold)
        return Latents(
            value=np.asarray(list(changed.values()), dtype=np.float32), mode=mode,
            only_if_active=only_if_active, positions=positions, **where,
        )  # fmt: skip

    @judged_arguments
    def reconstruction(
        self,
        latents: Sequence[int],
        *,
        strength: float = 1.0,
        layers: Sequence[int] | None = None,
        site: Site | None = None,
        positions: Positions = "all",
        threshold: float | None = None,
    ) -> Reconstruct:
        """The edit that puts what up to 63 latents make of the stream in its place.

        Args:
            latents: numbers of the features that are kept.
            strength: share of the stream that is replaced.
            layers: see `latents`; so are the others.
            site: where in these layers.
            positions: tokens that it acts on.
            threshold: above which all of them are active.

        Raises:
            SpecError: as for `latents`.
        """
        where = self._chosen(latents, layers, site, threshold)
        return Reconstruct(
            decoder_bias=self.decoder_bias, strength=strength, positions=positions, **where
        )

    @property
    def content_name(self) -> str:
        """Name made of all that it computes, under which Inspect's provider registers it."""
        form = self._form
        BY_CONTENT_NAME.keep(name := f"sae-{form.sha256[:24]}", form, form.nbytes)
        return name

    @cached_property
    def _form(self) -> EngineAutoencoder:
        return self.for_engine()

    def for_engine(self, dtype: Literal["float32", "float16"] = "float32") -> EngineAutoencoder:
        """The form that an engine registers, for `Splice`.

        Args:
            dtype: of encoder and decoder on the device, in which their products are computed.
                float16 takes half of the memory. Latents near their threshold may differ, and
                rows with a number above 65504 make their request fail.

        Raises:
            SpecError: it has thresholds and `top_k`, of which an engine computes one.
            ValueError: it holds NaN or infinity, in that dtype.
        """
        if self.top_k and self.threshold is not None:
            raise SpecError(
                f"top_k={self.top_k}: this sparse autoencoder has thresholds, too; an engine takes "
                "one of them; make one with threshold=None, or with top_k=0"
            )
        kind: AutoencoderKind = "topk" if self.top_k else "relu"
        arrays = {
            "encoder": self.weight.astype(dtype, copy=False),
            "decoder": self.decoder.astype(dtype, copy=False),
            "bias": self.bias,
            "decoder_bias": self.decoder_bias,
        }
        if self.threshold is not None:
            kind, arrays["threshold"] = "jumprelu", self.threshold
        return EngineAutoencoder(
            kind=kind,
            layers=() if self.place is None else (self.place[0],),
            top_k=self.top_k,
            tensors={name: as_tensor_data(array) for name, array in arrays.items()},
        )

    @judged_arguments
    def splice(
        self,
        name: str | None = None,
        latents: Mapping[int, float] | None = None,
        *,
        error_term: bool = False,
        mode: SpliceMode = "set",
        only_if_active: bool = False,
        layers: Sequence[int] | None = None,
        site: Site | None = None,
        positions: Positions = "all",
    ) -> Splice:
        """The edit that puts what all latents make of the stream in its place.

        Args:
            name: under which the engine has `for_engine()`. By default it is `content_name`, under
                which Inspect's provider registers it with the server when a call first needs it.
            latents: that are changed before they are decoded, and a number for each.
            error_term: add back what is not explained.
            mode: what becomes of the activation of a latent that is changed.
            only_if_active: leave each latent alone where it is not active.
            layers: see `latents`; so are the others.
            site: where in these layers.
            positions: tokens that it acts on.

        Raises:
            SpecError: no such latent, or no layer is known.
        """
        changed = {} if latents is None else _by_number("latents", latents)
        self._latents(list(changed))
        return Splice(
            sae=self.content_name if name is None else name, latents=changed,
            error_term=error_term, mode=mode,
            only_if_active=only_if_active, positions=positions, **self._place(layers, site),
        )  # fmt: skip

    @judged_arguments
    def gate(
        self,
        latent: int,
        *,
        threshold: float = 0.0,
        active_above: float | None = None,
        layer: int | None = None,
        site: Site | None = None,
        **options: Any,
    ) -> Gate:
        """The gate that a latent opens, for `when` of an edit.

        Args:
            latent: number of the feature.
            threshold: activation above which it opens.
            active_above: above which the latent is active; by default that of the file, as for
                `threshold` of `latents`.
            layer: at which it is read; by default the layer of the file.
            site: where in this layer; by default that of the file.
            **options: other fields of `Gate`, such as `scope` or `reads`.

        Raises:
            SpecError: as for `latents`.
        """
        (at,) = self._latents([latent])
        at_layer, at_site = self.settle(layer, site)
        return Gate(
            direction=self.weight[at],
            bias=float(self.bias[at]),
            threshold=float(threshold),
            active_above=self._threshold(int(at), active_above, "active_above"),
            layer=at_layer,
            site=at_site,
            **options,
        )

    def _chosen(
        self,
        latents: Sequence[int],
        layers: Sequence[int] | None,
        site: Site | None,
        threshold: float | None,
    ) -> dict[str, Any]:
        """Fields of an edit of several latents."""
        at = self._latents(latents)
        if not at.size:
            raise SpecError("latents: none; name at least one")
        return {
            "encoder": self.weight[at], "decoder": self.decoder[at], "bias": self.bias[at],
            "threshold": [self._threshold(int(one), threshold, "threshold") for one in at],
            **self._place(layers, site),
        }  # fmt: skip

    def _place(self, layers: Sequence[int] | None, site: Site | None) -> dict[str, Any]:
        """Layers and site of an edit; those of the file where nothing is said."""
        places = [self.settle(layer, site) for layer in several(layers)]
        if not places:
            raise SpecError(f"layers={layers!r}; name at least one, or leave it out")
        return {"layers": tuple(layer for layer, _ in places), "site": places[0][1]}

    def _threshold(self, latent: int, given: float | None, field: str) -> float:
        if given is not None:
            return given
        if self.top_k:
            raise SpecError(
                f"{field}: whether a latent is among the {self.top_k} largest depends on all "
                "others, which an engine does not compute; pass the smallest activation that "
                "latents have on your data"
            )
        return 0.0 if self.threshold is None else max(float(self.threshold[latent]), 0.0)


def _by_number(name: str, given: Any) -> dict[int, float]:
    if not isinstance(given, Mapping):
        raise SpecError(
            f"{name}={shown(given)}; allowed is a number for each latent, such as {{17: 10.0}}"
        )
    return {
        latent: judged_value(f"{name}[{latent}]", value, float) for latent, value in given.items()
    }


class MatchedLatents(NamedTuple):
    """Control latents of one latent."""

    latents: tuple[int, ...]
    """Their numbers."""
    means: tuple[float, ...]
    """Their mean activations on the rows."""
    mean: float
    """That of the latent itself."""


@judged_arguments
def matched_latents(
    encoder: SparseEncoder,
    rows: ArrayLike,
    latent: int,
    *,
    n: int = 3,
    pool: int = 512,
    seed: int = 0,
    exclude: Sequence[int] = (),
) -> MatchedLatents:
    """Choose random latents that are about as active on some rows as a given one.

    What an edit of a latent does to a behaviour is told from what any edit of that size does by
    the same edit of such controls. Some latents are drawn at random, and of these the ones are
    taken whose mean activation is nearest.

    Args:
        encoder: of the autoencoder.
        rows: (rows, hidden) float, at least one.
        latent: number of the latent that is meant.
        n: how many controls.
        pool: how many are drawn to choose from; more are nearer, and take longer.
        seed: of the draw.
        exclude: latents that are no controls, such as others that are edited too.

    Returns:
        The controls, the nearest first; equally near ones in the order of the draw.

    Raises:
        SpecError: no rows, another width, no such latent, or fewer others than `n`.

    Example:
        ```python
        import numpy as np

        from inspect_lens.sae import SparseEncoder, matched_latents

        eye, zeros = np.eye(4, dtype=np.float32), np.zeros(4, dtype=np.float32)
        encoder = SparseEncoder(weight=eye, bias=zeros)
        found = matched_latents(encoder, [[2.0, 0.0, 1.9, 7.0]], 0, n=1)
        assert found.latents == (2,)
        ```
    """
    x = as_array(rows)
    if x.ndim != 2 or not len(x):
        raise SpecError(f"rows: shape {x.shape}; allowed is (rows, hidden) with at least one row")
    others = np.setdiff1d(np.arange(len(encoder.weight)), [latent, *exclude])
    if not 1 <= n <= len(others):
        raise SpecError(
            f"n={n}; allowed are 1 to {len(others)}: as many latents are left of "
            f"{len(encoder.weight)}"
        )
    drawn = np.random.default_rng(seed).permutation(others)[: max(pool, n)]
    means = encoder.activations(x, [latent, *drawn.tolist()]).mean(axis=0)
    order = np.argsort(np.abs(means[1:] - means[0]), kind="stable")[:n]
    return MatchedLatents(
        tuple(int(drawn[i]) for i in order),
        tuple(float(means[1 + i]) for i in order),
        float(means[0]),
    )
