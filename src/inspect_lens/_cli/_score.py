"""`inspect-lens score`: a finished log, scored with probes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inspect_lens.errors import ArtifactError, SpecError

from ._output import Json, emit

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog, EvalScore
    from inspect_ai.scorer import Score

    from inspect_lens.reading import ProbeReader


def score(
    log: Annotated[
        str, typer.Argument(help="Inspect log (.eval), with its .lens folder next to it.")
    ],
    probe: Annotated[
        list[str], typer.Option(help="Probe: name, folder or hf:// address. Repeatable.")
    ],
    out: Annotated[str, typer.Option(help="Scored log to write; next to the log by default.")] = "",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the scored log if it is there already.")
    ] = False,
    over: Annotated[
        str, typer.Option(help="Calls to score: last (the answer), or all of a sample.")
    ] = "last",
    pool: Annotated[
        str, typer.Option(help="How token scores become one; the card's rule by default.")
    ] = "",
    selection: Annotated[
        str, typer.Option(help="Tokens to read: answer, reasoning, tool_calls, …")
    ] = "",
    role: Annotated[
        list[str] | None,
        typer.Option(help="Model role whose calls are read; the eval's model by default."),
    ] = None,
    any_model: Annotated[
        bool, typer.Option("--any-model", help="Accept probes that were trained on another model.")
    ] = False,
    follow: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder or URL to read files from where the log names them; 'all' trusts the log. "
            "Repeatable."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Score a finished log with probes, and write the scored log.

    Needs the log and the .lens folder next to it; no server and no GPU. Earlier scores stay.
    """
    from inspect_ai import score as score_log
    from inspect_ai.log import read_eval_log

    from inspect_lens.model import know_log
    from inspect_lens.reading import ProbeReader
    from inspect_lens.scorer import probe_score

    if not Path(log).is_file() and "://" not in log:
        raise ArtifactError(f"{log}: there is no such log; check the path")
    know_log(log, follow=follow or ())
    target = out or str(Path(log).with_suffix("")) + "-scored" + Path(log).suffix
    if not out and "://" in log:
        raise SpecError(f"--out: {log} is not on this machine; say where the scored log goes")
    if same_file(target, log):
        raise SpecError(f"out={target}: is the log that is scored; give another file")
    if Path(target).exists() and not overwrite:
        raise SpecError(f"out={target}: is there already; give another file, or pass --overwrite")
    asked: dict[str, Any] = {
        "pool": pool or None, "selection": selection or None, "source": "captured",
        "check_model": not any_model, "over": over, "roles": role or None,
    }  # fmt: skip
    readers = [ProbeReader.of(name, **asked) for name in probe]
    scorers = [probe_score(name, **asked) for name in probe]
    # With the path in the log, files beside it are found; the scored one may lie elsewhere.
    read = read_eval_log(log)
    scored = score_log(read, scorers, action="append", display="none")
    if scored.status != "success" or scored.results is None:
        raise ArtifactError(f"{log}: {scored.error.message if scored.error else scored.status}")
    _write(scored, target)
    # What was appended, in the order of the probes: a log may hold scores of the same name.
    pairs = zip(read.samples or [], scored.samples or [], strict=True)
    added = [
        [score for key, score in (new.scores or {}).items() if key not in (old.scores or {})]
        for old, new in pairs
    ]
    results = scored.results.scores[-len(scorers) :]
    found = [
        _said(reader, result, [each[i] for each in added if len(each) == len(scorers)])
        for i, (reader, result) in enumerate(zip(readers, results, strict=True))
    ]
    lines = [f"{target}: {len(scored.samples or [])} samples"]
    for one in found:
        said = _numbers(one["metrics"])
        said.append(f"{one['n_scored']} scored ({', '.join(one['sources'])})")
        if one["threshold"] is not None:
            said.append(f"{one['n_above']} above {one['threshold']:.4g}")
        lines.append(f"  {one['name']} ({one['scorer']}): {', '.join(said)}")
        lines += [f"    {one['means']}"] if one["means"] else []
    emit({"log": target, "scores": found}, lines, as_json=as_json)


def _numbers(metrics: dict[str, float | None]) -> list[str]:
    """Each metric with its interval, in words."""
    said = {}
    for name, value in metrics.items():
        low, high = metrics.get(f"{name}_low"), metrics.get(f"{name}_high")
        said[name] = f"{name} {'unknown' if value is None else f'{value:.4f}'}"
        if low is not None and high is not None:
            said[name] += f" [{low:.4f}, {high:.4f}]"
    ends = {f"{name}{end}" for name in metrics for end in ("_low", "_high")}
    return [text for name, text in said.items() if name not in ends]


def same_file(one: str, other: str) -> bool:
    """Whether two paths are one file, by any name."""
    return Path(one).exists() and Path(other).exists() and Path(one).samefile(other)


def _write(log: EvalLog, target: str) -> None:
    """Write a log beside its place, and put it there when it is whole."""
    from inspect_ai.log import write_eval_log

    if "://" in target:  # object stores show an upload when it is complete
        write_eval_log(log, target)
        return
    place = Path(target)
    place.parent.mkdir(parents=True, exist_ok=True)
    beside = place.with_name(f".{place.stem}.{os.getpid()}{place.suffix}")
    try:
        write_eval_log(log, beside)
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)


def _said(reader: ProbeReader, result: EvalScore, scores: Sequence[Score]) -> dict[str, Any]:
    """What one scorer says of the whole log."""
    from inspect_lens.reading._thresholds import promise

    read = [s for s in scores if (s.metadata or {}).get("probe")]
    threshold = reader.threshold.value if reader.threshold else None
    own = threshold is not None and all(_holds(s) for s in read)
    return {
        "name": f"{reader.probe.name} {reader.pool}", "scorer": result.name,
        "probe": reader.probe.name, "pool": reader.pool, "n_scored": len(read),
        "sources": sorted({str((s.metadata or {})["source"]) for s in read}),
        "threshold": threshold,
        "n_above": sum(s.answer == "above threshold" for s in read),
        "metrics": {name: _known(m.value) for name, m in result.metrics.items()},
        "means": promise(reader, threshold) if own and threshold is not None else
        "No rate of a card holds: another model, other settings, or answers of other lengths.",
    }  # fmt: skip


def _known(value: float) -> float | None:
    """JSON has no NaN, which a metric is that cannot be computed."""
    return None if math.isnan(value) else float(value)


def _holds(score: Score) -> bool:
    return (score.metadata or {}).get("fpr") is not None
