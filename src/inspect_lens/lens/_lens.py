"""A tuned or Jacobian lens: its matrices, its card and its files.

Jacobian lenses that others fitted come in the file of `jlens`, which neuronpedia publishes: a torch
archive with `J` (a matrix for each layer, whose rows are outputs), `n_prompts`, `source_layers` and
`d_model`; TransformerLens adds `metadata`. A layer is a block, counted from 0, whose output is
translated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import ConfigDict, Field, model_validator

from inspect_lens._base.arguments import judged_arguments
from inspect_lens._base.artifact import (
    Artifact,
    ArtifactCard,
    ArtifactKind,
    decode_tensors,
    download,
    find_artifact,
    from_files,
    markdown_table,
    read_artifact,
)
from inspect_lens._base.untrusted import load_torch, parsing, read_regular
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe import ModelRef
from inspect_lens.spec import Add, EngineLens, LensKind, Swap, Value, as_array, as_tensor_data

__all__ = ["Lens", "LensCard", "LensQuality", "LensTraining", "import_lens", "load_lens"]


class LensTraining(Value):
    """What a lens was fitted on, and how."""

    model_config = ConfigDict(allow_inf_nan=False)

    method: str
    """How it was fitted, in words."""
    dataset: str = ""
    """Which texts."""
    n_prompts: int = Field(gt=0)
    """Texts that it was fitted on."""
    n_tokens: int = Field(gt=0)
    """Rows of each layer that it was fitted on."""
    settings: dict[str, int | float | str] = Field(default_factory=dict)
    """Arguments that decide the result."""


class LensQuality(Value):
    """How far the predictions of one layer are from the model's own, on held-out texts."""

    model_config = ConfigDict(allow_inf_nan=False)

    layer: int
    """Which layer."""
    kl: float
    """Mean KL divergence in nats from the model's own next-token distribution to the lens's."""
    logit_kl: float
    """The same of the logit lens."""
    agreement: float
    """Share of rows whose most likely token is that of the model."""
    logit_agreement: float
    """The same of the logit lens."""


class LensCard(ArtifactCard):
    """Facts about a lens; saved as `card.json`, rendered as `card.md`."""

    HEADER = frozenset({"name", "kind", "n_layers", "layers", "hidden", "model"})

    kind: LensKind
    """`tuned`: `h + A h + b`; `jacobian`: `J h`."""
    n_layers: int = Field(gt=0)
    """Decoder layers of the model."""
    model: ModelRef | None = None
    training: LensTraining | None = None
    quality: tuple[LensQuality, ...] = ()
    """On held-out texts, by layer."""
    n_held_out: int = 0
    """Rows of each layer that `quality` was measured on."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        layers = self.layers
        if layers[-1] >= self.n_layers:
            raise ValueError(f"layers {layers}; allowed are 0 to {self.n_layers - 1}")
        if unknown := {one.layer for one in self.quality} - set(layers):
            raise ValueError(f"quality names layers {sorted(unknown)}, which are none of {layers}")
        return self


LENS: Final = ArtifactKind(
    name="lens",
    folder="lenses",
    tensors="lens.safetensors",
    format="inspect_lens.lens/1",
    writer="Lens.save",
    example="organism/tuned",
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Lens(Artifact):
    """A tuned or Jacobian lens: one translation per layer, with a card.

    A row `h` of a layer becomes `h + A h + b` (tuned) or `J h` (jacobian). The model's final norm
    and unembedding make a prediction of it.

    Args:
        matrix: (layers, hidden, hidden) float32 or float16; `A` or `J`, whose rows are outputs.
        bias: (layers, hidden) float32 of a tuned lens, else None.
        card: kind, layers, width and provenance.
        path: folder that it was loaded from.

    Raises:
        SpecError: shapes disagree with the card, or a value is not finite.

    Source:
        Tuned lens: Belrose et al. 2023, arXiv:2303.08112.

    Example:
        ```python
        import numpy as np

        from inspect_lens.lens import Lens, LensCard

        card = LensCard(name="mine/double", kind="jacobian", n_layers=6, layers=(2,), hidden=4)
        lens = Lens(matrix=2 * np.eye(4)[None], card=card)
        assert lens.translate(np.ones((1, 4)), layer=2).tolist() == [[2.0, 2.0, 2.0, 2.0]]
        ```
    """

    KIND: ClassVar[ArtifactKind] = LENS

    matrix: NDArray[np.float32] | NDArray[np.float16]
    card: LensCard
    bias: NDArray[np.float32] | None = None
    path: Path | None = field(default=None)

    def __post_init__(self) -> None:
        card, n = self.card, len(self.card.layers)
        if (self.bias is None) != (card.kind == "jacobian"):
            raise SpecError(
                f"bias: {'none' if self.bias is None else 'given'} of a {card.kind} lens; a tuned "
                "lens has one, and a Jacobian lens has none"
            )
        self._freeze(("matrix",), matrix=(n, card.hidden, card.hidden))
        if self.bias is not None:
            self._freeze(bias=(n, card.hidden))

    @judged_arguments
    def translate(self, rows: ArrayLike, layer: int) -> NDArray[np.float32]:
        """Translate rows of a layer into rows for the final norm and the unembedding.

        Args:
            rows: (…, hidden) of the residual stream behind the layer.
            layer: one that it translates, or the last of the model, whose rows stay as they are.

        Returns:
            (…, hidden).

        Raises:
            SpecError: it does not translate the layer, or the width differs.
        """
        wide = as_array(rows).astype(np.float32, copy=False)
        if wide.shape[-1:] != (self.card.hidden,):
            raise SpecError(f"rows: shape {wide.shape}; the lens is {self.card.hidden} wide")
        if layer not in self.layers and layer == self.card.n_layers - 1:
            return wide
        at = self._at(layer)
        made = wide @ self.matrix[at].astype(np.float32).T
        if self.bias is not None:
            made = wide + made + self.bias[at]
        return np.asarray(made, dtype=np.float32)

    @judged_arguments
    def token_direction(self, unembedding: ArrayLike, layer: int) -> NDArray[np.float32]:
        """Directions in a layer that make tokens more likely, to first order.

        That is `M^T u` for a row `u` of the unembedding, where `M` is `J`, or `I + A` of a tuned
        lens. The final norm is left out: it rescales the result and removes its mean part.

        Args:
            unembedding: (…, hidden); rows of the unembedding matrix. Multiply them with the weight
                of the final norm first, if it has one.
            layer: one that it translates.

        Returns:
            (…, hidden).

        Raises:
            SpecError: it does not translate the layer, or the width differs.
        """
        rows = as_array(unembedding).astype(np.float32, copy=False)
        if rows.shape[-1:] != (self.card.hidden,):
            raise SpecError(f"unembedding: shape {rows.shape}; the lens is {self.card.hidden} wide")
        made = rows @ self.matrix[self._at(layer)].astype(np.float32)
        if self.card.kind == "tuned":
            made = made + rows
        return np.asarray(made, dtype=np.float32)

    @judged_arguments
    def token_vector(
        self, unembedding: ArrayLike, layer: int, *, scale: float = 1.0, norm_match: bool = False
    ) -> Add:
        """Make a steering vector of unit length that makes a token more likely.

        Args:
            unembedding: (hidden,); one row of the unembedding matrix.
            layer: one that it translates; where the vector is added.
            scale: length of what is added; with `norm_match` relative to each row's own.
            norm_match: whether the length is relative.

        Raises:
            SpecError: it does not translate the layer, the width differs, or the direction is zero.
        """
        direction = self.token_direction(as_array(unembedding).reshape(-1), layer)
        length = float(np.linalg.norm(direction.astype(np.float64)))
        if not length:
            raise SpecError("unembedding: the lens maps this row to zero; choose another token")
        return Add(
            vector=(direction / length)[None], layers=(layer,), scale=scale, norm_match=norm_match
        )

    @judged_arguments
    def token_swap(
        self, unembedding: ArrayLike, layers: Sequence[int], *, strength: float = 1.0
    ) -> Swap:
        """Make an edit that exchanges two tokens: each gets the coordinate of the other.

        Coordinates are along `token_direction` of both. Layers that come later read what earlier
        ones have done, and exchange it back, so with several layers capture the rows of a clean
        run and send `token_swap(…).frozen(rows, positions=…)`.

        Args:
            unembedding: (2, hidden); rows of the unembedding of the two tokens.
            layers: where they are exchanged; the lens translates each.
            strength: 1 exchanges the coordinates; 0 changes nothing.

        Raises:
            SpecError: shapes disagree, the lens lacks a layer, or the directions of both tokens
                are parallel.

        Source:
            "Verbalizable Representations Form a Global Workspace in Language Models" (Anthropic
            2026).
        """
        tokens = as_array(unembedding).astype(np.float32, copy=False)
        if tokens.shape != (2, self.card.hidden):
            raise SpecError(
                f"unembedding: shape {tokens.shape}; allowed is {(2, self.card.hidden)}, the rows "
                "of two tokens"
            )
        if not layers:
            raise SpecError("layers: name at least one; allowed are layers of the lens")
        directions = np.stack([self.token_direction(tokens, layer) for layer in layers])
        first, second = directions[:, 0], directions[:, 1]
        return Swap(first=first, second=second, strength=strength, layers=tuple(layers))

    def for_engine(self) -> EngineLens:
        """The form that an engine registers; made once, as all of it is hashed."""
        return self._form

    @cached_property
    def _form(self) -> EngineLens:
        tensors = {"matrix": as_tensor_data(self.matrix)}
        if self.bias is not None:
            tensors["bias"] = as_tensor_data(self.bias)
        return EngineLens(
            kind=self.card.kind, n_layers=self.card.n_layers, layers=self.layers, tensors=tensors
        )

    def _in_file(self) -> Mapping[str, NDArray[Any]]:
        return {"matrix": self.matrix} | ({} if self.bias is None else {"bias": self.bias})

    def _render(self, digest: str) -> str:
        card = self.card
        facts: list[tuple[str, str]] = [("kind", card.kind), ("hidden", str(card.hidden))]
        if card.training:
            t = card.training
            facts += [
                ("method", t.method),
                ("data", f"{t.dataset} ({t.n_prompts} prompts, {t.n_tokens} tokens)".strip()),
                ("settings", ", ".join(f"{k}={v}" for k, v in t.settings.items())),
            ]
        sections: list[str] = []
        if card.quality:
            head = ["layer", "KL (nats)", "logit lens", "same best token", "logit lens"]
            table = [
                [str(q.layer), f"{q.kl:.3f}", f"{q.logit_kl:.3f}", f"{q.agreement:.3f}",
                 f"{q.logit_agreement:.3f}"]
                for q in card.quality
            ]  # fmt: skip
            told = (
                f"Against the model's own predictions, on {card.n_held_out} held-out rows a layer."
            )
            sections = ["## Quality", told, markdown_table(head, table)]
        return card.render(facts, sections, digest=("lens sha256", digest))

    def _at(self, layer: int) -> int:
        if layer not in self.layers:
            raise SpecError(f"layer={layer}; the lens translates {list(self.layers)}")
        return self.layers.index(layer)


def load_lens(lens: str | Path | Lens) -> Lens:
    """Load a lens by name, by path or from the Hugging Face hub.

    Names are found below `lenses/` as those of probes below `probes/`, see
    `inspect_lens.probe.load_probe`.

    Args:
        lens: a folder, its `lens.safetensors`, a name, an `hf://` address, or a lens, which is
            returned.

    Raises:
        ArtifactError: nothing is found, or the files are damaged or disagree.

    Example:
        ```python
        from inspect_lens.lens import load_lens

        assert load_lens("organism/jacobian").card.kind == "jacobian"
        ```
    """
    if isinstance(lens, Lens):
        return lens
    path = find_artifact(LENS, lens)
    folder, content, card = read_artifact(LENS, path, LensCard.model_validate)
    tensors = decode_tensors(
        LENS, content, card.header(), folder, exact=True, what=f"a {card.kind} lens",
        allowed=("matrix", "bias") if card.kind == "tuned" else ("matrix",),
        dtypes=("float32", "float16"),
    )  # fmt: skip
    return from_files(Lens, folder, **tensors, card=card)


_BYTES: Final = 64 << 30
_SOURCE: Final = (
    "jlens; Verbalizable Representations Form a Global Workspace in Language Models "
    "(Anthropic 2026)"
)


@judged_arguments
def import_lens(
    path: str | Path, *, name: str, n_layers: int | None = None, model: ModelRef | None = None
) -> Lens:
    """Read a Jacobian lens that `jlens` or TransformerLens fitted.

    The file is a pickle; only tensors and plain values are read from it. It does not say how many
    layers the model has. Published lenses translate all but the last, so that is assumed.

    Args:
        path: of the `.pt` file, or `hf://owner/repository/folder/file.pt[@revision]`.
        name: `<model>/<name>`, for the card and the folder.
        n_layers: decoder layers of the model; by default those up to the file's last, and one more.
        model: the model that it was fitted on; by default what the file's metadata says.

    Returns:
        A lens of kind `jacobian`; float16 matrices stay float16.

    Raises:
        ArtifactError: missing, damaged, of another format, or a pickle of code; or the fit had not
            ended, or had another target than the last layer.
        SpecError: the model has fewer layers than the file.

    Example:
        ```python
        import torch

        from inspect_lens.lens import import_lens

        content = {
            "J": {0: torch.eye(8).half(), 1: torch.eye(8).half()},
            "n_prompts": 100,
            "source_layers": [0, 1],
            "d_model": 8,
        }
        torch.save(content, "lens.pt")
        lens = import_lens("lens.pt", name="mine/jacobian")
        assert lens.layers == (0, 1) and lens.card.n_layers == 3
        ```
    """
    file = _find(str(path))
    advice = "allowed are files of jlens and TransformerLens, with J and d_model"
    with parsing(file, "a Jacobian lens", advice):
        loaded = load_torch(read_regular(file, most=_BYTES), str(file))
        if isinstance(loaded, Mapping) and "jacobian_sum" in loaded:
            raise ArtifactError(
                f"{file}: a checkpoint of a fit that had not ended; allowed is the lens that the "
                "fit saved (it has J)"
            )
        matrices = {int(layer): value.detach() for layer, value in loaded["J"].items()}
        layers = tuple(sorted(matrices))
        named = sorted(int(layer) for layer in loaded.get("source_layers", layers))
        if named != list(layers):
            raise ValueError(f"source_layers are {named}, and J has matrices of {list(layers)}")
        half = all(str(value.dtype) == "torch.float16" for value in matrices.values())
        matrix = np.stack(
            [(m if half else m.float()).numpy() for m in (matrices[n] for n in layers)]
        )
        hidden = int(loaded["d_model"])
        if matrix.shape != (len(layers), hidden, hidden):
            raise ValueError(f"matrices of shape {matrix.shape[1:]} for d_model {hidden}")
        stated = dict(loaded.get("metadata") or {})
        n_prompts = int(loaded["n_prompts"]) if "n_prompts" in loaded else None
    count = layers[-1] + 2 if n_layers is None else n_layers
    if count <= layers[-1]:
        raise SpecError(f"n_layers={count}; {file} translates layers up to {layers[-1]}")
    target = stated.get("target_layer", -1)
    if target not in (-1, count - 1):
        raise ArtifactError(
            f"{file}: leads to layer {target!r}, and not to the last one, {count - 1}, whose rows "
            "the final norm reads; pass n_layers= if that is wrong"
        )
    told = {key: stated.get(f"model_{key}") for key in ("name", "revision")}
    known = {key: value for key, value in told.items() if isinstance(value, str) and value}
    if model is None and "name" in known:
        model = ModelRef(**known)
    notes: list[str] = []
    if n_prompts is not None:
        notes.append(f"Stated in the file: fitted on {n_prompts} prompts.")
    notes += [f"Stated in the file: {key} {value}." for key, value in sorted(stated.items())
              if isinstance(value, str | int | float)]  # fmt: skip
    if n_layers is None:
        notes.append(f"Assumed: the model has {count} layers, as the file translates all others.")
    notes.append("Its quality was not measured here; `inspect-lens lens evaluate` does.")
    try:
        card = LensCard(
            name=name, kind="jacobian", n_layers=count, layers=layers, hidden=hidden,
            source=_SOURCE, model=model, notes=tuple(notes),
        )  # fmt: skip
        return Lens(matrix=matrix, card=card)
    except (SpecError, ValueError) as error:
        raise ArtifactError(f"{file}: {error}") from None


def _find(path: str) -> Path:
    if not path.startswith("hf://"):
        return Path(path).expanduser()
    address, at, revision = path.partition("@")
    found = PurePosixPath(address.removeprefix("hf://"))
    if len(found.parts) < 3:
        raise ArtifactError(
            f"lens={path!r}; allowed is hf://owner/repository/folder/file.pt, then @revision"
        )
    return download("lens", f"hf://{found.parent}{at}{revision}", (found.name,)) / found.name
