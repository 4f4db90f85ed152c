"""Fits on stores, in a stated memory, and kept for a run that goes on."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from inspect_lens.errors import SpecError
from inspect_lens.probe import write_atomic
from inspect_lens.train.families._binary import (
    BinaryEstimator,
    Rows,
    Targets,
    dominated,
    find_scale,
    rows_for_scale,
)
from inspect_lens.train.families._direction import (
    DirectionEstimator,
    FormulaEstimator,
    LATProbe,
    LDAProbe,
    MassMeanProbe,
    MeanDifferenceProbe,
)
from inspect_lens.train.families._ensemble import EnsembleProbe
from inspect_lens.train.families._head import HeadProbe
from inspect_lens.train.families._logistic import (
    LogisticProbe,
    PressureLogisticProbe,
    SklearnProbe,
)
from inspect_lens.train.families._moments import Moments
from inspect_lens.train.families._sae import SAEFeatureProbe
from inspect_lens.train.sets._store_set import StoreSet

from ._logistic_stream import fit_logistic

_FORMAT: Final = 5
_OF: Final = ":"
_NUMBER, _TENSOR = "number", "tensor"
"""What stands before the name of what is a number, and of one of a head's tensors."""


def keep(estimator: Any, data: StoreSet, layers: Sequence[int], rows: Rows | None) -> None:
    """Write what was learnt, where the store has a folder for it and the family can be kept."""
    file = _file(estimator, data, layers, rows)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, save(_learnt(estimator)))


def restore(estimator: Any, data: StoreSet, layers: Sequence[int], rows: Rows | None) -> bool:
    """Set what a run before has learnt."""
    file = _file(estimator, data, layers, rows)
    if file is None or not file.exists():
        return False
    try:
        learnt = load(file.read_bytes())
    except (OSError, SafetensorError):
        return False
    for name, value in learnt.items():
        kind, _, attribute = name.rpartition(_OF)
        if kind == _NUMBER:
            setattr(estimator, attribute, value[0].item())
        elif kind == _TENSOR:
            estimator.tensors_ = {**getattr(estimator, "tensors_", {}), attribute: value}
        else:
            setattr(estimator, attribute, value)
    estimator.classes_, estimator.n_features_in_ = np.array([0, 1]), data.hidden
    return True


def _file(estimator: Any, data: StoreSet, layers: Sequence[int], rows: Rows | None) -> Path | None:
    # Of a classifier of scikit-learn nobody knows what it learnt; an ensemble learns estimators.
    kept = isinstance(estimator, BinaryEstimator) and not isinstance(
        estimator, SklearnProbe | EnsembleProbe
    )
    if data.work is None or not kept:
        return None
    encoder = getattr(estimator, "encoder", None)
    facts = [
        _FORMAT, estimator.describe(), data.sha256, list(layers), rows,
        None if encoder is None else encoder.sha256,
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
    return data.work / f"{data.name}-{layers[0]}-{digest}.safetensors"


def _learnt(estimator: Any) -> dict[str, NDArray[Any]]:
    """What ends in an underscore, as scikit-learn names what is learnt."""
    made: dict[str, NDArray[Any]] = {}
    for name, value in vars(estimator).items():
        if not name.endswith("_") or name in ("classes_", "n_features_in_"):
            continue
        if isinstance(value, dict):
            made |= {_TENSOR + _OF + key: tensor for key, tensor in value.items()}
        else:
            array = np.asarray(value)
            number = "" if array.ndim else _NUMBER
            made[number + _OF + name] = np.atleast_1d(array)
    return made


_LATENTS: Final = 16 * 1024
"""Bytes per row that features take, which `SAEFeatureProbe` computes some at a time."""
_MATRICES: Final = 8
"""Of hidden x hidden float64, that whitening takes at its peak."""
_FORMULAS: Final = (MeanDifferenceProbe, MassMeanProbe, LDAProbe, LATProbe)
_LOGISTIC: Final = (LogisticProbe, PressureLogisticProbe)


def fits_in_memory(
    estimator: Any, data: StoreSet, layers: Sequence[int], rows: Rows | None
) -> bool:
    """Whether a fit is made in memory; False for one that reads the store piece by piece.

    Raises:
        SpecError: the memory is too small, and the family has no other way.
    """
    by_token = rows in (None, "tokens")
    n = sum(n for _, _, n in data.places) if by_token else len(data)
    layer = 4 * n * data.hidden
    # Rows, scaled rows and what the fit makes of them; heads hold rows once, and a batch.
    copies = 2 if isinstance(estimator, HeadProbe) else 5 * len(layers)
    if isinstance(estimator, EnsembleProbe):
        copies = 2 * len(layers) + 6
    needed = copies * layer + _LATENTS * n * isinstance(estimator, SAEFeatureProbe)
    if needed <= data.memory * 1e9:
        return True
    # Of the very kind: who derives one may fit otherwise.
    streamed = type(estimator) in (*_FORMULAS, *_LOGISTIC)
    streamed = streamed and getattr(estimator, "shrinkage", None) != "ledoit-wolf"
    if streamed and by_token and len(layers) == 1:
        _warn_of(estimator, data, n)
        return False
    name = type(estimator.estimator if isinstance(estimator, SklearnProbe) else estimator).__name__
    pooled = 4e-9 * copies * len(data) * data.hidden
    hint = ""
    if by_token and pooled <= data.memory and not isinstance(estimator, HeadProbe):
        hint = f"fit one row per sample (rows='mean', {pooled:.2g} GB), "
    raise SpecError(
        f"memory={data.memory:g}: {name} is fitted on all {n:,} rows at once, which take "
        f"{layer / 1e9:.2g} GB a layer and {needed / 1e9:.2g} GB with what the fit makes of them; "
        f"allowed is what fits; {hint}state that much memory (memory=, --memory), or take what "
        "reads rows piece by piece: one layer of lr, mean-difference, mass-mean, mass-mean-iid, "
        "lda-ridge or lat, each token a row"
    )


def _warn_of(estimator: DirectionEstimator, data: StoreSet, n: int) -> None:
    """Say that a fit piece by piece holds more than is stated: its matrices, or rows it picks."""
    held = {"matrices": 0, "rows for scales": 0, "pairs": 0}
    if isinstance(estimator, FormulaEstimator) and estimator.needs_covariance:
        held["matrices"] = _MATRICES * 8 * data.hidden**2
    if estimator.scaling != "none":
        picked = rows_for_scale(n)
        held["rows for scales"] = 4 * data.hidden * len(range(n)[picked])
    if isinstance(estimator, LATProbe):
        held["pairs"] = 2 * min(estimator.n_pairs, n // 2) * data.hidden * (4 + 3 * 8)
    # What is picked for scales is gone before pairs are.
    most = max(held["matrices"] + held["rows for scales"], held["pairs"])
    if most > data.memory * 1e9:
        parts = ", ".join(f"{what} {size / 1e9:.2g} GB" for what, size in held.items() if size)
        warnings.warn(
            f"memory={data.memory:g}: {type(estimator).__name__} reads rows piece by piece and "
            f"holds about {most / 1e9:.2g} GB beside them ({parts}); state that much memory "
            "(memory=, --memory), or take a family that holds less, such as lr",
            UserWarning,
            stacklevel=4,
        )


def stream(estimator: DirectionEstimator, data: StoreSet, layer: int) -> None:
    """Fit on the tokens of a layer, which are read piece by piece."""
    labels, hidden = data.row_labels, data.hidden
    if isinstance(estimator, LogisticProbe):
        whiten = 8 * _MATRICES * hidden**2 <= data.memory * 1e9

        def read() -> Iterator[Any]:
            return ((rows, labels[at]) for at, rows in _ahead(data.passes(layer)))

        fit_logistic(estimator, read, hidden, whiten=whiten)
        return
    if isinstance(estimator, LDAProbe):
        estimator.check_shrinkage()
    covariance = isinstance(estimator, FormulaEstimator) and estimator.needs_covariance
    moments = Moments(hidden, covariance=covariance)
    for at, rows in _ahead(data.passes(layer)):
        moments.add(rows, labels[at])
    scale = _scale(estimator, moments, data, layer)
    found = moments.statistics(scale)
    estimator.classes_, estimator.n_features_in_ = np.array([0, 1]), hidden
    if isinstance(estimator, FormulaEstimator):
        estimator.solve(found)
    else:
        assert isinstance(estimator, LATProbe)
        groups = np.repeat(np.array(data.groups), [n for _, _, n in data.places])
        first, second, signs = estimator.pairs(labels, groups)
        picked = _rows_at(np.concatenate([first, second]), data, layer)
        wide = picked.astype(np.float64) / (1.0 if scale is None else scale)
        differences = (wide[: first.size] - wide[first.size :]) * signs[:, None]
        estimator.fit_pairs(differences, found.low, found.high)
    estimator.unscale(scale)


_MAYBE_HUGE: Final = 0.3
"""Share of the variance in 1% of the dimensions below which medians need not be looked at: squares
around a median are at most twice those around the mean, so they call no dimension huge there."""


def _scale(
    estimator: DirectionEstimator, moments: Moments, data: StoreSet, layer: int
) -> NDArray[np.float64] | None:
    """What dimensions are divided by, from rows that are read for it where it may be anything."""
    way, n = estimator.scaling, moments.n
    if way == "none" or n < 4:
        return None
    if way == "auto" and dominated(moments.within_variance())[1] < _MAYBE_HUGE:
        return None
    picks = np.arange(n)[rows_for_scale(n)]
    target = Targets(data.row_labels[picks], None, None)
    rows = _rows_at(picks, data, layer)
    return find_scale(rows, target, way, family=type(estimator).__name__)


def _rows_at(picks: NDArray[np.int64], data: StoreSet, layer: int) -> NDArray[np.float32]:
    """Some rows (picks, hidden) of a layer, by their places, gathered from a pass."""
    made = np.zeros((len(picks), data.hidden), dtype=np.float32)
    slot = np.full(len(data.row_labels), -1)
    slot[picks] = np.arange(len(picks))
    for at, rows in _ahead(data.passes(layer)):
        found = slot[at]
        made[found[found >= 0]] = rows[found >= 0]
    return made


def _ahead(pieces: Iterator[Any]) -> Iterator[Any]:
    """Read one piece ahead in a thread, so that the disk and the processor work at once."""
    with ThreadPoolExecutor(1) as pool:
        take = partial(next, pieces, None)
        waiting = pool.submit(take)
        while (piece := waiting.result()) is not None:
            waiting = pool.submit(take)
            yield piece
