"""Columns for `inspect_ai.analysis.samples_df`: probes and counts, read from the files of a log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from inspect_ai.log import EvalSample

from inspect_lens._base.arguments import refuse_idle
from inspect_lens.model import read_activations
from inspect_lens.probe import AnyProbe
from inspect_lens.spec import Positions

from ._calls import OnMissing, Over
from ._reader import ProbeReader
from ._samples import Combine, combining, read_sample_captured
from ._shared import shared_parameters
from ._thresholds import ThresholdLike, acting_value

if TYPE_CHECKING:
    from inspect_ai.analysis import SampleColumn

__all__ = ["captured_calls_column", "lens_column"]


@shared_parameters
def lens_column(
    probe: str | Path | AnyProbe,
    name: str | None = None,
    *,
    layer: int | None = None,
    positions: Positions | list[int] | None = None,
    pool: str | None = None,
    selection: str | None = None,
    tokenizer: str | None = None,
    over: Over = "last",
    roles: Sequence[str] | None = None,
    on_missing: OnMissing = "error",
    threshold: ThresholdLike = None,
    combine: Combine = "max",
) -> SampleColumn:
    """A column with a probe's value per sample, computed from captured activations.

    No model is needed. Files are found beside the log, wherever it was moved to.

    Args:
        name: of the column; the last part of the probe's name by default.
        threshold: a number, or an operating point of the card such as `fpr=0.05`. With it the
            column has whether the value is above it, instead of the value.

    Returns:
        The column; missing where a sample has no call with a token to read.

    Raises:
        ArtifactError: no such probe; while reading, a call whose activations are not there.
        ImportError: there is no pandas.

    Example:
        ```python
        from inspect_ai.analysis import SampleSummary, samples_df

        from inspect_lens.reading import lens_column

        column = lens_column("organism/deception-lr", name="deception")
        frame = samples_df("logs/honesty.eval", columns=[*SampleSummary, column])
        assert frame["deception"].notna().all()
        ```
    """
    from inspect_ai.analysis import SampleColumn

    combining(combine)
    if over == "last":
        refuse_idle(lens_column, "with over='last', which reads one call", combine=combine)
    reader = ProbeReader.of(
        probe, layer=layer, positions=positions, pool=pool, selection=selection,
        source="captured", check_model=False, tokenizer=tokenizer, over=over, roles=roles,
        on_missing=on_missing, threshold=threshold,
    )  # fmt: skip
    title = name or reader.probe.name.rpartition("/")[2]
    cut = None if threshold is None else acting_value(reader, threshold)
    return SampleColumn(title, path=_Value(reader, combine, cut), full=True)


@dataclass(frozen=True)
class _Value:
    """The path of a column; an object, as `parallel=True` pickles it."""

    reader: ProbeReader
    combine: Combine
    threshold: float | None

    def __call__(self, sample: EvalSample) -> float | bool | None:
        values = [one.reading.value for one in read_sample_captured(self.reader, sample).read]
        if not values:
            return None
        value = combining(self.combine)(values)
        return value if self.threshold is None else value > self.threshold


def captured_calls_column(name: str = "captured_calls") -> SampleColumn:
    """A column with the number of model calls of a sample that captured something.

    Args:
        name: of the column.

    Raises:
        ImportError: there is no pandas.

    Example:
        ```python
        from inspect_ai.analysis import samples_df

        from inspect_lens.reading import captured_calls_column

        frame = samples_df("logs/honesty.eval", columns=[captured_calls_column()])
        assert frame["captured_calls"].tolist() == [1] * 8
        ```
    """
    from inspect_ai.analysis import SampleColumn

    return SampleColumn(name, path=_count, full=True)


def _count(sample: EvalSample) -> int:
    return len(read_activations(sample))
