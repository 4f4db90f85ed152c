"""Columns for `inspect_ai.analysis.samples_df`: probes and counts, read from the files of a log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, get_args

import numpy as np
from inspect_ai.log import EvalSample

from inspect_lens.errors import SpecError
from inspect_lens.model import read_activations
from inspect_lens.probe import AnyProbe
from inspect_lens.spec import Positions

from ._reader import ProbeReader

if TYPE_CHECKING:
    from inspect_ai.analysis import SampleColumn

__all__ = ["captured_calls_column", "lens_column"]

Over = Literal["last", "first", "max", "mean"]

_OVER: Final[dict[str, Callable[[Sequence[float]], float]]] = {
    "last": lambda values: values[-1],
    "first": lambda values: values[0],
    "max": max,
    "mean": lambda values: float(np.mean(values)),
}


def lens_column(
    probe: str | Path | AnyProbe,
    name: str | None = None,
    *,
    layer: int | None = None,
    positions: Positions | list[int] | None = None,
    pool: str | None = None,
    selection: str | None = None,
    over: Over = "last",
    tokenizer: str | None = None,
) -> SampleColumn:
    """A column with a probe's value per sample, computed from captured activations.

    No model is needed. Files are found beside the log, wherever it was moved to.

    Args:
        probe: name below `probes/`, path, `hf://` address, or a probe.
        name: of the column; the last part of the probe's name by default.
        layer: one of the probe's layers.
        positions: tokens to read.
        pool: token aggregation within a call.
        selection: as for `probe_score`.
        over: which calls of a sample count: the `last`, the `first`, the `max` or the `mean` over
            all captured calls with a token to read.
        tokenizer: folder or name of the tokenizer that tells sentences, for the pool
            `sentence_mean_max`; that of the sample's model, else of the card's, by default.

    Returns:
        The column; missing where a sample has no captured call with a token to read.

    Raises:
        ArtifactError: no such probe; while reading, layers or tokens that were not captured.
        SpecError: an argument is wrong.
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

    if over not in get_args(Over):
        raise SpecError(f"over={over!r}; allowed are {', '.join(get_args(Over))}")
    reader = ProbeReader.of(
        probe, layer=layer, positions=positions, pool=pool, selection=selection,
        source="captured", check_model=False, tokenizer=tokenizer,
    )  # fmt: skip

    title = name or reader.probe.name.rpartition("/")[2]
    return SampleColumn(title, path=_Value(reader, over), full=True)


@dataclass(frozen=True)
class _Value:
    """The path of a column; an object, as `parallel=True` pickles it."""

    reader: ProbeReader
    over: Over

    def __call__(self, sample: EvalSample) -> float | None:
        readings = [self.reader.read_captured(c.activations) for c in read_activations(sample)]
        values = [reading.value for reading in readings if reading is not None]
        return _OVER[self.over](values) if values else None


def captured_calls_column(name: str = "captured_calls") -> SampleColumn:
    """A column with the number of model calls of a sample that captured something.

    Args:
        name: of the column.

    Returns:
        The column.

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
