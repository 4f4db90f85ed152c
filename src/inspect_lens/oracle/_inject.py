"""From activations to the vectors that are put in, those of the controls included."""

from __future__ import annotations

from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import SpecError
from inspect_lens.spec import SteeringVector

from ._config import OracleConfig

__all__ = ["CONTROLS", "Control", "injection", "parse_controls", "random_rows", "shuffled_rows"]

Control = Literal["text_only", "shuffled", "random"]
"""`text_only`: the same prompt and no vector. `shuffled`: the rows with their dimensions
permuted. `random`: Gaussian rows of the same norms."""

CONTROLS: Final[tuple[Control, ...]] = get_args(Control)
"""Names of the controls that can be asked beside an oracle."""


def injection(
    config: OracleConfig, rows: NDArray[np.float32], positions: tuple[int, ...]
) -> SteeringVector:
    """Make the edits that add rows at placeholders: `h + coefficient * ||h|| * v / ||v||`.

    Only the prompt is touched: positions are those of placeholders, which are in it.

    Args:
        config: format of the oracle.
        rows: (rows, hidden) float32, one for each placeholder in order; none of them zero.
        positions: of the placeholders.

    Returns:
        One vector at the output of block `hook_onto_layer`.

    Raises:
        SpecError: rows and positions do not fit, or a row is zero or not finite.

    Example:
        ```python
        import numpy as np

        from inspect_lens.oracle import injection, read_config

        rows = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
        vector = injection(read_config("oracles/organism"), rows, (2, 3, 4))
        assert vector.norm_match
        assert vector.layer_indices == (1,)
        assert vector.position_indices == (2, 3, 4)
        ```
    """
    if rows.ndim != 2 or rows.shape[0] != len(positions):
        raise SpecError(
            f"oracle: rows have shape {rows.shape} for {len(positions)} placeholders; needed is "
            "(placeholders, hidden)"
        )
    norms = np.linalg.norm(rows.astype(np.float64), axis=-1)
    if not np.isfinite(norms).all() or not norms.all():
        at = int(np.flatnonzero(~(np.isfinite(norms) & (norms > 0)))[0])
        raise SpecError(f"oracle: row {at} of the activations is zero or not finite")
    return SteeringVector(
        activations=rows[np.newaxis],
        layer_indices=(config.hook_onto_layer,),
        scale=config.steering_coefficient,
        norm_match=True,
        position_indices=positions,
    )


def shuffled_rows(rows: NDArray[np.float32], *, seed: int | tuple[int, ...]) -> NDArray[np.float32]:
    """Permute the dimensions of all rows in the same way, as a control.

    Norms, the values in each row and all angles between rows stay; what is lost is which
    direction of the stream a value belongs to, and so all that the model wrote there. It needs
    no other sample, so a log can be scored again one sample at a time.

    Args:
        rows: (rows, hidden).
        seed: of the permutation.

    Example:
        ```python
        import numpy as np

        from inspect_lens.oracle import shuffled_rows

        rows = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
        control = shuffled_rows(rows, seed=1)
        assert np.allclose(
            control @ control.T, rows @ rows.T, rtol=1e-4
        )  # all norms and angles stay
        ```
    """
    order = np.random.default_rng(seed).permutation(rows.shape[-1])
    made: NDArray[np.float32] = np.ascontiguousarray(rows[..., order])
    return made


def random_rows(rows: NDArray[np.float32], *, seed: int | tuple[int, ...]) -> NDArray[np.float32]:
    """Draw Gaussian rows with the norms of the given rows, as a control.

    Args:
        rows: (rows, hidden).
        seed: of the draw.

    Example:
        ```python
        import numpy as np

        from inspect_lens.oracle import random_rows

        rows = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
        control = random_rows(rows, seed=1)
        assert np.allclose(np.linalg.norm(control, axis=1), np.linalg.norm(rows, axis=1), rtol=1e-4)
        ```
    """
    drawn = np.random.default_rng(seed).standard_normal(rows.shape)
    norms = np.linalg.norm(rows.astype(np.float64), axis=-1, keepdims=True)
    scaled = drawn / np.linalg.norm(drawn, axis=-1, keepdims=True) * norms
    made: NDArray[np.float32] = scaled.astype(np.float32)
    return made


def parse_controls(controls: bool | str | list[str] | tuple[str, ...]) -> tuple[Control, ...]:
    """Read controls as a user writes them: true for all, false for none, or names.

    Raises:
        SpecError: an unknown name.
    """
    if isinstance(controls, bool):
        return CONTROLS if controls else ()
    names = [controls] if isinstance(controls, str) else list(controls)
    if unknown := [name for name in names if name not in CONTROLS]:
        raise SpecError(
            f"controls={controls!r}: {unknown[0]!r} is none; allowed are {', '.join(CONTROLS)}, "
            "true for all of them and false for none"
        )
    return tuple(name for name in CONTROLS if name in names)
