"""Captured calls of logs as a data frame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inspect_ai.log import EvalLog, list_eval_logs

from inspect_lens.model.stored._handle import Activations

from ._read import read_activations

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["activations_df"]

_COLUMNS: Final = (
    "log", "sample_id", "epoch", "message_id", "tensors", "layers", "n_prompt", "n_completion",
    "shape", "dtype", "uri", "sha256",
)  # fmt: skip


def activations_df(logs: EvalLog | str | Path | Sequence[EvalLog | str | Path]) -> pd.DataFrame:
    """Data frame of all model calls in logs that captured, one row each.

    Needs pandas, which inspect_lens does not install by itself.

    Args:
        logs: logs, paths of logs, or folders, in which every log is taken.

    Returns:
        Columns: `log` (its location), `sample_id`, `epoch`, `message_id`; `tensors` (their names),
        `layers`, `shape` (layers, tokens, hidden) and `dtype` of the residual stream, or of the
        first tensor where it was not captured; `n_prompt` and `n_completion` tokens; `uri` of the
        file, relative to the folder of the log, None for what was only in memory; `sha256`.

    Raises:
        ArtifactError: a log was read without its samples.
        ImportError: there is no pandas.

    Example:
        ```python
        from inspect_lens.model import activations_df

        calls = activations_df("logs/honesty.eval")
        assert len(calls) == 8
        assert calls["layers"][0] == (3, 4, 5)
        ```
    """
    import pandas as pd

    several = isinstance(logs, Sequence) and not isinstance(logs, str)
    given: Sequence[Any] = logs if several else [logs]  # type: ignore[assignment]
    rows = [row for log in given for one in _each(log) for row in _rows(one)]
    return pd.DataFrame(rows, columns=list(_COLUMNS))


def _each(log: EvalLog | str | Path) -> Iterator[EvalLog | str]:
    """The log itself, or the logs of a folder: one at a time, as they may be large."""
    if isinstance(log, EvalLog) or str(log).endswith((".eval", ".json")):
        yield log if isinstance(log, EvalLog) else str(log)
        return
    for info in list_eval_logs(str(log), descending=False):
        yield info.name


def _rows(log: EvalLog | str) -> Iterator[tuple[Any, ...]]:
    where = log.location if isinstance(log, EvalLog) else log
    for call in read_activations(log):
        handle = call.activations
        name = _main(handle)
        info = handle.tensors[name]
        yield (
            where, call.sample_id, call.epoch, call.message_id, handle.keys(), info.layers,
            handle.n_prompt, handle.n_completion, info.shape, info.dtype, handle.uri,
            handle.sha256,
        )  # fmt: skip


def _main(handle: Activations) -> str:
    return "residual_stream" if "residual_stream" in handle else next(iter(handle))
