"""`inspect-lens score`: a finished log, scored with probes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inspect_lens.errors import ArtifactError, SpecError

from ._output import emit

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog
    from inspect_ai.scorer import Score

__all__ = ["score"]


def score(
    log: Annotated[
        str, typer.Argument(help="Inspect log (.eval), with its .lens folder next to it.")
    ],
    probe: Annotated[
        list[str], typer.Option(help="Probe: name, folder or hf:// address. Repeatable.")
    ],
    out: Annotated[str, typer.Option(help="Scored log to write; next to the log by default.")] = "",
    over: Annotated[
        str, typer.Option(help="Calls to score: last (the answer), or all of a sample.")
    ] = "last",
    pool: Annotated[
        str, typer.Option(help="How token scores become one; the card's rule by default.")
    ] = "",
    selection: Annotated[
        str, typer.Option(help="Tokens to read: answer, reasoning, tool_calls, …")
    ] = "",
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Score a finished log with probes, and write the scored log.

    Needs the log and the .lens folder next to it; no server and no GPU. Earlier scores stay.
    """
    from inspect_ai import score as score_log
    from inspect_ai.log import read_eval_log, write_eval_log

    from inspect_lens.model import know_log
    from inspect_lens.reading import check_over
    from inspect_lens.scorer import probe_score

    check_over(over)
    if not Path(log).is_file() and "://" not in log:
        raise ArtifactError(f"{log}: there is no such log; check the path")
    know_log(log, follow=follow or ())
    target = out or str(Path(log).with_suffix("")) + "-scored" + Path(log).suffix
    if not out and "://" in log:
        raise SpecError(f"--out: {log} is not on this machine; say where the scored log goes")
    scorers = [
        probe_score(
            name, pool=pool or None, selection=selection or None, source="captured",
            check_model=not any_model, over=over,  # type: ignore[arg-type] # checked above
        )
        for name in probe
    ]  # fmt: skip
    # With the path in the log, files beside it are found; the scored one may lie elsewhere.
    scored = score_log(read_eval_log(log), scorers, action="append", display="none")
    if scored.status != "success":
        raise ArtifactError(f"{log}: {scored.error.message if scored.error else scored.status}")
    write_eval_log(scored, target)
    found = _found(scored)
    lines = [f"{target}: {len(scored.samples or [])} samples"]
    for one in found:
        said = [
            f"{name} {'unknown' if value is None else f'{value:.4f}'}"
            for name, value in one["metrics"].items()
        ]
        said.append(f"{one['n_scored']} scored ({', '.join(one['sources'])})")
        if one["threshold"] is not None:
            said.append(f"{one['n_above']} above {one['threshold']:.4g}")
        lines.append(f"  {one['probe']} ({one['scorer']}): {', '.join(said)}")
        lines += [f"    {one['means']}"] if one["means"] else []
    emit({"log": target, "scores": found}, lines, as_json=as_json)


def _found(log: EvalLog) -> list[dict[str, Any]]:
    """What each scorer of a probe says of the whole log."""
    from inspect_lens.reading import ProbeReader
    from inspect_lens.reading._promise import promise

    made = []
    for result in log.results.scores if log.results else []:
        if result.scorer.rpartition("/")[2] != "probe_score":
            continue
        each = [(s.scores or {}).get(result.name) for s in log.samples or []]
        read = [s for s in each if s is not None and (s.metadata or {}).get("probe")]
        params = {k: v for k, v in result.params.items() if k in ("pool", "selection")}
        reader = ProbeReader.of(result.params["probe"], **params)
        threshold = reader.threshold.value if reader.threshold else None
        own = threshold is not None and all(_holds(s) for s in read)
        made.append({
            "scorer": result.name, "probe": reader.probe.name, "n_scored": len(read),
            "sources": sorted({str((s.metadata or {})["source"]) for s in read}),
            "threshold": threshold,
            "n_above": sum(s.answer == "above threshold" for s in read),
            "metrics": {name: _known(m.value) for name, m in result.metrics.items()},
            "means": promise(reader, threshold) if own and threshold is not None else
            "No rate of a card holds: another model, or other settings.",
        })  # fmt: skip
    return made


def _known(value: float) -> float | None:
    """JSON has no NaN, which a metric is that cannot be computed."""
    return None if math.isnan(value) else float(value)


def _holds(score: Score) -> bool:
    return (score.metadata or {}).get("fpr") is not None
