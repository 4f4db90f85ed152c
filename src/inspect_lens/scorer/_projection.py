"""`trait_projection`: how far a completion's activations lie along a direction."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from inspect_ai.scorer import Scorer, mean, scorer, stderr

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model import read_vector
from inspect_lens.probe import AnyProbe, Probe, ProbeCard, load_probe
from inspect_lens.reading import OnMissing, Over, ProbeReader, Source
from inspect_lens.spec import RESID_POST, Positions, Site
from inspect_lens.vector import Vector, load_vector

from ._metrics import auroc
from ._probe import score_with

__all__ = ["trait_projection"]


@scorer(metrics=[mean(), stderr(), auroc()])
def trait_projection(
    vector: str | Path | Vector | AnyProbe,
    layer: int | None = None,
    positions: Positions | list[int] = "completion",
    pool: str = "mean",
    selection: str = "",
    site: Site = RESID_POST,
    normalise: bool = True,
    source: Source = "auto",
    token_scores: bool = True,
    tokenizer: str | None = None,
    over: Over = "last",
    roles: Sequence[str] | None = None,
    on_missing: OnMissing = "error",
    name: str | None = None,
) -> Scorer:
    """Mean projection of a completion's activations on a direction, such as a persona vector's.

    A number in the units of the residual stream, so that it compares samples of one model at one
    layer and says nothing by itself: there is no threshold, and zero is no boundary.

    Args:
        vector: a steering vector by name below `vectors/`, path or `hf://` address; or a linear
            probe likewise, below `probes/`, whose direction in the raw stream is taken, without
            its scaler's offset and its bias; or a bare safetensors file with a tensor
            `activations` of shape (hidden,) or (1, hidden), as a log keeps of its steering.
        layer: where to project. Of a vector that of its card by default; of a probe the only
            one; a bare file does not say, so it has to be given.
        positions: tokens to read.
        pool: `mean` over the tokens, or another of `probe_score`.
        selection: tokens among these positions by what they are: `answer`, `reasoning`,
            `tool_calls`, `assistant`, `prompt`, `last:K` or `regex:PATTERN`; "" for all.
        site: place in the block, for a bare file; a vector and a probe have their own.
        normalise: divide the direction by its length; without it a vector has the length that
            `scale=1` adds.
        source: `captured` reads what the generation captured, also from the file beside a finished
            log; `recompute` feeds the same token ids to the model again; `auto` does the first
            where it can.
        token_scores: write the score of each token to a file beside the log;
            `inspect_lens.reading.read_token_scores` reads it.
        tokenizer: folder or name of the tokenizer that tells sentences and selections; by default
            that of the model that is read, else that of the card's model, where it is on this
            machine.
        over: `last` reads the call of the sample's answer, or the last one of `roles`; `all` reads
            every call, each choice by itself.
        roles: model roles whose calls are read instead of those of the eval's model. By default
            these are found where the calls of one role alone have a lens.
        on_missing: `error` fails the sample where the activations of a call are not there; `skip`
            treats such a call as one without a token to read.
        name: under which tables show the score; the direction and the pool by default.

    Returns:
        The scorer. A sample without a token to read is unscored.

    Raises:
        ArtifactError: nothing of that name, or the file holds several vectors; while scoring, as
            for `probe_score`.
        SpecError: an argument is wrong, the layer is missing, or the name is that of a vector
            and of a probe.

    Source:
        arXiv:2507.21509: projection of the response's mean activation on the persona vector.

    Example:
        ```python
        from inspect_ai import score
        from inspect_ai.log import read_eval_log

        from inspect_lens.scorer import trait_projection

        log = read_eval_log("logs/honesty.eval")
        log = score(log, trait_projection("organism/deception-md"), action="overwrite")
        values = [sample.scores["trait_projection"].value for sample in log.samples]
        assert len(values) == 8
        ```
    """
    probe = _as_probe(vector, layer, site, normalise)
    read = None if selection and positions == "completion" else positions
    reader = ProbeReader.of(
        probe, positions=read, pool=pool, selection=selection, source=source, check_model=False,
        tokenizer=tokenizer, over=over, roles=roles, on_missing=on_missing,
    )  # fmt: skip
    return score_with(reader, token_scores=token_scores, name=name)


def _as_probe(
    vector: str | Path | Vector | AnyProbe, layer: int | None, site: Site, normalise: bool
) -> Probe:
    path = Path(vector).expanduser() if isinstance(vector, str | Path) else None
    if path is not None and path.is_file() and not (path.parent / "card.json").exists():
        return _of_file(path, layer, site, normalise)
    loaded = _load(vector)
    if isinstance(loaded, Vector):
        return _of_vector(loaded, layer, normalise)
    if not isinstance(loaded, Probe):
        raise SpecError(
            f"vector: probe {loaded.name!r} is not linear, so it has no direction; allowed are "
            "linear probes and steering vectors"
        )
    one = loaded if layer is None else loaded.at(layer)
    if len(one.layers) > 1:
        raise SpecError(
            f"layer: probe {one.name!r} has directions at {list(one.layers)}; allowed is one "
            "layer, as lengths differ between layers; pass layer="
        )
    raw = one.weight.astype(np.float64) / one.scale
    card = ProbeCard(
        name=f"{one.name}/projection", layers=one.layers, hidden=one.hidden, site=one.site,
        model=one.card.model,
    )  # fmt: skip
    return Probe.from_direction(one.direction() if normalise else raw, card=card)


def _load(vector: str | Path | Vector | AnyProbe) -> Vector | AnyProbe:
    """The vector or the probe of that name."""
    if isinstance(vector, Vector | AnyProbe):
        return vector
    found: list[Vector | AnyProbe] = []
    problems: list[str] = []
    for load in (load_vector, load_probe):
        try:
            found.append(load(vector))
        except ArtifactError as error:
            problems.append(str(error))
    if not found:
        raise ArtifactError("; and as a probe: ".join(problems))
    if len(found) > 1:
        raise SpecError(
            f"vector={str(vector)!r} is the name of a vector and of a probe; allowed is one; pass "
            "the path of its folder"
        )
    return found[0]


def _of_vector(vector: Vector, layer: int | None, normalise: bool) -> Probe:
    at = vector.default_layer() if layer is None else layer
    raw = vector.raw(at).astype(np.float64)
    if normalise:
        raw = raw / np.linalg.norm(raw)
    card = ProbeCard(
        name=f"{vector.label}/projection", layers=(at,), hidden=vector.card.hidden,
        site=vector.site, model=vector.card.model,
    )  # fmt: skip
    return Probe.from_direction(raw, card=card)


def _of_file(path: Path, layer: int | None, site: Site, normalise: bool) -> Probe:
    if layer is None:
        raise SpecError(
            f"layer: {path.name} does not say at which layer its vector belongs; allowed is a "
            "0-based layer number; pass layer="
        )
    data = path.read_bytes()
    direction = np.atleast_2d(read_vector(data, where=str(path)).to_float32())
    if direction.ndim != 2 or len(direction) != 1 or not np.linalg.norm(direction) > 0:
        raise ArtifactError(
            f"{path}: holds vectors of shape {direction.shape}; allowed is one that is not zero"
        )
    if normalise:
        direction = direction / np.linalg.norm(direction.astype(np.float64))
    digest = hashlib.sha256(data).hexdigest()[:8]
    card = ProbeCard(
        name=f"{path.stem}-{digest}/projection", layers=(layer,), hidden=direction.shape[1],
        site=site,
    )  # fmt: skip
    return Probe.from_direction(direction, card=card)
