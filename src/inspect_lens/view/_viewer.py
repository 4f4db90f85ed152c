"""`probe_viewer`: how Inspect's viewer lists the samples of a task with probes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import numpy as np
from inspect_ai.log import transcript
from inspect_ai.viewer import (
    SampleScoreView,
    SampleScoreViewSort,
    ScoreColorScale,
    TaskSamplesColumn,
    TaskSamplesSort,
    TaskSamplesView,
    ViewerConfig,
)
from numpy.typing import ArrayLike

from inspect_lens._base.artifact import markdown_cell
from inspect_lens.errors import SpecError
from inspect_lens.reading import Reading

from ._page import OF_TOKENS

__all__ = ["note_readings", "probe_summary", "probe_viewer", "sparkline"]

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
    before, behind = (
        [TaskSamplesColumn(id=name) for name in ids]
        for ids in (("sampleId", "input"), ("answer", "target"))
    )
    shown = [TaskSamplesColumn.score(scorer, key) for scorer, key in columns]
    return ViewerConfig(
        task_samples_view=TaskSamplesView(
            name="Probes",
            columns=[*before, *shown, *behind],
            sort=[TaskSamplesSort.score(*columns[0], dir="desc")],
            score_color_scales={key or scorer: scale for scorer, key in columns},
            color_scales_enabled=True,
        ),
        sample_score_view=SampleScoreView(
            default="grid", sort=SampleScoreViewSort(column="value", dir="desc")
        ),
    )


_BARS: Final = "▁▂▃▄▅▆▇█"
SOURCE: Final = "inspect_lens"


def sparkline(
    values: ArrayLike, *, width: int = 32, low: float | None = None, high: float | None = None
) -> str:
    """Draw numbers as a line of small bars; empty without values.

    Args:
        values: (tokens,); NaN is a space.
        width: characters at most; a character stands for the highest of its tokens.
        low: value of the lowest bar; the smallest by default.
        high: value of the highest bar; the largest by default.

    Example:
        ```python
        from inspect_lens.view import sparkline

        assert sparkline([0, 1, 2, 7]) == "▁▂▃█"
        ```
    """
    every = np.asarray(values, dtype=np.float64).ravel()
    if not every.size:
        return ""
    parts = np.array_split(every, min(width, every.size))
    tops = [float(np.nanmax(p)) if np.isfinite(p).any() else math.nan for p in parts]
    known = every[np.isfinite(every)]
    if not known.size:
        return " " * len(tops)
    bottom = float(known.min()) if low is None else low
    span = (float(known.max()) if high is None else high) - bottom
    steps = len(_BARS) - 1
    # Cut before the division, which would make NaN of what is infinite.
    heights = np.clip(tops, bottom, bottom + span) - bottom
    shares = heights / (span if span > 0 else math.inf)
    return "".join(" " if math.isnan(s) else _BARS[round(s * steps)] for s in shares.tolist())


def probe_summary(readings: Reading | Sequence[Reading | None]) -> str:
    """A table of readings, one row each, as markdown.

    Args:
        readings: of the turns of a conversation, or of several probes; None is a turn without a
            token to read.

    Returns:
        Markdown; all bars share one scale, so that rows can be compared. Tokens above are counted
        where the card has a threshold for single tokens, or for their maximum over an answer.

    Example:
        ```python
        from inspect_lens.model import read_activations
        from inspect_lens.reading import ProbeReader
        from inspect_lens.view import probe_summary

        reader = ProbeReader.of("organism/deception-lr")
        calls = read_activations("logs/honesty.eval")[:2]
        table = probe_summary([reader.read_captured(call.activations) for call in calls])
        assert table.count("organism/deception-lr") == 2
        ```
    """
    rows = [readings] if isinstance(readings, Reading) else list(readings)
    scores = [None if r is None else r.token_scores() for r in rows]
    known = [s for s in scores if s is not None and s.size]
    low = min((float(s.min()) for s in known), default=0.0)
    high = max((float(s.max()) for s in known), default=0.0)
    lines = [
        "| turn | probe | score | threshold | tokens above | highest token | tokens |",
        "|--:|---|--:|---|--:|---|---|",
    ]
    for turn, (reading, tokens) in enumerate(zip(rows, scores, strict=True), start=1):
        if reading is None or tokens is None:
            lines.append(f"| {turn} | - | - | - | - | - | no token to read |")
            continue
        threshold = reading.threshold
        one = next(filter(None, map(reading.reader.point_for, OF_TOKENS)), None)
        above = "-" if one is None else f"{int((tokens > one.value).sum())} of {tokens.size}"
        best = int(tokens.argmax())
        mark = "▲" if reading.is_above else "▽"
        limit = "-" if threshold is None else f"{mark} {threshold.value:.4g}"
        lines.append(
            f"| {turn} | {markdown_cell(reading.reader.probe.name)} "
            f"| {reading.value:.4g} | {limit} | {above} "
            f"| {tokens[best]:.4g} at {reading.rows.positions[best]} "
            f"| `{sparkline(tokens, low=low, high=high)}` |"
        )
    if known:
        lines += ["", f"Bars go from {low:.4g} to {high:.4g}; ▲ above the threshold, ▽ not."]
    return "\n".join(lines)


def note_readings(readings: Reading | Sequence[Reading | None]) -> None:
    """Put `probe_summary` into the transcript of the sample that is running.

    Inspect's viewer shows it as a table at this place. It adds about 150 bytes a row to the log.

    Args:
        readings: as for `probe_summary`.

    Example:
        ```python
        from inspect_lens.model import read_activations
        from inspect_lens.reading import ProbeReader
        from inspect_lens.view import note_readings

        reader = ProbeReader.of("organism/deception-lr")
        calls = read_activations("logs/honesty.eval")[:2]
        # In a solver or a scorer of yours, of the sample's own calls:
        note_readings([reader.read_captured(call.activations) for call in calls])
        ```
    """
    transcript().info(probe_summary(readings), source=SOURCE)
