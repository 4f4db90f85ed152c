"""Files of the package `lie-detectors`, made by its own classes with random weights.

`python -m tests.kit.lie_detectors` writes those in tests/data; it needs that package:
`pip install --no-deps lie-detectors jaxtyping wadler-lindig`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Final

import numpy as np

__all__ = ["ARCHITECTURES", "FOLDER", "HIDDEN", "LAYER", "write_probes"]

FOLDER: Final = Path(__file__).parents[1] / "data" / "lie_detectors_0.1.0"
ARCHITECTURES: Final = ("dim", "lr", "mlp")
HIDDEN: Final = 256
LAYER: Final = 4
_PUBLISHED: Final = "deception.detectors.utils.types"
"""Module of the enumeration in published files."""


def write_probes(folder: Path, *, seed: int = 0, module: str = _PUBLISHED) -> None:
    """Write `dim.pt`, `lr.pt`, `mlp.pt` and `rows.npz` with rows and that package's own scores."""
    theirs: Any = importlib.import_module("lie_detectors")
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(seed)
    rows = 3 * torch.randn(5, HIDDEN)
    found = {"rows": rows.numpy()}
    theirs.ProbeArchitecture.__module__ = module
    for name in ARCHITECTURES:
        arch = theirs.ProbeArchitecture(name)
        more = {"d_hidden": 6} if name == "mlp" else {}
        probe = theirs.PROBE_REGISTRY[arch](HIDDEN, **more)
        state = probe.state_dict()
        for key, value in state.items():
            if key in ("dataset_mean", "threshold"):
                state[key] = torch.randn(value.shape)
            elif key == "direction":  # scores of a few units: they add up in float32 there
                state[key] = torch.randn(value.shape) / HIDDEN**0.5
            elif key == "dataset_std":
                state[key] = 0.5 + torch.rand(value.shape)
        facts = {"layer": LAYER, "train_dataset": "random", "probe_architecture": arch}
        file = folder / f"{name}.pt"
        torch.save({"state_dict": state, "hyperparams": facts}, file)
        loaded = theirs.load_probe(file)
        with torch.no_grad():
            found[name] = loaded(rows).numpy()
        found[f"{name}.threshold"] = loaded.threshold.numpy()
    np.savez(folder / "rows.npz", **found)


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_probes(FOLDER)
