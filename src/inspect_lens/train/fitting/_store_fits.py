"""Fits on stores, in a stated memory, and kept for a run that goes on."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from inspect_lens._base.progress import progress_bar
from inspect_lens.errors import SpecError
from inspect_lens.probe import write_atomic
from inspect_lens.train.families._binary import BinaryEstimator
from inspect_lens.train.families._ensemble import EnsembleProbe
from inspect_lens.train.families._logistic import LogisticProbe, SklearnProbe
from inspect_lens.train.families._sae import SAEFeatureProbe
from inspect_lens.train.families._sequence import SequenceEstimator
from inspect_lens.train.families._torch_head import HeadData, HeldRows
from inspect_lens.train.families._torch_logistic import TorchLogisticProbe
from inspect_lens.train.sets._store_set import StoredRows, StoreSet

from ._closed import closed_bytes, fit_closed
from ._descent import fit_torch_logistic
from ._held import fit_held, sample_weights
from ._logistic_stream import fit_sklearn, is_streamed, reads_within
from ._members import fit_members
from ._row_view import RowView
from ._sparse import feature_bytes, fit_features
from ._stream import STREAMED_LOGISTIC, fit_logistic

__all__ = [
    "fit_from_store",
    "fit_jointly",
    "held_bytes",
    "keep",
    "restore",
]

_FORMAT: Final = 3
_NUMBER: Final = "number "
"""Begins the name of what is a number, and no array."""


def keep(estimator: Any, view: RowView, layer: int) -> None:
    """Write what was learnt, where the store has a folder for it and the family can be kept."""
    file = _file(estimator, view, layer)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, save(_learnt(estimator)))


def restore(estimator: Any, view: RowView, layer: int) -> bool:
    """Set what a run before has learnt."""
    file = _file(estimator, view, layer)
    if file is None or not file.exists():
        return False
    try:
        learnt = load(file.read_bytes())
        if isinstance(estimator, SequenceEstimator):
            estimator.losses_ = learnt.pop("losses_").tolist()
            estimator.tensors_ = learnt
    except (OSError, SafetensorError, KeyError):
        return False
    if not isinstance(estimator, SequenceEstimator):
        if not learnt or not all(name.endswith("_") for name in learnt):
            return False
        for name, value in learnt.items():
            number = name.startswith(_NUMBER)
            setattr(estimator, name.removeprefix(_NUMBER), value[0].item() if number else value)
    estimator.classes_, estimator.n_features_in_ = np.array([0, 1]), view.hidden
    return True


def _file(estimator: Any, view: RowView, layer: int) -> Path | None:
    work = view.data.work
    # Of a classifier of scikit-learn nobody knows what it learnt.
    if work is None or isinstance(estimator, SklearnProbe):
        return None
    if not isinstance(estimator, BinaryEstimator | SequenceEstimator):
        return None
    encoder = getattr(estimator, "encoder", None)
    facts = [
        _FORMAT, estimator.describe(), view.data.sha256, layer, view.rows,
        None if encoder is None else encoder.sha256,
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
    return work / f"{view.data.name}-{layer}-{digest}.safetensors"


def _learnt(estimator: Any) -> dict[str, NDArray[Any]]:
    """What ends in an underscore, as scikit-learn names what is learnt."""
    if isinstance(estimator, SequenceEstimator):
        return {**estimator.tensors_, "losses_": np.array(estimator.losses_)}
    made = {}
    for name, value in vars(estimator).items():
        if name.endswith("_") and not name.startswith("_") and name != "classes_":
            array = np.asarray(value)
            made[name if array.ndim else _NUMBER + name] = np.atleast_1d(array)
    made.pop(_NUMBER + "n_features_in_", None)
    return made


Fits: TypeAlias = Mapping[int, Any]
"""By layer, an estimator."""
_COPIES: Final[Mapping[type, int]] = {
    TorchLogisticProbe: 6, SAEFeatureProbe: 5, SklearnProbe: 4,
}  # fmt: skip
"""How often a fit in memory holds the rows of a layer as float32, or as much; 5 times where a
family is not named."""
_LATENTS: Final = 16 * 1024
"""Bytes per row that features take, which `SAEFeatureProbe` computes some at a time."""


def held_bytes(estimator: Any, view: RowView, *, n_layers: int = 1) -> int:
    """What a fit in memory holds, about."""
    if isinstance(estimator, EnsembleProbe):
        return (2 * n_layers + 6) * view.layer_bytes
    kinds = (_COPIES[kind] for kind in type(estimator).__mro__ if kind in _COPIES)
    latents = _LATENTS * len(view) if isinstance(estimator, SAEFeatureProbe) else 0
    return next(kinds, 5) * n_layers * view.layer_bytes + latents


def fit_from_store(made: Fits, view: RowView) -> Iterator[int]:
    """Fit at some layers, each on its own, without holding more than the set's memory."""
    todo = {}
    for layer, estimator in made.items():
        if restore(estimator, view, layer):
            yield layer
        else:
            todo[layer] = estimator
    if not todo:
        return
    for layer in _way(next(iter(todo.values())), view)(todo, view):
        keep(made[layer], view, layer)
        yield layer


def fit_jointly(made: Any, view: RowView, layers: Sequence[int]) -> None:
    """Fit a family whose rows hold several layers, likewise."""
    needed = held_bytes(made, view, n_layers=len(layers))
    if needed <= view.data.memory * 1e9:
        fit_held(made, view.data, layers, view.rows)
    elif isinstance(made, EnsembleProbe):
        fit_members(made, view, layers, _fit_members)
    else:
        raise _too_large(made, view, needed)


def _fit_members(made: Fits, view: RowView) -> None:
    for _ in fit_from_store(made, view):
        pass


def _way(family: Any, view: RowView) -> Callable[[Fits, RowView], Iterator[int]]:
    """How a family is fitted: as one pass for several layers, from disk, or in memory."""
    if isinstance(family, SequenceEstimator):
        return _fit_heads
    needed = held_bytes(family, view)
    fits = needed <= view.data.memory * 1e9
    linear = bool(closed_bytes(family, view)) or type(family) in STREAMED_LOGISTIC
    # Those stream in any case: of tokens, there are a thousand times more than of samples.
    if fits and not (linear and view.rows == "tokens"):
        return partial(_in_turn, fit=partial(_fit_held, view))
    if closed_bytes(family, view):
        return _fit_together
    # Of the very kind: who derives one may fit otherwise.
    streamed: dict[type, Callable[..., None]] = {
        **dict.fromkeys(STREAMED_LOGISTIC, _fit_logistic), TorchLogisticProbe: _fit_descent,
        SAEFeatureProbe: _fit_features, SklearnProbe: _fit_sklearn,
    }  # fmt: skip
    fit = streamed.get(type(family))
    if fit is None or (isinstance(family, SklearnProbe) and not is_streamed(family)):
        raise _too_large(family, view, needed)
    return partial(_in_turn, fit=partial(fit, view))


def _in_turn(made: Fits, view: RowView, *, fit: Callable[[Any, int], Any]) -> Iterator[int]:
    for layer, estimator in made.items():
        fit(estimator, layer)
        yield layer


def _fit_held(view: RowView, made: Any, layer: int) -> None:
    fit_held(made, view.data, [layer], view.rows)


def _fit_sklearn(view: RowView, made: SklearnProbe, layer: int) -> None:
    fit_sklearn(made, view, layer, sample_weights(made, view.data))


def _fit_logistic(view: RowView, made: LogisticProbe, layer: int) -> None:
    labels = view.labels
    read, whiten = reads_within(view, layer)
    fit_logistic(made, lambda: ((rows, labels[at]) for at, rows in read()), whiten=whiten)


def _fit_descent(view: RowView, made: Any, layer: int) -> None:
    if view.layer_bytes > view.data.memory * 1e9:
        warnings.warn(
            f"memory={view.data.memory:g}: {type(made).__name__} reads the rows of a layer "
            f"{made.epochs} times, and these take {view.layer_bytes / 1e9:.2g} GB, so each time is "
            "from disk; state more memory, set fewer epochs, or take LogisticProbe, which reads "
            "some 10 times",
            UserWarning,
            stacklevel=2,
        )
    title = f"{view.data.name} {layer}, steps"
    with progress_bar(title, total=made.epochs, done=0, show=view.data.progress) as tick:
        fit_torch_logistic(made, view.quiet(), layer, tick=tick)


def _fit_features(view: RowView, made: SAEFeatureProbe, layer: int) -> None:
    needed = feature_bytes(made, view)
    if needed > view.data.memory * 1e9:
        raise SpecError(
            f"memory={view.data.memory:g}: k={made.k} features of {len(view):,} rows take "
            f"{needed / 1e9:.2g} GB; allowed is what fits; state that much, or a smaller k"
        )
    fit_features(made, view, layer)


def _too_large(family: Any, view: RowView, needed: int) -> SpecError:
    name = type(family.estimator if isinstance(family, SklearnProbe) else family).__name__
    pooled = 4e-9 * len(view.data) * view.hidden * needed / view.layer_bytes
    by_sample = view.rows == "tokens" and pooled <= view.data.memory
    hint = f"fit one row per sample (rows='mean', {pooled:.2g} GB), " if by_sample else ""
    return SpecError(
        f"memory={view.data.memory:g}: {name} is fitted on all {len(view):,} rows at once, which "
        f"take {view.layer_bytes / 1e9:.2g} GB a layer and {needed / 1e9:.2g} GB with its copies; "
        f"allowed is what fits; {hint}state that much memory (memory=, --memory), or take a family "
        "that reads rows piece by piece: all of FAMILIES do, and LogisticRegression of "
        "scikit-learn, alone or behind a StandardScaler"
    )


def _fit_together(made: Fits, data: RowView) -> Iterator[int]:
    family, memory = next(iter(made.values())), data.data.memory
    each, once = closed_bytes(family, data) or (0, 0)
    needed = (each + once) / 1e9
    if needed > memory:
        warnings.warn(
            f"memory={memory:g}: {type(family).__name__} takes {needed:.2g} GB for one layer "
            f"of width {data.hidden}, so layers are read in turn and each takes that; state more "
            "memory",
            UserWarning,
            stacklevel=2,
        )
    for group in _groups(list(made), each, memory * 1e9 - once):
        yield from fit_closed({layer: made[layer] for layer in group}, data)


def _fit_heads(made: Fits, view: RowView) -> Iterator[int]:
    data = view.data
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
