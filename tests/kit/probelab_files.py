"""Files of the package `probelab`, made and fitted by its own classes.

`python -m tests.kit.probelab_files` writes those in tests/data; it needs that package:
`pip install --no-deps probelab`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Final

import numpy as np

__all__ = ["FAMILIES", "FOLDER", "HIDDEN", "REFUSED", "write_probes"]

FOLDER: Final = Path(__file__).parents[1] / "data" / "probelab_0.1.0"
HIDDEN: Final = 12
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "Logistic": {},
    "MassMean": {"normalize": True},
    "MLP": {"hidden_dim": 5, "n_epochs": 3},
    "Bilinear": {"rank": 3, "n_epochs": 3, "learning_rate": 0.05},
    "GatedBipolar": {"mlp_hidden_dim": 5, "gate_dim": 3, "n_epochs": 3, "learning_rate": 0.05},
    "MultiMax": {"n_heads": 3, "mlp_hidden_dim": 5, "n_epochs": 3, "learning_rate": 0.05},
    "SoftAttention": {"n_heads": 2, "hidden_dim": 5, "n_epochs": 3, "learning_rate": 0.05},
    "PositionalAttention": {"n_heads": 2, "n_epochs": 3, "learning_rate": 0.05},
}
REFUSED: Final[dict[str, dict[str, Any]]] = {"TPC": {"rank": 2, "n_epochs": 1}}
"""Classes whose files are not read."""


def write_probes(folder: Path, *, seed: int = 0) -> None:
    """Write a file for each class, and `rows.npz` with rows and that package's own log odds."""
    theirs: Any = importlib.import_module("probelab")
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(seed)
    rows = 1.5 + 2 * torch.randn(40, 9, HIDDEN)  # samples, tokens, hidden
    labels = torch.arange(40) % 2
    rows[labels == 1, :, 0] += 1.0
    acts = theirs.Activations(rows, dims="bsh")
    found = {"rows": rows[:4].numpy()}
    for name, settings in (FAMILIES | REFUSED).items():
        probe = getattr(theirs.probes, name)(seed=seed, device="cpu", **settings)
        probe.fit(acts, labels)
        probe.save(folder / f"{name}.pt")
        with torch.no_grad():
            found[name] = probe.predict_logits(acts)[:4].numpy()
    np.savez(folder / "rows.npz", **found)


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_probes(FOLDER)
