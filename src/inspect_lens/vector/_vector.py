"""A steering vector: one direction per layer, its card, its controls and its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import model_validator

from inspect_lens._base.arguments import judged_arguments
from inspect_lens._base.artifact import (
    Artifact,
    ArtifactCard,
    ArtifactKind,
    check_given,
    decode_tensors,
    find_artifact,
    from_files,
    markdown_table,
    read_artifact,
)
from inspect_lens.errors import SpecError
from inspect_lens.probe import ModelRef, SeenSamples
from inspect_lens.spec import RESID_POST, Add, Site, Value, as_array, several

__all__ = ["Vector", "VectorCard", "VectorLike", "VectorTraining", "load_vector", "steering_vector"]


class VectorTraining(Value):
    """Facts about the samples that a steering vector was found on."""

    dataset: str
    sha256: str = ""
    """Hash of the activation set, labels and groups included; empty for bare arrays."""
    n_positive: int
    """Rows of the side that a positive scale moves to."""
    n_negative: int
    n_groups: int = 0
    on_policy: bool = True
    """Whether the model itself wrote the text that was read."""


class VectorCard(ArtifactCard):
    """Facts about a vector; saved as `card.json`, rendered as `card.md`."""

    HEADER = frozenset({"name", "layers", "layer", "hidden", "site", "model"})

    description: str = ""
    """What a positive scale does."""
    method: str = ""
    """How the direction was found, with its settings."""

    layer: int | None = None
    """The layer to steer at when nobody says; None where the vector has several and none was
    chosen."""
    site: Site = RESID_POST
    """Where in the block the rows were captured, and where the vector is added."""
    positions: str = ""
    """The tokens whose rows were compared, in words."""
    residual_norms: tuple[float, ...] = ()
    """Mean norm of those rows at each layer, the unit to judge a scale by: at the card's layer,
    a vector of this length doubles what it is added to."""

    model: ModelRef | None = None
    training: VectorTraining | None = None
    separation: tuple[float, ...] = ()
    """AUROC of the direction at each layer on samples that it was not found on."""
    seen: SeenSamples | None = None
    """The samples that it was found and its layer chosen on; None where nobody listed them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.layer is not None and self.layer not in self.layers:
            raise ValueError(f"layer {self.layer} is none of {self.layers}; choose one of these")
        for name in ("residual_norms", "separation"):
            values = getattr(self, name)
            if values and len(values) != len(self.layers):
                raise ValueError(
                    f"{name} has {len(values)} values for {len(self.layers)} layers; give one each"
                )
        return self


VECTOR: Final = ArtifactKind(
    name="vector",
    folder="vectors",
    tensors="vector.safetensors",
    format="inspect_lens.vector/1",
    writer="Vector.save",
    example="organism/truth",
)


_UNIT_TOLERANCE = 1e-4


@dataclass(frozen=True, eq=False, kw_only=True)
class Vector(Artifact):
    """A steering vector: a direction and a length for each layer, with a card.

    The length is the distance between the two classes along the direction, whatever method found
    it, so that `scale=1` goes once from one class to the other.

    Args:
        direction: (layers, hidden) float32; unit L2 norm per layer.
        norm: (layers,) float32, positive; length of the vector at each layer.
        card: layers, site, model and provenance.
        path: folder that it was loaded from.

    Raises:
        SpecError: shapes disagree with the card, a value is not finite, or a direction is not
            of unit norm.
    """

    KIND: ClassVar[ArtifactKind] = VECTOR

    direction: NDArray[np.float32]
    norm: NDArray[np.float32]
    card: VectorCard
    path: Path | None = field(default=None)

    def __post_init__(self) -> None:
        n = len(self.card.layers)
        self._freeze(direction=(n, self.card.hidden), norm=(n,))
        lengths = np.linalg.norm(self.direction.astype(np.float64), axis=1)
        if np.abs(lengths - 1.0).max() > _UNIT_TOLERANCE or not (self.norm > 0).all():
            raise SpecError(
                f"direction: norms {lengths.round(4).tolist()} and lengths {self.norm.tolist()}; "
                "allowed are unit directions with positive lengths; use Vector.from_raw"
            )

    @classmethod
    def from_raw(cls, raw: ArrayLike, *, card: VectorCard, norm: ArrayLike | None = None) -> Self:
        """A vector from unnormalised directions.

        Args:
            raw: (layers, hidden), or (hidden,) for one layer.
            card: its layers and width have to agree.
            norm: (layers,) length at scale 1; that of `raw` by default.

        Raises:
            SpecError: shapes disagree, or a direction is zero or not finite.
        """
        rows = np.atleast_2d(as_array(raw).astype(np.float64))
        lengths = np.linalg.norm(rows, axis=1)
        if not np.isfinite(lengths).all() or not (lengths > 0).all():
            raise SpecError(
                f"raw: norms {lengths.tolist()}; allowed are finite vectors that are not zero; "
                "the classes may not differ at one of the layers: leave it out"
            )
        given = lengths if norm is None else np.atleast_1d(np.asarray(norm, dtype=np.float64))
        return cls(
            direction=(rows / lengths[:, None]).astype(np.float32),
            norm=given.astype(np.float32),
            card=card,
        )

    @property
    def site(self) -> Site:
        """Where in the block it is added."""
        return self.card.site

    @property
    def label(self) -> str:
        """Name and hash, for logs: what tells this vector from every other."""
        return f"{self.name}@{self.sha256[:12]}"

    def default_layer(self) -> int:
        """The layer to steer at if you name none: that of the card, or the only one.

        Raises:
            SpecError: there are several, and the card chooses none.
        """
        if self.card.layer is not None:
            return self.card.layer
        if len(self.layers) == 1:
            return self.layers[0]
        raise SpecError(
            f"layer: vector {self.name!r} has layers {list(self.layers)} and its card recommends "
            "none; pass layer="
        )

    @judged_arguments
    def raw(self, layer: int) -> NDArray[np.float32]:
        """What `scale=1` adds at a layer, direction times length: (hidden,) float32.

        Args:
            layer: one of `layers`.

        Raises:
            SpecError: the vector has no direction there.
        """
        i = self._index(layer)
        scaled: NDArray[np.float32] = self.direction[i] * self.norm[i]
        return scaled

    @judged_arguments
    def relative_scale(self, layer: int, share: float) -> float:
        """The scale at which the vector is some share of what it is added to, for `to_steering`.

        Args:
            layer: one of `layers`.
            share: such as 0.5 for half of the mean norm at that layer.

        Raises:
            SpecError: no such layer, or the card has no norms.
        """
        i = self._index(layer)
        if not self.card.residual_norms:
            raise SpecError(f"vector {self.name!r}: its card has no residual_norms; pass a scale")
        return share * self.card.residual_norms[i] / float(self.norm[i])

    @judged_arguments
    def to_steering(
        self,
        layer: int | Sequence[int] | None = None,
        scale: float = 1.0,
        *,
        norm_match: bool = False,
        positions: Sequence[int] | None = None,
    ) -> Add:
        """The vector as a request carries it.

        Args:
            layer: one of `layers`, or several; the card's by default.
            scale: factor; 1 is the distance between the classes, or with `norm_match` the norm
                of the token's own row.
            norm_match: add `scale · ‖h‖ · direction` instead of `scale · length · direction`.
            positions: absolute positions to steer; negative ones count from the end of the
                prompt; every token by default.

        Raises:
            SpecError: no direction at that layer, or a value is wrong.
        """
        chosen = self.default_layer() if layer is None else layer
        layers = (chosen,) if isinstance(chosen, int) else tuple(chosen)
        rows = np.stack([self.raw(n) for n in layers])
        try:
            return Add(
                vector=rows,
                layers=layers,
                scale=scale,
                norm_match=norm_match,
                site=self.site,
                positions="all" if positions is None else several(positions),
            )
        except SpecError as error:
            raise SpecError(f"vector {self.name!r}: {error}") from None

    @judged_arguments
    def random_control(self, seed: int = 0) -> Self:
        """A random direction of the same length at each layer.

        Args:
            seed: of the generator; the same seed gives the same control.
        """
        return self._control("random", seed, self._draw(seed))

    @judged_arguments
    def orthogonal_control(self, seed: int = 0) -> Self:
        """A random direction of the same length at each layer, at right angles to the vector.

        Args:
            seed: of the generator.

        Raises:
            SpecError: the width is 1, where nothing is orthogonal.
        """
        if self.card.hidden < 2:
            raise SpecError("orthogonal_control: needs a width of 2 or more")
        # Another stream of numbers than that of the random control with this seed.
        drawn = self._draw(seed + (1 << 32))
        unit = self.direction.astype(np.float64)
        unit /= np.linalg.norm(unit, axis=1, keepdims=True)
        for _ in range(2):  # the second pass takes what rounding left
            drawn -= (drawn * unit).sum(axis=1, keepdims=True) * unit
        return self._control("orthogonal", seed, drawn)

    def _draw(self, seed: int) -> NDArray[np.float64]:
        return np.random.default_rng(seed).standard_normal(self.direction.shape)

    def _control(self, kind: str, seed: int, raw: NDArray[np.float64]) -> Self:
        made = type(self).from_raw(raw, norm=self.norm, card=self.card)
        facts = {
            "name": f"{self.name}/{kind}-{seed}",
            "description": f"{kind} control of {self.label}, seed {seed}; stands for nothing.",
            "method": f"{kind} direction of equal length",
            "separation": (),
        }
        return replace(made, card=self.card.model_copy(update=facts))

    def _in_file(self) -> Mapping[str, NDArray[Any]]:
        return {"direction": self.direction, "norm": self.norm}

    def _render(self, digest: str) -> str:
        card, norms = self.card, self.norm.tolist()
        facts = [("method", card.method), ("site", card.site), ("hidden", str(card.hidden))]
        facts += [("layer", "" if card.layer is None else str(card.layer))]
        facts += [("positions", card.positions)]
        if card.training:
            t = card.training
            facts += [
                ("data", f"{t.dataset}{f' (sha256 {t.sha256})' if t.sha256 else ''}"),
                ("rows", f"{t.n_positive} positive, {t.n_negative} negative, {t.n_groups} groups"),
                ("on-policy", "yes" if t.on_policy else "no"),
            ]
        blank = [""] * len(card.layers)
        units = [f"{n:.4g}" for n in card.residual_norms] or blank
        areas = [f"{a:.4f}" for a in card.separation] or blank
        layers = [
            [f"**{layer}**" if layer == card.layer else str(layer), f"{norm:.4g}", unit, area]
            for layer, norm, unit, area in zip(card.layers, norms, units, areas, strict=True)
        ]
        head = ["layer", "length at scale 1", "mean norm of the rows", "held-out AUROC"]
        sections = ["## Layers", markdown_table(head, layers)]
        return card.render(facts, sections, digest=("vector sha256", digest))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load a vector and check its files against each other.

        Args:
            path: the folder, or `vector.safetensors` inside it.

        Raises:
            ArtifactError: a file is missing or damaged, or they disagree.
        """
        folder, content, card = read_artifact(VECTOR, Path(path), VectorCard.model_validate)
        tensors = decode_tensors(
            VECTOR, content, card.header(), folder, allowed=("direction", "norm"), exact=True,
            what="a vector",
        )  # fmt: skip
        return from_files(cls, folder, **tensors, card=card)

    def _index(self, layer: int) -> int:
        if layer not in self.layers:
            raise SpecError(
                f"layer={layer}: vector {self.name!r} has directions at {list(self.layers)} only; "
                "a direction of another layer means nothing there; choose one of these"
            )
        return self.layers.index(layer)


def load_vector(vector: str | Path | Vector) -> Vector:
    """Load a vector by name, by path or from the Hugging Face hub.

    Names are found below `vectors/` as those of probes below `probes/`, see
    `inspect_lens.probe.load_probe`.

    Args:
        vector: a folder, its `vector.safetensors`, a name such as `organism/truth`, an `hf://`
            address, or a vector, which is returned.

    Raises:
        ArtifactError: nothing is found, a name is ambiguous, or the files are wrong.

    Example:
        ```python
        from inspect_lens.vector import load_vector

        truth = load_vector("organism/truth")
        assert truth.default_layer() == 4
        steering = truth.to_steering(scale=0.8)  # for a request
        assert steering.layers == (4,)
        ```
    """
    if isinstance(vector, Vector):
        return vector
    check_given("vector", vector, "; lens_config and lens_scope take a SteeringVector")
    return Vector.load(find_artifact(VECTOR, vector))


VectorLike: TypeAlias = str | Path | Vector
"""Name below `vectors/`, path, `hf://` address, or the vector itself."""

_OPTIONS = ("layer", "scale", "norm_match", "positions")


def steering_vector(value: VectorLike | Add | Mapping[str, Any]) -> Add:
    """Read a steering vector as Python, JSON or the command line spells it.

    Args:
        value: a vector or its name, which steers with scale 1 at the layer of its card; a
            mapping `{"vector": name, "layer": …, "scale": …, "norm_match": …, "positions": …}`,
            all but the first optional; or a `SteeringVector`, which is returned.

    Raises:
        ArtifactError: no such vector.
        SpecError: an unknown key or a wrong value.

    Example:
        ```python
        from inspect_lens.vector import steering_vector

        vector = steering_vector({"vector": "organism/truth", "layer": 3, "scale": -0.4})
        assert vector.layers == (3,)
        assert vector.scale < 0
        ```
    """
    if isinstance(value, Add):
        return value
    if not isinstance(value, Mapping):
        return load_vector(value).to_steering()
    unknown = sorted(set(value) - {"vector", *_OPTIONS})
    if unknown or "vector" not in value:
        raise SpecError(
            f"steer={dict(value)!r}: unknown keys {unknown}; allowed are vector (needed) and "
            f"{', '.join(_OPTIONS)}"
        )
    options = {key: value[key] for key in _OPTIONS if value.get(key) is not None}
    return load_vector(value["vector"]).to_steering(**options)
