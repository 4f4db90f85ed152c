r"""Task `geometry_of_truth`.

```text
inspect eval inspect_lens/geometry_of_truth -T data=<cities.csv> -T probe=<probe> \
    --model vllm-lens/<model>
```
"""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.scorer import Scorer, grouped, scorer

from evals.kit.arguments import required, required_probe
from evals.kit.samples import load_samples
from inspect_lens import judged_arguments
from inspect_lens.probe import load_probe
from inspect_lens.scorer import auroc_metric, probe_score, threshold_accuracy
from inspect_lens.solver import read_given
from inspect_lens.spec import Positions
from inspect_lens.view import probe_viewer

__all__ = ["geometry_of_truth", "statement_probe"]


@task
@judged_arguments
def geometry_of_truth(
    probe: str | None = None,
    data: str | None = None,
    layer: int | None = None,
    positions: Positions | None = None,
) -> Task:
    """Read statements as raw text, and compare a truth probe with what is true.

    Args:
        probe: a truth probe of the model; name below `probes/`, path or `hf://` address.
        data: csv of statements, or a folder of them.
        layer: one of the probe's layers.
        positions: tokens to read; those of the card by default. Raw text is all prompt, so
            `last_prompt` is the last token of the statement.

    Returns:
        The task; `auroc` by topic.
    """
    probe = required_probe(probe)
    data = required("data", data, "a csv of statements, or a folder of them")
    loaded = load_probe(probe)
    read = loaded.positions if positions is None else positions
    if positions is None and read == "completion":
        read = "prompt"  # raw text has no other part
    return Task(
        dataset=load_samples("geometry_of_truth", data),
        solver=read_given(loaded.layers if layer is None else (layer,), loaded.site),
        scorer=statement_probe(probe, layer=layer, positions=read),
        viewer=probe_viewer(["statement_probe"], palette="good-high"),
    )


@scorer(metrics=[grouped(auroc_metric(), "topic"), threshold_accuracy()])
def statement_probe(probe: str, layer: int | None, positions: Positions) -> Scorer:
    """`probe_score`, judged by topic.

    Args:
        probe: name below `probes/`, path or `hf://` address.
        layer: one of the probe's layers.
        positions: tokens to read.

    Returns:
        The scorer.
    """
    return probe_score(probe, layer=layer, positions=positions)
