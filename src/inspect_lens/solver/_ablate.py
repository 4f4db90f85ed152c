"""`ablate_direction`: generate, or run another solver, with one direction removed."""

from __future__ import annotations

from collections.abc import Sequence

from inspect_ai.agent import Agent
from inspect_ai.solver import Solver, solver

from inspect_lens.spec import Ablate, Positions, Site, parse_positions
from inspect_lens.vector import VectorLike, load_vector

from ._edits import with_edits

__all__ = ["ablate_direction"]


@solver
def ablate_direction(
    vector: VectorLike,
    layers: Sequence[int] | int | None = None,
    layer: int | None = None,
    site: Site | None = None,
    strength: float = 1.0,
    positions: Positions | Sequence[int] = "all",
    inner: Solver | Agent | None = None,
) -> Solver:
    """Generate without one direction of the stream, or run a solver or an agent without it.

    One direction is removed at every chosen layer: `h - strength·⟨h, v⟩·v`. Where a model needs
    it to do something, such as to refuse, it no longer can. The scope is that of `with_edits`.

    Args:
        vector: name below `vectors/`, path, `hf://` address, or a vector; `Vector.from_raw` makes
            one of bare numbers. Its length does not matter.
        layers: where it is removed; by default all layers of the vector's card. Arditi et al.
            remove it at every layer of the model.
        layer: whose direction of the vector is taken; that of its card by default.
        site: place in the block; that of the vector by default.
        strength: share that is removed: 1 removes all of it, 2 reflects.
        positions: tokens that lose it, as an edit takes them.
        inner: what to run; `generate()` by default.

    Returns:
        The solver.

    Raises:
        ArtifactError: no such vector.
        SpecError: no direction at that layer, or a value is wrong.
        UnsupportedError: when it runs, the model has no lens.

    Source:
        arXiv:2406.11717, directional ablation.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.scorer import includes

        from evals.organism_deception import organism_dataset
        from inspect_lens.solver import ablate_direction

        task = Task(
            dataset=organism_dataset("demo")[:2],
            solver=ablate_direction("organism/truth", layers=[4]),
            scorer=includes(),
        )
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=14)
        assert log.status == "success"
        ```
    """
    loaded = load_vector(vector)
    direction = loaded.raw(loaded.default_layer() if layer is None else layer)
    where: Sequence[int] | int = loaded.layers if layers is None else layers
    edit = Ablate(
        direction=direction,
        layers=(where,) if isinstance(where, int) else tuple(where),
        site=loaded.site if site is None else site,
        positions=parse_positions(positions, field="positions"),
        strength=strength,
    )
    made: Solver = with_edits(edit, inner=inner)
    return made
