"""Every family by name, with the settings of its source."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, Final

from inspect_lens.errors import SpecError, did_you_mean
from inspect_lens.spec import check_word

from ._binary import BinaryEstimator
from ._direction import LATProbe, LDAProbe, MassMeanProbe, MeanDifferenceProbe
from ._ensemble import EnsembleProbe
from ._head import HeadProbe
from ._logistic import LogisticProbe, PressureLogisticProbe, TorchLogisticProbe
from ._sae import SAEFeatureProbe

__all__ = ["FAMILIES", "make_estimator"]

_GDM: Final[dict[str, Any]] = {"heads": 10, "mlp_sizes": (100, 100), "lr": 1e-4,
                               "weight_decay": 3e-3, "origin": "arXiv:2601.11516"}  # fmt: skip

FAMILIES: Final[dict[str, tuple[Callable[..., Any], dict[str, Any]]]] = {
    "lr": (LogisticProbe, {}),
    "lr-pressure": (PressureLogisticProbe, {}),
    "lr-got": (TorchLogisticProbe, {}),
    "mean-difference": (MeanDifferenceProbe, {}),
    "mass-mean": (MassMeanProbe, {}),
    "mass-mean-iid": (MassMeanProbe, {"iid": True}),
    "lda": (LDAProbe, {}),
    "lda-ridge": (LDAProbe, {"shrinkage": "ridge"}),
    "lat": (LATProbe, {}),
    "mlp": (HeadProbe, {"pool": "", "mlp_sizes": (128,), "weight_decay": 1e-2, "steps": 2000,
                        "batch": 256, "patience": 20, "origin": "arXiv:2601.11516"}),
    "attention": (HeadProbe, {"heads": 8, "queries": "zeros", "position": True, "lr": 1e-4,
                              "steps": 2000, "patience": 100,
                              "origin": "EleutherAI attention-probes"}),
    "attention-lite": (HeadProbe, {"scaled": True, "lr": 5e-3, "weight_decay": 1e-3,
                                   "origin": "arXiv:2506.10805"}),
    "attention-gdm": (HeadProbe, _GDM),
    "multimax": (HeadProbe, _GDM | {"pool": "multimax"}),
    "rolling-attention": (HeadProbe, _GDM | {"pool": "rolling_attention:10"}),
    "gated-bipolar": (HeadProbe, {"pool": "bipolar", "heads": 64, "mlp_sizes": (128,),
                                  "layer_norm": True, "softplus_gate": True, "l1": 1e-5,
                                  "orthogonal": 1e-4, "lr": 5e-4, "weight_decay": 1e-3,
                                  "batch": 32, "origin": "arXiv:2601.11516"}),
    "bilinear": (HeadProbe, {"pool": "", "mlp_sizes": (32,), "activation": "square",
                             "weight_decay": 1e-3, "steps": 2000, "batch": 256, "patience": 20,
                             "origin": "arXiv:2509.26238"}),
    "segment-coherence": (HeadProbe, {"pool": "ema_max:0.1", "segment": 16,
                                      "segment_variance": 0.01, "origin": "arXiv:2604.14865"}),
    "sae": (SAEFeatureProbe, {}),
    "ensemble": (EnsembleProbe, {}),
}  # fmt: skip
"""Probe families by name, each with its class and settings."""


def make_estimator(name: str, **settings: Any) -> BinaryEstimator:
    """Make an unfitted estimator by the name of its family.

    Args:
        name: one of `FAMILIES`.
        **settings: of its class, instead of those of its source; for `sae` also `folder`, that
            of an SAE as `read_sae` takes it, and `norm_scale`.

    Raises:
        SpecError: an unknown name or setting.
        ArtifactError: the folder of an SAE is not one.

    Example:
        ```python
        from inspect_lens.train import FAMILIES, make_estimator

        assert {"lr", "lda", "attention", "multimax"} <= set(FAMILIES)
        estimator = make_estimator("lr", C=0.5)
        print(estimator.describe())
        ```
    """
    check_word("family", name, FAMILIES)
    kind, defaults = FAMILIES[name]
    if kind is SAEFeatureProbe and "folder" in settings:
        kind = SAEFeatureProbe.from_sae
        settings["path"] = settings.pop("folder")
    try:
        made: BinaryEstimator = kind(**{**defaults, **settings})
    except TypeError as error:
        takes = signature(kind).parameters
        wrong = [key for key in settings if key not in takes]
        why = f"has no setting {wrong[0]!r}; {did_you_mean(wrong[0], takes)}" if wrong else error
        raise SpecError(f"family={name!r}: {why}") from None
    return made
