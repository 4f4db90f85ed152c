"""The other half of a natural-language autoencoder: from words back to a row.

A reconstructor is a language model that ends behind block K, and a matrix. The row is that matrix
times the stream behind block K at the last token of its prompt. So the server gives a row of a
capture, and the matrix is applied here. How much of the variance of rows such rows explain is
computed here as well, beside what explains nothing.
"""

from __future__ import annotations

import json
import math
import reprlib
import tempfile
from collections.abc import Hashable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, cast

import anyio.to_thread
import numpy as np
from inspect_ai.model import Model
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field
from safetensors import safe_open
from safetensors.numpy import save

from inspect_lens._base.arguments import one_or_several
from inspect_lens._base.artifact import download
from inspect_lens._base.concurrency import together
from inspect_lens._base.untrusted import parse_json, parsing, read_regular
from inspect_lens._intake import read_tensors, stamp_of
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model import recapture
from inspect_lens.spec import DType, TensorData, as_array

from ._nla import META, layer_of, one_place, read_meta
from ._send import server_of

__all__ = [
    "FractionExplained",
    "Reconstructor",
    "complete_reconstructor",
    "fraction_explained",
    "read_reconstructor",
    "reconstruct",
]

HEAD: Final = "value_head.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_NORM: Final = "model-final-norm.safetensors"
_HEADER: Final = 1 << 20
"""Bytes that the header of a file may have."""
_WIDEST: Final = 1 << 16
"""Width above which a file is no model's."""


class Reconstructor(BaseModel):
    """What `nla_meta.yaml` says of a checkpoint that turns words into a row."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, arbitrary_types_allowed=True
    )

    name: str = Field(description="Folder or address that it was read from.")
    hidden: int = Field(gt=0, description="Width of the rows.")
    layer: int = Field(
        ge=0, description="Block behind which the stream is read, the last one of the checkpoint."
    )
    base_model: str = Field(default="", description="Model whose rows it was trained on.")
    prompt: str = Field(description="What is fed, as it stands; `{explanation}` is the place.")
    suffix_ids: tuple[int, ...] = Field(
        default=(), description="Tokens that every prompt ends with; empty: not stated."
    )
    matrix: NDArray[np.float32] = Field(
        repr=False, description="(hidden, hidden) float32; `matrix @ stream` is the row."
    )


def read_reconstructor(path: str | Path) -> Reconstructor:
    """Read `nla_meta.yaml` and `value_head.safetensors` of a reconstructor.

    Args:
        path: the checkpoint's folder, or `hf://owner/repository[@revision]`.

    Raises:
        ArtifactError: missing, no such files, or those of a verbaliser.

    Source:
        kitft/natural_language_autoencoders (2026).

    Example:
        ```python
        from inspect_lens.oracle import read_reconstructor

        found = read_reconstructor("nla/ar")
        assert (found.layer, found.matrix.shape) == (5, (256, 256))
        ```
    """
    if str(path).startswith("hf://"):
        folder = download("nla", str(path), (META, HEAD))
    else:
        folder = Path(path).expanduser()

    def parse(meta: Any) -> Reconstructor:
        if meta["kind"] != "nla_model" or meta["role"] not in ("ar", "critic"):
            kind, role = reprlib.repr(meta["kind"]), reprlib.repr(meta["role"])
            raise ValueError(f"kind {kind}, role {role}")
        prompts, tokens = meta["prompt_templates"], meta.get("tokens") or {}
        extraction = meta.get("extraction") or {}
        if (layer := layer_of(meta)) is None:
            raise ValueError("no extraction_layer_index")
        hidden = meta["d_model"]
        if not isinstance(hidden, int) or not 0 < hidden <= _WIDEST:
            raise ValueError(f"d_model {reprlib.repr(hidden)}")
        return Reconstructor(
            name=str(path), hidden=hidden, layer=layer,
            base_model=extraction.get("base_model") or "",
            prompt=one_place(prompts.get("ar") or prompts["critic"], "{explanation}"),
            suffix_ids=tuple(tokens.get("critic_suffix_ids") or ()),
            matrix=_read_head(folder / HEAD, hidden),
        )  # fmt: skip

    return read_meta(folder, parse, what="a reconstructor", role="ar")


def _read_head(file: Path, hidden: int) -> NDArray[np.float32]:
    allowed = f"allowed is one tensor of floats of the shape ({hidden}, {hidden})"
    unread = "the matrix of a reconstructor stands beside its "
    unread += f"{META}, and cannot be made from the rest"
    with parsing(file, "the matrix of a reconstructor", allowed, unread=unread):
        tensors, _ = read_tensors(read_regular(file, most=4 * hidden * hidden + _HEADER))
        ((name, (dtype, storage)),) = tensors.items()
        matrix = TensorData(storage, cast("DType", dtype)).to_float32()
        if matrix.shape != (hidden, hidden) or not np.isfinite(matrix).all():
            raise ValueError(f"{name} has the shape {matrix.shape}, or is not finite")
        return matrix


@lru_cache(maxsize=4)
def _known(path: str, stamps: tuple[str | None, ...]) -> Reconstructor:
    return read_reconstructor(path)


def load_reconstructor(given: str | Path | Reconstructor) -> Reconstructor:
    """What was given, or what its files say; files that do not change are read once."""
    if isinstance(given, Reconstructor):
        return given
    folder = Path(given).expanduser()
    return _known(str(given), tuple(stamp_of(str(folder / name)) for name in (META, HEAD)))


async def reconstruct(
    texts: str | Sequence[str], reconstructor: str | Path | Reconstructor, *, model: Model
) -> NDArray[np.float32]:
    """Turn descriptions back into rows with a natural-language autoencoder.

    Each text is put into the reconstructor's prompt and fed to the server in one forward pass,
    which returns the stream behind its last block at the last token; the matrix of the
    checkpoint is applied to it here. Only the direction of the result counts, because published
    reconstructors were trained at unit length.

    Args:
        texts: one description or several, such as the answers of `verbalise`.
        reconstructor: checkpoint folder, address, or what `read_reconstructor` read.
        model: a `vllm-lens/` model that serves the reconstructor's checkpoint. vLLM refuses one
            without final norm and output matrix, as they are published; `complete_reconstructor`
            makes it servable.

    Returns:
        (texts, hidden) float32.

    Raises:
        ArtifactError: the files or the tokenizer do not fit.
        UnsupportedError: the model's provider cannot capture.
        CaptureError: the server did not do what it was asked.

    Source:
        kitft/natural_language_autoencoders (2026).

    Example:
        <!-- test: server -->
        ```python
        from functools import partial

        import anyio
        from inspect_ai.model import get_model

        from inspect_lens.oracle import reconstruct

        model = get_model("vllm-lens/organism/checkpoint")  # nobody trained it to read descriptions
        made = anyio.run(partial(reconstruct, ["a town", "a creature"], "nla/ar", model=model))
        assert made.shape == (2, 256)
        ```
    """
    found = load_reconstructor(reconstructor)
    served = server_of(model, "a natural-language autoencoder")
    api: Any = served.api

    async def one(text: str) -> NDArray[np.float32]:
        # With the token that begins a text, where the tokenizer has one, as in training.
        body = {"prompt": found.prompt.replace("{explanation}", text), "add_special_tokens": True}
        ids = [int(token) for token in (await api.post("/tokenize", body))["tokens"]]
        ending = found.suffix_ids
        if ending and tuple(ids[-len(ending) :]) != ending:
            raise ArtifactError(
                f"{found.name}: its prompt ends with the tokens {ids[-len(ending) :]}, and "
                f"{list(ending)} are stated; the model that is served has another tokenizer"
            )
        if not ids:
            raise ArtifactError(f"{found.name}: its prompt has no token; there is nothing to feed")
        handle = await recapture(
            served, prompt_token_ids=ids, token_ids=ids[-1:], layers=[found.layer],
            positions="last_prompt",
        )  # fmt: skip
        row: NDArray[np.float32] = handle.numpy()[0, -1]
        if row.shape != (found.hidden,):
            raise ArtifactError(
                f"{found.name}: its stream has a width of {found.hidden}, and the model that is "
                f"served {row.size}; serve the reconstructor's own checkpoint"
            )
        return row

    rows = list(await together(*(one(text) for text in one_or_several(texts))))
    if not rows:
        return np.zeros((0, found.hidden), dtype=np.float32)
    return await anyio.to_thread.run_sync(lambda: np.stack(rows) @ found.matrix.T)


def complete_reconstructor(path: str | Path, out: str | Path) -> Path:
    """Make a folder that vLLM can serve from a reconstructor's checkpoint.

    As published, a checkpoint has neither a final norm nor an output matrix, and vLLM refuses to
    load a model with parts missing. Neither has a part in what `reconstruct` reads, which is the
    stream before them. So the folder gets a norm of ones, and its configuration says that the
    embedding is the output matrix, too. Weights are links to the files of the checkpoint.

    Args:
        path: the checkpoint's folder, as downloaded.
        out: folder to make; it must not exist.

    Raises:
        ArtifactError: it is no such checkpoint.
        SpecError: `out` is there already.

    Example:
        ```python
        from inspect_lens.oracle import complete_reconstructor

        folder = complete_reconstructor("nla/ar", "served-ar")  # vllm serve served-ar
        assert (folder / "config.json").is_file()
        ```
    """
    folder, target = Path(path).expanduser().absolute(), Path(out).expanduser()
    found = read_reconstructor(folder)
    if target.exists():
        raise SpecError(f"out={str(out)!r}: is there already; name a folder to make")
    needed = "needed are config.json and safetensors files with one embed_tokens.weight"
    with parsing(folder, "the checkpoint of a reconstructor", needed, unread=needed):
        config = parse_json(read_regular(folder / "config.json"))
        inner = config.get("text_config") or config
        if inner["num_hidden_layers"] != found.layer + 1:
            raise ValueError(
                f"{inner['num_hidden_layers']} layers in config.json, and {found.layer + 1} are "
                f"those up to layer {found.layer}"
            )
        parts = _weight_map(folder)
        (embedding,) = (name for name in parts if name.endswith("embed_tokens.weight"))
        # Their lm_head, if there is one, is no output matrix: it has the shape of the head.
        kept = {name: file for name, file in parts.items() if not name.endswith("lm_head.weight")}
        norm = embedding.removesuffix("embed_tokens.weight") + "norm.weight"
    target.parent.mkdir(parents=True, exist_ok=True)
    # The folder is there whole or not at all.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as beside:
        made = Path(beside) / target.name
        made.mkdir()
        own = {"config.json", _INDEX}
        for file in folder.iterdir():
            if file.is_file() and file.name not in own:
                (made / file.name).symlink_to(file.resolve())
        if norm not in kept:
            ones = np.ones(found.hidden, dtype=np.float32)
            (made / _NORM).write_bytes(save({norm: ones}, metadata={"format": "pt"}))
            kept[norm] = _NORM
        inner["tie_word_embeddings"] = config["tie_word_embeddings"] = True
        (made / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        # vLLM reads the files that an index names, and so leaves the matrix alone.
        index = {"metadata": {}, "weight_map": dict(sorted(kept.items()))}
        (made / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
        made.rename(target)
    return target


def _weight_map(folder: Path) -> dict[str, str]:
    if (folder / _INDEX).is_file():
        return dict(parse_json(read_regular(folder / _INDEX))["weight_map"])
    found: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        if file.name == HEAD:
            continue
        with safe_open(file, framework="numpy") as opened:
            found |= dict.fromkeys(opened.keys(), file.name)
    return found


class FractionExplained(BaseModel):
    """What reconstructions explain of rows at unit length, with two baselines.

    There is no interval: a drawn set holds rows more than once and so has too little variance, and
    the percentile and BCa bootstraps missed the truth in whole designs of few rows.
    """

    model_config = ConfigDict(frozen=True)

    fraction: float = Field(
        description="1 - Σ|x̂ - x|² / Σ|x - m|²; m is the mean of these rows. At most 1, and 0 for "
        "what is no better than m in the place of every reconstruction."
    )
    shuffled: float = Field(
        description="The same if each row is paired with reconstructions of all other groups; the "
        "mean over these pairings. NaN with one group."
    )
    empty_text: float | None = Field(
        description="The same if what is made of an empty text stands in the place of every "
        "reconstruction. It is never above 0, because no constant is better than the mean."
    )
    n_rows: int = Field(description="Rows.")
    n_groups: int = Field(description="Groups, within which rows are not independent.")


def fraction_explained(
    rows: ArrayLike,
    reconstructions: ArrayLike,
    *,
    groups: Sequence[Hashable] | None = None,
    empty_text: ArrayLike | None = None,
) -> FractionExplained:
    """Fraction of the variance of rows that reconstructions explain, all at unit length.

    That is `1 - Σ|x̂ - x|² / Σ|x - m|²`, where x are the rows and x̂ the reconstructions, each
    divided by its own length, and m is the mean of the x that are given here. Natural-language
    autoencoders are reported with it: 1 is perfect, 0 no better than the mean of the rows in
    the place of every reconstruction, and less is worse. m is not brought to unit length.

    Args:
        rows: (rows, hidden), at least two different ones.
        reconstructions: (rows, hidden); what was made of their descriptions.
        groups: (rows,) what is independent, such as the sample of each row; None takes rows.
        empty_text: (hidden,) what is made of an empty text, as a baseline; None leaves it out.

    Raises:
        SpecError: shapes do not fit, a row is zero or not finite, all rows are alike, or an
            argument is wrong.

    Source:
        kitft/natural_language_autoencoders (2026), `fve_nrm`.

    Example:
        ```python
        import numpy as np

        from inspect_lens.oracle import fraction_explained

        rows = np.random.default_rng(0).standard_normal((20, 8))
        assert fraction_explained(rows, 3 * rows).fraction == 1.0  # lengths do not count
        found = fraction_explained(rows, -rows, groups=np.arange(20) // 2)
        assert found.fraction < 0 and found.n_groups == 10
        ```
    """
    given, made = (as_array(part).astype(np.float64) for part in (rows, reconstructions))
    if given.ndim != 2 or given.shape != made.shape or len(given) < 2:
        raise SpecError(
            f"rows: shape {given.shape}, reconstructions: shape {made.shape}; needed are both "
            "(rows, hidden) with two rows or more"
        )
    if groups is not None and len(groups) != len(given):
        raise SpecError(f"groups: {len(groups)} for {len(given)} rows; needed is one for each row")
    x, guess = _units(given, "rows"), _units(made, "reconstructions")
    total = float(((x - x.mean(axis=0)) ** 2).sum())
    # Rounding leaves as much of rows that are all alike.
    if total < 1e-12 * len(x):
        raise SpecError("rows: all have one direction, so that there is nothing to explain")
    number: dict[Hashable, int] = {}
    named = range(len(x)) if groups is None else groups
    codes = np.array([number.setdefault(group, len(number)) for group in named])
    return FractionExplained(
        fraction=1.0 - float(((guess - x) ** 2).sum()) / total,
        shuffled=1.0 - _shuffled(x, guess, codes, len(number)) / total,
        empty_text=None if empty_text is None else 1.0 - _constant(x, empty_text) / total,
        n_rows=len(x),
        n_groups=len(number),
    )


def _units(rows: NDArray[np.float64], name: str) -> NDArray[np.float64]:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    if not np.isfinite(norms).all() or not norms.all():
        raise SpecError(f"{name}: one is zero or not finite, and has no direction")
    return np.asarray(rows / norms)


def _shuffled(
    x: NDArray[np.float64], guess: NDArray[np.float64], codes: NDArray[np.int64], n_groups: int
) -> float:
    """Σ|x̂ - x|² where each x̂ is that of a row of another group, on average; they are units."""
    if n_groups < 2:
        return math.nan
    own = np.zeros((n_groups, x.shape[1]))
    np.add.at(own, codes, guess)
    others = len(x) - np.bincount(codes)[codes]
    dots = np.einsum("nd,nd->n", x, guess.sum(axis=0) - own[codes]) / others
    return float((2.0 - 2.0 * dots).sum())


def _constant(x: NDArray[np.float64], made: ArrayLike) -> float:
    """Σ|x̂ - x|² where every x̂ is the same."""
    row = as_array(made).astype(np.float64).reshape(-1)
    if row.shape != x.shape[1:]:
        raise SpecError(f"empty_text: {row.size} numbers; needed are {x.shape[1]}, as in a row")
    return float(((_units(row[np.newaxis], "empty_text") - x) ** 2).sum())
