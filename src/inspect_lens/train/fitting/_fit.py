"""Fitting any family on a set, at a layer or at several, in memory or from a store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save
from scipy.linalg import cho_solve, solve_triangular
from scipy.optimize import minimize
from scipy.special import expit
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning

from inspect_lens._base.arguments import judged_arguments, warn_caller
from inspect_lens.errors import SpecError
from inspect_lens.probe import FitRows, write_atomic
from inspect_lens.spec import check_word, several, shown
from inspect_lens.train.families._binary import BinaryEstimator, Targets
from inspect_lens.train.families._direction import (
    DirectionEstimator,
    FormulaEstimator,
    LATProbe,
    LDAProbe,
    MassMeanProbe,
    MeanDifferenceProbe,
    Moments,
    blocks,
)
from inspect_lens.train.families._ensemble import EnsembleProbe
from inspect_lens.train.families._head import HeadProbe
from inspect_lens.train.families._logistic import LogisticProbe, PressureLogisticProbe, SklearnProbe
from inspect_lens.train.families._sae import SAEFeatureProbe
from inspect_lens.train.sets._dataset import ActivationSet
from inspect_lens.train.sets._store_set import StoreSet

__all__ = ["fit_layers", "fit_on"]

Floats = NDArray[np.float64]
Passes: TypeAlias = Callable[[], Iterator[tuple[NDArray[np.float32], NDArray[np.bool_]]]]
"""Starts anew each time: rows (rows, hidden) and whether each is positive."""
_TOL: Final = 1e-4
"""Largest component of the gradient of the mean loss, as in scikit-learn."""
_SAMPLE: Final = 65_536
"""Rows that the preconditioner is made of."""
_OF_PIECE: Final = 2048


def fit_logistic(made: LogisticProbe, read: Passes, hidden: int, *, whiten: bool) -> None:
    """Fit as `LogisticProbe.fit` does."""
    moments, sample = _sums(read, hidden, whiten=whiten)
    mean, scale = moments.standard() if made.standardize else (np.zeros(hidden), np.ones(hidden))
    root, start = _whitener(sample, moments, scale)
    penalty = 1.0 / (made.C * moments.n)
    n_passes = 1

    def loss(whitened: Floats) -> tuple[float, Floats]:
        # Coordinates in which the rows are about white: steps go straight to the optimum.
        nonlocal n_passes
        n_passes += 1
        weight = _solve(root, whitened[:hidden], transposed=True)
        offset = float(whitened[hidden]) if made.fit_intercept else 0.0
        total, slope, slope_offset = _loss(read, weight / scale, offset, mean)
        value = total / moments.n + 0.5 * penalty * float(weight @ weight)
        slope = _solve(root, slope / scale / moments.n + penalty * weight, transposed=False)
        extra = [slope_offset / moments.n] if made.fit_intercept else []
        return value, np.append(slope, extra)

    begin = root * start if root.ndim == 1 else root.T @ start
    found = minimize(
        loss,
        np.append(begin, [0.0] if made.fit_intercept else []),
        jac=True,
        method="L-BFGS-B",
        # Sums of float32 logits are no surer than that: a stricter stop searches in the noise.
        options={"maxiter": made.max_iter, "gtol": _TOL, "ftol": _TOL * 1e-5},
    )
    if found.nit >= made.max_iter:
        warn_caller(
            f"logistic regression: L-BFGS stopped after max_iter={made.max_iter} steps without "
            f"reaching tol={_TOL:g}; raise max_iter",
            ConvergenceWarning,
        )
    made.mean_, made.scale_ = mean, scale
    made.coef_ = _solve(root, found.x[:hidden], transposed=True)
    made.intercept_ = float(found.x[hidden]) if made.fit_intercept else 0.0
    made.n_iter_, made.n_passes_ = int(found.nit), n_passes


def _sums(read: Passes, hidden: int, *, whiten: bool) -> tuple[Moments, Moments | None]:
    """Sums over all rows and, for whitening, those of a sample with their covariance."""
    moments = Moments(hidden)
    sample = Moments(hidden, covariance=True) if whiten else None
    rng = np.random.default_rng(0)
    for rows, positive in read():
        moments.add(rows, positive)
        if sample is not None and sample.n < _SAMPLE:
            # At random: an even stride over rows whose classes alternate sees one class only.
            part = np.sort(rng.permutation(len(rows))[:_OF_PIECE])
            sample.add(rows[part], positive[part])
    return moments, sample


def _whitener(sample: Moments | None, moments: Moments, scale: Floats) -> tuple[Floats, Floats]:
    """Root of about the covariance of scaled rows, and weights to start from."""
    # The root is a lower triangle (hidden, hidden), or (hidden,) of a diagonal matrix. For Gaussian
    # classes the discriminant of the covariance is the logistic optimum itself.
    found = moments.statistics(scale)
    gap = found.high - found.low
    # Some directions say nothing in a few rows, some columns are constant: not all is divided by.
    diagonal = np.maximum((moments.standard()[1] / scale) ** 2, 1e-6)
    if sample is None or not sample.weight.all():
        return np.sqrt(diagonal), gap / diagonal
    covariance = sample.statistics(scale).within
    diagonal = np.maximum(np.diag(covariance), 1e-6)
    # A sample of fewer rows than columns says nothing of some directions: shrink to a diagonal.
    share = gap.size / (gap.size + sample.n)
    covariance *= 1.0 - share
    covariance[np.diag_indices_from(covariance)] += share * diagonal + 1e-6
    root = np.linalg.cholesky(covariance)
    return np.asarray(root), np.asarray(cho_solve((root, True), gap))


def _solve(root: Floats, vector: Floats, *, transposed: bool) -> Floats:
    if root.ndim == 1:
        return vector / root
    return np.asarray(solve_triangular(root, vector, lower=True, trans=int(transposed)))


def _loss(read: Passes, weight: Floats, offset: float, mean: Floats) -> tuple[float, Floats, float]:
    """Sum of the losses over all rows, and its slopes by weight and offset; one pass."""
    total, slope, slope_offset = 0.0, np.zeros(weight.size), 0.0
    narrow, centre = weight.astype(np.float32), mean.astype(np.float32)
    for rows, positive in read():
        for part in blocks(len(rows), weight.size):
            z = rows[part] - centre
            logits = (z @ narrow).astype(np.float64) + offset
            target = positive[part]
            total += float((np.logaddexp(0.0, logits) - target * logits).sum())
            gap = expit(logits) - target
            slope += gap.astype(np.float32) @ z
            slope_offset += float(gap.sum())
    return total, slope, slope_offset


_FORMAT: Final = 7


def keep(estimator: Any, data: StoreSet, layers: Sequence[int], rows: FitRows | None) -> None:
    """Write what was learnt, where the store has a folder for it and the family can be kept."""
    file = _file(estimator, data, layers, rows)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        # What ends in an underscore, as scikit-learn names what is learnt.
        learnt = {name: value for name, value in vars(estimator).items() if name.endswith("_")}
        learnt |= learnt.pop("tensors_", {})
        del learnt["classes_"], learnt["n_features_in_"]
        # Of a number, numpy's contiguous array would have an axis.
        arrays = {k: np.ascontiguousarray(v).reshape(np.shape(v)) for k, v in learnt.items()}
        write_atomic(file, save(arrays))


def restore(estimator: Any, data: StoreSet, layers: Sequence[int], rows: FitRows | None) -> bool:
    """Set what a run before has learnt."""
    file = _file(estimator, data, layers, rows)
    if file is None or not file.exists():
        return False
    try:
        learnt = load(file.read_bytes())
    except (OSError, SafetensorError):
        return False
    for name in [name for name in learnt if name.endswith("_")]:
        value = learnt.pop(name)
        setattr(estimator, name, value if value.ndim else value.item())
    if learnt:  # the rest are a head's
        estimator.tensors_ = learnt
    estimator.classes_, estimator.n_features_in_ = np.array([0, 1]), data.hidden
    return True


def _file(
    estimator: Any, data: StoreSet, layers: Sequence[int], rows: FitRows | None
) -> Path | None:
    # Of a classifier of scikit-learn nobody knows what it learnt; an ensemble learns estimators.
    if data.work is None or isinstance(estimator, SklearnProbe | EnsembleProbe):
        return None
    encoder = getattr(estimator, "encoder", None)
    facts = [_FORMAT, estimator.describe(), data.sha256, list(layers), rows]
    facts.append(None if encoder is None else encoder.sha256)
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
    return data.work / f"{data.name}-{layers[0]}-{digest}.safetensors"


_LATENTS: Final = 16 * 1024
"""Bytes per row that features take, which `SAEFeatureProbe` computes some at a time."""
_MATRICES: Final = 8
"""Of hidden x hidden float64, that whitening takes at its peak."""
_FORMULAS: Final = (MeanDifferenceProbe, MassMeanProbe, LDAProbe, LATProbe)
_LOGISTIC: Final = (LogisticProbe, PressureLogisticProbe)


def fits_in_memory(
    estimator: Any, data: StoreSet, layers: Sequence[int], rows: FitRows | None
) -> bool:
    """Whether a fit is made in memory, or piece by piece; SpecError where neither is possible."""
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
        f"allowed is what fits; {hint}state that much memory (memory=), or take what "
        "reads rows piece by piece: one layer of lr, mean-difference, mass-mean, mass-mean-iid, "
        "lda-ridge or lat, each token a row"
    )


def _warn_of(estimator: DirectionEstimator, data: StoreSet, n: int) -> None:
    """Say that a fit piece by piece holds more than is stated: its matrices, or rows it picks."""
    what, held = "", 0
    if isinstance(estimator, FormulaEstimator) and estimator.needs_covariance:
        what, held = "matrices", _MATRICES * 8 * data.hidden**2
    if isinstance(estimator, LATProbe):
        what, held = "pairs", 2 * min(estimator.n_pairs, n // 2) * data.hidden * (4 + 3 * 8)
    if held > data.memory * 1e9:
        warn_caller(
            f"memory={data.memory:g}: {type(estimator).__name__} reads rows piece by piece and "
            f"holds about {held / 1e9:.2g} GB beside them ({what}); state that much memory "
            "(memory=), or take a family that holds less, such as lr",
        )


def stream(estimator: LogisticProbe | FormulaEstimator, data: StoreSet, layer: int) -> None:
    """Fit on the tokens of a layer, which are read piece by piece."""
    labels, hidden = data.row_labels, data.hidden
    estimator.classes_, estimator.n_features_in_ = np.array([0, 1]), hidden
    if isinstance(estimator, LogisticProbe):
        whiten = 8 * _MATRICES * hidden**2 <= data.memory * 1e9

        def read() -> Iterator[Any]:
            return ((rows, labels[at]) for at, rows in _ahead(data.passes(layer)))

        fit_logistic(estimator, read, hidden, whiten=whiten)
        return
    moments = Moments(hidden, covariance=estimator.needs_covariance)
    for at, rows in _ahead(data.passes(layer)):
        moments.add(rows, labels[at])
    groups = None
    if isinstance(estimator, LATProbe):
        groups = np.repeat(np.array(data.groups), [n for _, _, n in data.places])
    estimator.learn(moments, Targets(labels, groups, None), partial(_rows_at, data, layer))


def _rows_at(data: StoreSet, layer: int, picks: NDArray[np.int64]) -> NDArray[np.float32]:
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


def rows_of(estimator: BinaryEstimator, rows: FitRows | None) -> FitRows | None:
    """What one row of a fit is; None for families that read sequences."""
    if estimator.reads == "sequences":
        return None
    base = getattr(estimator, "base", None) or estimator
    own: FitRows = getattr(base, "default_rows", "tokens")
    return rows or own


@judged_arguments
def fit_on(
    estimator: BinaryEstimator,
    data: ActivationSet,
    layer: int | Sequence[int],
    *,
    rows: FitRows | None = None,
) -> BinaryEstimator:
    """Fit a family on the selected tokens of a set; of a `StoreSet`, as `fit_layers` does it.

    Args:
        estimator: unfitted.
        data: the set.
        layer: one of its layers; several for an `EnsembleProbe`, whose rows hold them one after
            the other.
        rows: what one row is, for families that read rows; that of its source by default.

    Raises:
        SpecError: the layer is not in the set, several are given to a family that reads
            sequences, `rows` is unknown, or a fit needs more memory than a `StoreSet` states.

    Example:
        ```python
        from inspect_lens.probe import ProbeCard
        from inspect_lens.train import ActivationSet, LDAProbe, fit_on

        train = ActivationSet.load("acts/train.safetensors")
        fitted = fit_on(LDAProbe(), train, 1)
        probe = fitted.to_probe(ProbeCard(name="mine/lda", layers=(1,), hidden=32))
        assert train.scores(probe).shape == (len(train),)
        ```
    """
    layers = _judged("layer", layer, data, rows)
    if estimator.reads == "sequences" and len(layers) > 1:
        raise SpecError(f"layer={layer}: this family reads one layer; name one")
    rows = rows_of(estimator, rows)
    if not isinstance(data, StoreSet):
        return _fit_held(estimator, data, layers, rows)
    if not restore(estimator, data, layers, rows):
        if fits_in_memory(estimator, data, layers, rows):
            _fit_held(estimator, data, layers, rows)
        else:
            stream(cast(Any, estimator), data, layers[0])
        keep(estimator, data, layers, rows)
    return estimator


@judged_arguments
def fit_layers(
    estimator: BinaryEstimator,
    data: ActivationSet,
    layers: Sequence[int],
    *,
    rows: FitRows | None = None,
) -> Iterator[tuple[int, BinaryEstimator]]:
    """Fit a family at several layers, each on its own; gives layer and fitted estimator.

    Where a layer of a `StoreSet`, with the copies that the fit makes, is larger than the memory
    that the set states, difference of means, mass-mean, LDA (without Ledoit and Wolf's shrinkage)
    and LAT read the layer once, and logistic regression about ten times. They hold a few matrices
    of hidden² numbers. Other families refuse before they read.

    With a folder for fits (`StoreSet(work=)`), a run that was stopped goes on at the layer that it
    was in, but for classifiers of scikit-learn and ensembles.

    Args:
        estimator: unfitted; it is cloned for each layer.
        data: the set.
        layers: of the set.
        rows: as in `fit_on`.

    Raises:
        SpecError: as `fit_on`.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, LDAProbe, fit_layers

        train = ActivationSet.load("acts/train.safetensors")
        fits = dict(fit_layers(LDAProbe(), train, train.layers))
        assert fits[1].coef_.shape == (train.hidden,)
        ```
    """
    chosen = _judged("layers", layers, data, rows)  # all, before the first is fitted
    return ((layer, fit_on(clone(estimator), data, layer, rows=rows)) for layer in chosen)


def _judged(
    name: str, layers: int | Sequence[int], data: ActivationSet, rows: FitRows | None
) -> tuple[int, ...]:
    if rows is not None:
        check_word("rows", rows, FitRows)
    chosen = tuple(several(layers))
    if not chosen or not set(chosen) <= set(data.layers):
        raise SpecError(
            f"{name}={shown(layers)}: name one of the layers of the set, {list(data.layers)}"
        )
    return chosen


def _fit_held(
    estimator: BinaryEstimator, data: ActivationSet, layers: Sequence[int], rows: FitRows | None
) -> BinaryEstimator:
    """Fit with all rows of the layers in memory."""
    groups = np.array(data.groups)
    if estimator.reads == "sequences":
        return estimator.fit(data.sequences(layers[0]), data.labels, groups)
    weights, labels = _sample_weights(estimator, data), data.labels
    if rows == "tokens":
        x, labels, groups = data.rows(layers[0])
        parts = [x, *(data.rows(at)[0] for at in layers[1:])]
        if weights is not None:
            weights = np.repeat(weights, [int(m.sum()) for m in data.mask])
    else:
        assert rows is not None
        parts = [data.pooled(at, rows) for at in layers]
    wide = np.hstack(parts) if len(parts) > 1 else parts[0]
    extra = {} if weights is None else {"sample_weight": weights}
    return estimator.fit(wide, labels, groups, **extra)


def _sample_weights(estimator: BinaryEstimator, data: ActivationSet) -> NDArray[np.float64] | None:
    """Weights (samples,) of the column that an estimator names; None where it names none."""
    column = getattr(estimator, "sample_weight", "")
    if not column:
        return None
    values = data.key(column)
    try:
        weights = np.array([float(value) for value in values])
    except ValueError:
        weights = np.full(len(values), np.nan)
    if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.any()):
        raise SpecError(
            f"sample_weight={column!r}: {data.name} holds values that are no weights; allowed are "
            "finite numbers, none negative and not all 0"
        )
    return weights
