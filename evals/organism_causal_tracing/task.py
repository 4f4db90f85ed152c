r"""Task `organism_causal_tracing`.

```text
inspect eval inspect_lens/organism_causal_tracing --model vllm-lens/organism
```
"""

from __future__ import annotations

from typing import Any, cast

from inspect_ai import Task, task
from inspect_ai.scorer import (
    CORRECT,
    INCORRECT,
    Metric,
    SampleScore,
    Score,
    Scorer,
    Target,
    accuracy,
    metric,
    scorer,
    stderr,
)
from inspect_ai.solver import TaskState

from evals.organism_causal_tracing.dataset import fact_dataset
from inspect_lens import judged_arguments
from inspect_lens.patch import CausalTrace
from inspect_lens.solver import causal_trace

__all__ = ["chance_share", "organism_causal_tracing", "planted_position"]


@task
@judged_arguments
def organism_causal_tracing(
    split: str = "control", noise: float = 5.0, draws: int = 4, window: int = 1, early: int = 1
) -> Task:
    """Trace facts of the organism, and ask whether the early site is the name that each is about.

    Args:
        split: whose open questions give the facts.
        noise: standard deviations of the noise at the name's embeddings.
        draws: of the noise.
        window: layers that are restored together.
        early: layers from the bottom in which the name is looked for.

    Returns:
        The task; `accuracy` of `planted_position` is the share of facts whose name was found, and
        `chance_share` what a random position would find.
    """
    return Task(
        dataset=fact_dataset(split),
        solver=causal_trace(raw=True, noise=noise, draws=draws, window=window),
        scorer=planted_position(early),
    )


@metric
def chance_share() -> Metric:
    """Share of the restored positions that belong to the subject, mean over samples.

    Returns:
        The metric: what a position drawn at random would score.
    """

    def share(scores: list[SampleScore]) -> float:
        found = [cast("dict[str, Any]", s.score.metadata)["chance"] for s in scores]
        return float(sum(found) / len(found)) if found else float("nan")

    return share


@scorer(metrics=[accuracy(), stderr(), chance_share()])
def planted_position(early: int = 1) -> Scorer:
    """Whether the largest indirect effect in the first layers is at the subject.

    In later layers the last token has everything, whatever the fact is about.

    Args:
        early: layers that count, from the bottom.

    Returns:
        The scorer; it reads the trace from the sample's store, so it needs no server.
    """

    async def score(state: TaskState, target: Target) -> Score:
        trace = CausalTrace.from_json(state.store.get("causal_trace"))
        best = trace.best(layers=trace.layers[: max(1, early)])
        return Score(
            value=CORRECT if best.position in trace.subject else INCORRECT,
            answer=trace.tokens[best.position],
            metadata={
                "layer": best.layer,
                "position": best.position,
                "recovered": best.recovered,
                "total_effect": trace.total_effect,
                "chance": len(set(trace.subject) & set(trace.positions)) / len(trace.positions),
            },
        )

    return score
