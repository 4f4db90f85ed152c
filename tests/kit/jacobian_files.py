"""A Jacobian lens and its coordinates, made by TransformerLens with random numbers.

`python -m tests.kit.jacobian_files` writes those in tests/data; it needs TransformerLens 4.3.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Final

import numpy as np

__all__ = ["FOLDER", "HIDDEN", "LAYERS", "PAIRS", "write_files"]

FOLDER: Final = Path(__file__).parents[1] / "data" / "transformer_lens_4.3.0"
HIDDEN: Final = 16
LAYERS: Final = (0, 1, 2)
PAIRS: Final = (("substitute", 1.0), ("substitute", 0.5), ("swap", 1.0))
"""Mode and strength of the patches."""
_N: Final = 3


def write_files(folder: Path, *, seed: int = 0) -> None:
    """Write `lens.pt`, and `coordinates.npz` with rows and what that package makes of them."""
    room = "transformer_lens.tools.analysis"
    lenses, sparse, patches = (
        importlib.import_module(f"{room}.jacobian_lens{part}")
        for part in ("", "_decomposition", "_coordinate_patch")
    )
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(seed)
    lens = lenses.JacobianLens(
        {layer: torch.randn(HIDDEN, HIDDEN) / 4 for layer in LAYERS}, n_prompts=7, d_model=HIDDEN,
        metadata={"model_name": "org/tiny", "corpus": "random"},
    )  # fmt: skip
    lens.save(str(folder / "lens.pt"))
    rows = torch.randn(_N, HIDDEN)
    transported = {f"transport.{n}": lens.transport(rows, n).numpy() for n in LAYERS}
    dictionary = torch.randn(60, HIDDEN) * (0.2 + torch.rand(60, 1))
    found: dict[str, Any] = {"rows": rows.numpy(), "dictionary": dictionary.numpy(), **transported}
    for i, row in enumerate(rows):
        part = sparse.get_sparse_decomposition(row, dictionary, 6)
        held = sparse.estimate_occupancy(row, dictionary, max_atoms=6, num_control_dictionaries=4)
        found |= {
            f"{i}.support": part.support.numpy(), f"{i}.selected": part.selected_support.numpy(),
            f"{i}.coordinates": part.coordinates.numpy(),
            f"{i}.reconstruction": part.reconstruction.numpy(),
            f"{i}.component": part.j_space_component.numpy(),
            f"{i}.explained": held.marginal_captured_variance.cumsum(0).numpy(),
            f"{i}.occupancy_support": held.support.numpy(),
        }  # fmt: skip
        ends = (int(part.support[0]), int(part.support[-1]))
        absent = next(n for n in range(60) if n not in part.selected_support.tolist())
        for j, (mode, strength) in enumerate(PAIRS):
            for name, target in (("active", ends[1]), ("absent", absent)):
                patch = patches.solve_coordinate_patch(
                    row, dictionary, ends[0], target, k=6, mode=mode, alpha=strength
                )
                found[f"{i}.{j}.{name}"] = patch.patched.numpy()
                found[f"{i}.{name}_target"] = np.array(target)
    np.savez(folder / "coordinates.npz", **found)


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_files(FOLDER)
