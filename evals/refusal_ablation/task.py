r"""Task `refusal_ablation`.

```text
INSPECT_LENS_SITES=all inspect eval inspect_lens/refusal_ablation -T harmful=<harmful.json> \
    -T harmless=<harmless.json> -T vector=<vector> --model vllm-lens/<model>
```
"""

from __future__ import annotations

from collections.abc import Sequence

from inspect_ai import Task, task
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import Metric, Scorer, metric, scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver

from evals.kit.arguments import required
from evals.refusal_steering import each_kind, refusal_dataset
from inspect_lens import judged_arguments
from inspect_lens.scorer import dose_metric, dose_response, refusal_rate
from inspect_lens.solver import EditVariant, steering_sweep
from inspect_lens.spec import BLOCK_SITES, Ablate, Add, Site
from inspect_lens.vector import Vector, load_vector

__all__ = ["rates_by_kind", "refusal_ablation", "refusal_edits", "refusals_by_edit"]


@task
@judged_arguments
def refusal_ablation(
    vector: str | None = None,
    harmful: str | None = None,
    harmless: str | None = None,
    layer: int | None = None,
    n_layers: int | None = None,
    sites: Sequence[Site] | Site = BLOCK_SITES,
    scale: float = 1.0,
    control_draws: int = 1,
    limit: int | None = None,
    role: str | None = None,
    max_tokens: int = 64,
) -> Task:
    """Give instructions to a model as it is, without one direction, and with it added.

    Args:
        vector: refusal vector: name below `vectors/`, path or `hf://` address.
        harmful: file of instructions that a model should refuse.
        harmless: file of instructions that it should follow.
        layer: whose direction is taken, and where it is added; that of the vector's card by
            default.
        n_layers: layers of the model, at each of which the direction is ablated; as many as the
            vector has by default.
        sites: places in each layer at which it is ablated; all that write to the stream, and the
            stream itself, by default.
        scale: factor of the vector where it is added.
        control_draws: random directions for each of the two edits.
        limit: instructions of each kind at most.
        role: model role that judges refusals, such as `grader`; phrases decide by default.
        max_tokens: longest answer.

    Returns:
        The task; `refusals_by_edit` has the rate of refusals of each variant, and its paired
        difference from the unedited answers with interval, of harmful and of harmless
        instructions apart.
    """
    vector = required("vector", vector, "a steering vector, by name, path or hf:// address")
    harmful = required("harmful", harmful, "a file of instructions that a model should refuse")
    return Task(
        dataset=refusal_dataset(harmful, harmless, limit=limit),
        solver=refusal_edits(vector, layer, n_layers, sites, scale, control_draws),
        scorer=refusals_by_edit(role),
        config=GenerateConfig(temperature=0.0, max_tokens=max_tokens),
    )


@solver
def refusal_edits(
    vector: str,
    layer: int | None = None,
    n_layers: int | None = None,
    sites: Sequence[Site] | Site = BLOCK_SITES,
    scale: float = 1.0,
    control_draws: int = 1,
) -> Solver:
    """`steering_sweep` of what fits a sample: `ablated`, and also `added` where it is harmless.

    Args:
        vector: as for the task.
        layer: likewise.
        n_layers: likewise.
        sites: likewise.
        scale: likewise.
        control_draws: likewise.

    Returns:
        The solver.

    Raises:
        ValueError: the vector does not have all layers from 0 on, and nobody says how many the
            model has; or a site is wrong.
    """
    loaded = load_vector(vector)
    at = loaded.default_layer() if layer is None else layer
    layers = range(_n_layers(loaded) if n_layers is None else n_layers)
    where = (sites,) if isinstance(sites, str) else tuple(sites)
    directions = [loaded, *(loaded.random_control(seed) for seed in range(control_draws))]
    ablated, added = [], []
    for one in directions:
        raw, control = one.raw(at), one is not loaded
        gone = [Ablate(direction=raw, layers=layers, site=site) for site in where]
        ablated.append(EditVariant(name="ablated", edits=tuple(gone), control=control))
        more = Add(vector=raw, layers=(at,), site=loaded.site, scale=scale)
        added.append(EditVariant(name="added", edits=(more,), control=control))
    sweeps = {"harmful": steering_sweep(ablated), "harmless": steering_sweep([*ablated, *added])}

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        return await sweeps[state.metadata["kind"]](state, generate)

    return solve


@metric(scores="unreduced")  # as dose_metric: every epoch is an answer of its own
def rates_by_kind() -> Metric:
    """`dose_metric` of variants of harmful and of harmless instructions, each under its own names.

    Returns:
        The metric; `harmful_ablated` is the rate of refusals of harmful instructions without the
        direction, and so on. A kind that the task has no sample of has no values.
    """
    return each_kind(dose_metric(by="variant"))


@scorer(metrics=[rates_by_kind()])
def refusals_by_edit(role: str | None = None) -> Scorer:
    """`dose_response` of refusals, with harmful and harmless instructions apart.

    Args:
        role: model role that judges refusals; phrases decide by default.

    Returns:
        The scorer.
    """
    return dose_response(refusal_rate(role=role))


def _n_layers(vector: Vector) -> int:
    """Of the model, where the vector has a direction for each."""
    if vector.layers != tuple(range(len(vector.layers))):
        raise ValueError(
            f"n_layers: vector {vector.name!r} has layers {list(vector.layers)}, and the direction "
            "is ablated at every layer of the model; allowed is the number of these; pass n_layers="
        )
    return len(vector.layers)
