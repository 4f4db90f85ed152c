"""Fits of linear families on stores: piece by piece, and kept for a run that goes on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from inspect_lens.errors import UnsupportedError
from inspect_lens.probe import write_atomic
from inspect_lens.train.families._direction import DirectionEstimator
from inspect_lens.train.sets._store_set import StoreSet

from ._stream import fit_stream

__all__ = ["fit_from_store"]

_FITTED = ("coef_", "mean_", "scale_", "intercept_")


def fit_from_store(estimator: Any, data: StoreSet, layer: int) -> Any:
    """Fit on the tokens of one layer without holding them.

    Args:
        estimator: unfitted.
        data: with or without a folder for fits.
        layer: of the set.

    Returns:
        The estimator, fitted now or by a run before; None for families without a streaming form.
    """
    if not isinstance(estimator, DirectionEstimator):
        return None
    facts = [estimator.describe(), data.sha256, layer]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
    file = None if data.work is None else data.work / f"{data.name}-{layer}-{digest}.safetensors"
    if file is not None and file.exists() and _restore(estimator, file):
        return estimator
    try:
        fit_stream(estimator, lambda: data.source(layer))
    except UnsupportedError:
        return None
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        fitted = {key: np.atleast_1d(np.float64(getattr(estimator, key))) for key in _FITTED}
        write_atomic(file, save(fitted))
    return estimator


def _restore(estimator: Any, file: Path) -> bool:
    """Set what was fitted; False where the file is damaged, and the fit is made again."""
    try:
        fitted = load(file.read_bytes())
        values = {key: fitted[key] for key in _FITTED}
    except (OSError, SafetensorError, KeyError):
        return False
    estimator.coef_, estimator.mean_ = values["coef_"], values["mean_"]
    estimator.scale_, estimator.intercept_ = values["scale_"], float(values["intercept_"][0])
    estimator.classes_, estimator.n_features_in_ = np.array([0, 1]), values["coef_"].size
    return True
