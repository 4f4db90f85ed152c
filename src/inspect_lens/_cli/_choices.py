"""What options take, where it is one of a few words, so that `--help` and errors list them.

Libraries that train own most of these words, and importing them takes seconds, so they stand here
too; `tests/unit/cli/test_help.py` holds both equal.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

# typer takes no list of literals
Family = StrEnum("Family", {
    "LR": "lr", "LR_PRESSURE": "lr-pressure", "LR_GOT": "lr-got",
    "MEAN_DIFFERENCE": "mean-difference", "MASS_MEAN": "mass-mean",
    "MASS_MEAN_IID": "mass-mean-iid", "LDA": "lda", "LDA_RIDGE": "lda-ridge", "LAT": "lat",
    "MLP": "mlp", "ATTENTION": "attention", "ATTENTION_LITE": "attention-lite",
    "ATTENTION_GDM": "attention-gdm", "MULTIMAX": "multimax",
    "ROLLING_ATTENTION": "rolling-attention", "GATED_BIPOLAR": "gated-bipolar",
    "BILINEAR": "bilinear", "SEGMENT_COHERENCE": "segment-coherence", "SAE": "sae",
    "ENSEMBLE": "ensemble",
})  # fmt: skip
VectorMethod = StrEnum("VectorMethod", {
    "MEAN_DIFFERENCE": "mean_difference", "CAA": "caa", "LOGISTIC": "logistic", "PCA": "pca",
})  # fmt: skip
SelectBy = Literal["recall", "auroc"]
ExportFormat = Literal["repeng", "steering-vectors", "persona", "ibm", "safetensors"]
LieDetector = Literal[
    "apollo", "targeted", "did-you-lie", "were-you-honest", "were-you-truthful"
]  # fmt: skip
Dtype = Literal["float32", "bfloat16"]
OverCalls = Literal["last", "all"]
