"""Fits on stores, in a stated memory, and kept for a run that goes on."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from inspect_lens._progress import progress_bar
from inspect_lens.probe import write_atomic
from inspect_lens.train.families._head_data import HeadData, HeldRows
from inspect_lens.train.families._logistic import LogisticProbe
from inspect_lens.train.families._sequence import SequenceEstimator
from inspect_lens.train.sets._store_set import StoreSet
from inspect_lens.train.sets._stored_rows import StoredRows

from ._closed import closed_bytes, fit_closed
from ._stream import fit_stream

__all__ = ["fit_from_store"]

Fits: TypeAlias = Mapping[int, Any]
"""By layer, an estimator."""
_FORMAT: Final = 2
_DIRECTION: Final = ("coef_", "mean_", "scale_", "intercept_")


def fit_from_store(made: Fits, data: StoreSet) -> Iterator[int] | None:
    """Fit on the rows of some layers without holding more than the set's memory.

    Args:
        made: by layer, a family, unfitted.
        data: with or without a folder for fits.

    Returns:
        Each layer when it is fitted, now or by a run before; None for families that need all rows
        of a layer at once.
    """
    family = next(iter(made.values()), None)
    way: Callable[[Fits, StoreSet], Iterator[int]]
    if isinstance(family, SequenceEstimator):
        way = _fit_heads
    elif type(family) is LogisticProbe:
        way = _fit_in_turn
    elif closed_bytes(family, data):
        way = _fit_together
    else:
        return None
    return _fit(made, data, way)


def _fit(
    made: Fits, data: StoreSet, way: Callable[[Fits, StoreSet], Iterator[int]]
) -> Iterator[int]:
    todo = {}
    for layer, estimator in made.items():
        file = _file(estimator, data, layer)
        if file is not None and file.exists() and _restore(estimator, file):
            yield layer
        else:
            todo[layer] = estimator
    for layer in way(todo, data):
        file = _file(made[layer], data, layer)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, save(_learnt(made[layer])))
        yield layer


def _fit_in_turn(made: Fits, data: StoreSet) -> Iterator[int]:
    for layer, estimator in made.items():
        fit_stream(estimator, lambda layer=layer: data.source(layer))  # type: ignore[misc]
        yield layer


def _fit_together(made: Fits, data: StoreSet) -> Iterator[int]:
    if not made:
        return
    family = next(iter(made.values()))
    each, once = closed_bytes(family, data) or (0, 0)
    needed = (each + once) / 1e9
    if needed > data.memory:
        warnings.warn(
            f"memory={data.memory:g}: {type(family).__name__} takes {needed:.2g} GB for one layer "
            f"of width {data.hidden}, so layers are read in turn and each takes that; state more "
            "memory",
            UserWarning,
            stacklevel=2,
        )
    for group in _groups(list(made), each, data.memory * 1e9 - once):
        yield from fit_closed({layer: made[layer] for layer in group}, data)


def _fit_heads(made: Fits, data: StoreSet) -> Iterator[int]:
    size, memory = 4 * len(data.row_labels) * data.hidden, int(data.memory * 1e9)
    for group in _groups(list(made), size, memory):
        held = data.held(group) if size <= memory else {}
        for layer in group:
            rows = HeldRows(held.pop(layer)) if held else StoredRows(data, layer, spare=memory)
            _train(made[layer], rows, data, layer)
            yield layer


def _train(estimator: SequenceEstimator, rows: Any, data: StoreSet, layer: int) -> None:
    by_token = estimator.reads == "tokens"
    labels, groups = data.labels, np.array(data.groups)
    if by_token:
        labels, groups = data.row_labels, np.repeat(groups, rows.lengths)
    title, steps = f"{data.name} {layer}, training", int(estimator.get_params().get("steps", 0))
    with progress_bar(title, total=steps, done=0, show=data.progress) as tick:
        estimator.fit_data(HeadData(rows, by_token=by_token), labels, groups, tick=tick)


def _groups(layers: Sequence[int], each: int, memory: float) -> list[Sequence[int]]:
    """Layers that are read together: as many as memory allows, one at least."""
    size = max(1, int(memory // each))
    return [layers[first : first + size] for first in range(0, len(layers), size)]


def _file(estimator: Any, data: StoreSet, layer: int) -> Path | None:
    if data.work is None:
        return None
    facts = [_FORMAT, estimator.describe(), data.sha256, layer]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
    return data.work / f"{data.name}-{layer}-{digest}.safetensors"


def _learnt(estimator: Any) -> dict[str, Any]:
    if isinstance(estimator, SequenceEstimator):
        return {**estimator.tensors_, "losses_": np.array(estimator.losses_)}
    extra = "explained_variance_ratio_"
    names = (*_DIRECTION, *([extra] if hasattr(estimator, extra) else []))
    return {key: np.atleast_1d(np.float64(getattr(estimator, key))) for key in names}


def _restore(estimator: Any, file: Path) -> bool:
    """Set what was learnt; False where the file is damaged, and the fit is made again."""
    try:
        learnt = load(file.read_bytes())
        if isinstance(estimator, SequenceEstimator):
            estimator.losses_ = learnt.pop("losses_").tolist()
            estimator.tensors_, hidden = learnt, learnt["mean"].size
        else:
            estimator.coef_, estimator.mean_ = learnt["coef_"], learnt["mean_"]
            estimator.scale_, estimator.intercept_ = (
                learnt["scale_"], float(learnt["intercept_"][0]),
            )  # fmt: skip
            hidden = learnt["coef_"].size
    except (OSError, SafetensorError, KeyError):
        return False
    if "explained_variance_ratio_" in learnt:
        estimator.explained_variance_ratio_ = float(learnt["explained_variance_ratio_"][0])
    estimator.classes_, estimator.n_features_in_ = np.array([0, 1]), hidden
    return True
