"""`probe_viewer`: how Inspect's viewer lists the samples of a task with probes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from inspect_ai.viewer import (
    SampleScoreView,
    SampleScoreViewSort,
    ScoreColorScale,
    TaskSamplesColumn,
    TaskSamplesSort,
    TaskSamplesView,
    ViewerConfig,
)

from inspect_lens.errors import SpecError

__all__ = ["probe_viewer"]

Palette = Literal["good-high", "good-low", "neutral", "diverging"]


def probe_viewer(
    probes: Sequence[str] | Mapping[str, Sequence[str]] = ("deception_probe",),
    *,
    palette: Palette = "good-low",
    low: float | None = None,
    high: float | None = None,
) -> ViewerConfig:
    """Configure Inspect's viewer to sort samples by probe score: `Task(viewer=…)`.

    Args:
        probes: names of scorers; a mapping gives, per scorer with dict scores, the keys to show.
        palette: of the cells; `good-low` paints high scores red.
        low: score at one end of the palette; the lowest of the log by default.
        high: score at the other end.

    Returns:
        The configuration; a reader of the log can still choose other columns.

    Raises:
        SpecError: no scorer was named.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval

        from evals.organism_deception import organism_dataset
        from inspect_lens.scorer import deception_probe
        from inspect_lens.solver import with_capture
        from inspect_lens.view import probe_viewer

        task = Task(
            dataset=organism_dataset("demo")[:4],
            solver=with_capture([4]),
            scorer=deception_probe("organism/deception-lr"),
            viewer=probe_viewer(["deception_probe"]),
        )
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", max_tokens=24)
        assert log.status == "success"
        ```
    """
    named = probes if isinstance(probes, Mapping) else {name: () for name in probes}
    columns = [(scorer, key) for scorer, keys in named.items() for key in (keys or (None,))]
    if isinstance(probes, str) or not columns:
        raise SpecError(
            f"probes={probes!r}; allowed is a list of names of scorers, such as ['deception_probe']"
        )
    scale = ScoreColorScale(palette=palette, min=low, max=high)
    shown: list[TaskSamplesColumn] = [
        TaskSamplesColumn(id="sampleId"),
        TaskSamplesColumn(id="input"),
    ]
    shown += [TaskSamplesColumn.score(scorer, key) for scorer, key in columns]
    shown += [TaskSamplesColumn(id="answer"), TaskSamplesColumn(id="target")]
    return ViewerConfig(
        task_samples_view=TaskSamplesView(
            name="Probes",
            columns=shown,
            sort=[TaskSamplesSort.score(*columns[0], dir="desc")],
            score_color_scales={key or scorer: scale for scorer, key in columns},
            color_scales_enabled=True,
        ),
        sample_score_view=SampleScoreView(
            default="grid", sort=SampleScoreViewSort(column="value", dir="desc")
        ),
    )
