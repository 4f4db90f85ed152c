"""Taking a direction out of activations."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens.errors import SpecError

__all__ = ["erase"]

Floats = NDArray[np.float64]


def erase(
    x: ArrayLike,
    direction: ArrayLike,
    *,
    covariance: ArrayLike | None = None,
    mean: ArrayLike | None = None,
) -> Floats:
    """Remove one direction from rows.

    Args:
        x: (rows, hidden).
        direction: (hidden,). Without a covariance it is projected out. With one it is the
            covariance of the rows with the concept, and what a linear predictor could read of
            the concept is taken out with the least change (LEACE of rank one).
        covariance: (hidden, hidden) of the rows that the concept was measured on.
        mean: (hidden,) of those rows, which a covariance needs: without it, what is taken out would
            move the mean.

    Returns:
        (rows, hidden).

    Raises:
        SpecError: the direction is zero, or a covariance comes without a mean.

    Source:
        LEACE: arXiv:2306.03819.

    Example:
        ```python
        import numpy as np

        from inspect_lens.train import erase

        rows = np.random.default_rng(0).standard_normal((10, 8))
        left = erase(rows, np.eye(8)[0])
        assert np.allclose(left[:, 0], 0.0)
        ```
    """
    if (covariance is None) != (mean is None):
        raise SpecError(
            "covariance and mean: one without the other; allowed are both, of the same rows, or "
            "neither; a covariance without the mean moves the mean of what is left"
        )
    rows, w = np.asarray(x, dtype=np.float64), np.asarray(direction, dtype=np.float64)
    reader = w if covariance is None else np.linalg.pinv(
        np.asarray(covariance, dtype=np.float64), hermitian=True
    ) @ w  # fmt: skip
    strength = float(w @ reader)
    if strength <= 0.0:
        raise SpecError("direction: is zero; allowed is a direction; the concept is not in x")
    centre = 0.0 if mean is None else np.asarray(mean, dtype=np.float64)
    made: Floats = rows - np.outer((rows - centre) @ reader, w) / strength
    return made
