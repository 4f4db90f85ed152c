"""Fits that a run keeps in a folder, for the run that goes on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from inspect_lens.probe import write_atomic
from inspect_lens.train.families._binary import BinaryEstimator
from inspect_lens.train.families._sequence import SequenceEstimator
from inspect_lens.train.families._sklearn import SklearnProbe

from ._row_view import RowView

__all__ = ["keep", "restore"]

_FORMAT: Final = 3
_NUMBER: Final = "number "
"""Begins the name of what is a number, and no array."""


def keep(estimator: Any, view: RowView, layer: int) -> None:
    """Write what was learnt, where the store has a folder for it and the family can be kept.

    Args:
        estimator: fitted.
        view: rows that it was fitted on.
        layer: of the store.
    """
    file = _file(estimator, view, layer)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, save(_learnt(estimator)))


def restore(estimator: Any, view: RowView, layer: int) -> bool:
    """Set what a run before has learnt.

    Args:
        estimator: unfitted, with the settings that it had.
        view: the same rows.
        layer: of the store.

    Returns:
        Whether it is there; not where the file is damaged, and the fit is made again.
    """
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
