"""`inspect-lens score`, `view` and `chat`: logs scored with probes, and pages of their tokens."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inspect_lens._settings import server_key
from inspect_lens.errors import ArtifactError, SpecError

from ._choices import OverCalls
from ._output import (
    BaseUrl,
    Json,
    emit,
    in_shell_words,
    number,
    parse_layers,
    reaching,
    there_already,
    writable,
)

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog, EvalMetric
    from inspect_ai.scorer import Score

    from inspect_lens.reading import ProbeReader


def _named(log: str) -> str:
    """The log that a word means; an empty one is what a shell makes of a pattern without a file."""
    if not log:
        raise SpecError("LOG: no log is named; run the eval first, and then name its .eval file")
    if not Path(log).is_dir():
        return log
    found = max(Path(log).glob("*.eval"), default=None)  # names begin with the time
    if found is None:
        raise SpecError(f"LOG: the folder {log} has no .eval file; name the folder of your logs")
    typer.echo(f"the newest log of {log} is {found}", err=True)
    return str(found)


LogFile = Annotated[
    str,
    typer.Argument(
        help="Inspect log (.eval), with its .lens folder next to it; of a folder, the newest log.",
        callback=_named,
    ),
]
AnyProbes = Annotated[
    bool, typer.Option("--any-model", help="Accept probes that were trained on another model.")
]
Follow = Annotated[
    list[str] | None,
    typer.Option(
        help="Folder or URL to read files from where the log names them; 'all' trusts the log. "
        "Repeatable."
    ),
]


def score(
    log: LogFile,
    probe: Annotated[
        list[str], typer.Option(help="Probe: name, folder or hf:// address. Repeatable.")
    ],
    out: Annotated[
        str,
        typer.Option(
            callback=writable,
            help="Scored log to write, a path or URL; by default next to the log.",
        ),
    ] = "",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the scored log if it is there already.")
    ] = False,
    over: Annotated[
        OverCalls, typer.Option(help="Calls to score: the answer, or all of a sample.")
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
    any_model: AnyProbes = False,
    follow: Follow = None,
    as_json: Json = False,
) -> None:
    """Score a finished log with probes, and write the scored log.

    This needs the log and the .lens folder next to it, but no server and no GPU. Earlier scores
    stay.
    """
    from inspect_ai import score as score_log

    from inspect_lens.model import know_log
    from inspect_lens.model._places import judging_log, no_samples, read_log
    from inspect_lens.reading import ProbeReader
    from inspect_lens.scorer import probe_score

    with judging_log(log):  # before probes are read
        pass
    know_log(log, follow=follow or ())
    target = out or str(Path(log).with_suffix("")) + "-scored" + Path(log).suffix
    if not out and "://" in log:
        raise SpecError(f"--out: {log} is not on this machine; say where the scored log goes")
    if Path(target).suffix not in (".eval", ".json"):
        raise SpecError(f"out={target}: a log ends in .eval or .json; give it such a name")
    if Path(target).exists() and Path(log).exists() and Path(target).samefile(log):
        raise SpecError(f"out={target}: is the log that is scored; give another file")
    if there_already(target) and not overwrite:
        raise SpecError(f"out={target}: is there already; give another file, or pass --overwrite")
    asked: dict[str, Any] = {
        "pool": pool or None, "selection": selection or None, "source": "captured",
        "check_model": not any_model, "over": over, "roles": role or None,
    }  # fmt: skip
    readers = [ProbeReader.of(name, **asked) for name in probe]
    scorers = [probe_score(name, **asked) for name in probe]
    # With the path in the log, files beside it are found; the scored one may lie elsewhere.
    read = read_log(log)
    if not read.samples:
        raise no_samples(read, log)
    if read.status != "success":
        why = f" ({read.error.message})" if read.error else ""
        raise ArtifactError(
            f"{log}: its eval has the status {read.status!r}{why}; allowed is a log that is whole: "
            f"inspect eval-retry {log} runs the samples that are missing"
        )
    scored = score_log(read, scorers, action="append", display="none")
    if scored.results is None:
        raise ArtifactError(f"{log}: none of its samples could be scored")
    _write(scored, target)
    # What was appended, in the order of the probes: a log may hold scores of the same name.
    pairs = zip(read.samples or [], scored.samples or [], strict=True)
    added = [
        [score for key, score in (new.scores or {}).items() if key not in (old.scores or {})]
        for old, new in pairs
    ]
    # Inspect may have several results of one scorer, each with some of its metrics.
    results: dict[str, dict[str, EvalMetric]] = {}
    for result in scored.results.scores:
        results.setdefault(result.name, {}).update(result.metrics)
    found = [
        _said(reader, name, results[name], [each[i] for each in added if len(each) == len(scorers)])
        for i, (reader, name) in enumerate(
            zip(readers, list(results)[-len(scorers) :], strict=True)
        )
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


def _write(log: EvalLog, target: str) -> None:
    """Write a log beside its place, and put it there when it is whole."""
    from inspect_ai.log import write_eval_log

    if "://" in target:  # object stores show an upload when it is complete
        with reaching(f"--out={target}"):
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


def _said(
    reader: ProbeReader, name: str, metrics: Mapping[str, EvalMetric], scores: Sequence[Score]
) -> dict[str, Any]:
    """What one scorer says of the whole log."""
    from inspect_lens.reading._thresholds import promise

    read = [s for s in scores if (s.metadata or {}).get("probe")]
    threshold = reader.threshold.value if reader.threshold else None
    if threshold is None:
        means = "The card has no threshold for this pool and these tokens, so no rate is known."
    elif all((s.metadata or {}).get("fpr") is not None for s in read):
        differs = (d for s in read for d in (s.metadata or {}).get("computed_with", ()))
        means = promise(reader, threshold, differences=list(dict.fromkeys(differs))).text
    else:
        means = (
            "The card's rate does not hold for all of these answers: some are of another model, "
            "or of lengths that it was not set on."
        )
    return {
        "name": f"{reader.probe.name} {reader.pool}", "scorer": name,
        "probe": reader.probe.name, "pool": reader.pool, "n_scored": len(read),
        "sources": sorted({str((s.metadata or {})["source"]) for s in read}),
        "threshold": threshold,
        "n_above": sum(s.answer == "above threshold" for s in read),
        # JSON has no NaN, which a metric is that cannot be computed.
        "metrics": {
            key: None if math.isnan(metric.value) else float(metric.value)
            for key, metric in metrics.items()
        },
        "means": means,
    }  # fmt: skip


def view(
    context: typer.Context,
    log: LogFile,
    probe: Annotated[
        list[str] | None,
        typer.Option(
            help="Probe (repeatable): name, folder or hf:// address; by default, those in the log."
        ),
    ] = None,
    out: Annotated[
        str, typer.Option(callback=writable, help="HTML file to write; next to the log by default.")
    ] = "",
    tokenizer: Annotated[
        str, typer.Option(help="Folder of a tokenizer; the model's by default.")
    ] = "",
    limit: Annotated[
        int, typer.Option(min=0, help="Show at most this many samples; 0 shows all.")
    ] = 0,
    max_mib: Annotated[
        int, typer.Option(min=1, help="Largest page in MiB; further samples are left out.")
    ] = 64,
    any_model: AnyProbes = False,
    follow: Follow = None,
    as_json: Json = False,
) -> None:
    """Write one HTML page of a log, with the probe score of every token.

    This needs the log and the .lens folder next to it, but no server, no GPU, and no network unless
    --probe or --follow names an address.
    """
    from inspect_lens.view import write_view

    made = write_view(
        log, out or None, probes=probe or (), tokenizer=tokenizer or None, limit=limit or None,
        max_bytes=max_mib << 20, any_model=any_model, follow=follow or (),
        progress=True,
    )  # fmt: skip
    notes = [in_shell_words(note, context.command) for note in made.notes]
    lines = [
        f"{made.path}: {made.n_samples} samples, {made.n_calls} calls, {made.n_tokens} tokens, "
        + (f"{made.nbytes / 2**20:.1f} MiB" if made.nbytes >> 20 else f"{made.nbytes >> 10} KiB"),
        f"  probes: {', '.join(made.series)}",
        *(f"  note: {note}" for note in notes),
    ]
    emit(made.as_dict() | {"notes": notes}, lines, as_json=as_json)


def chat(
    base_url: BaseUrl,
    model: Annotated[
        str,
        typer.Option(
            help="Model as lens/<served name>, or vllm-lens/<served name>; the server's first by "
            "default."
        ),
    ] = "",
    probe: Annotated[
        str, typer.Option(help="Probe: its name on the server, or a probe to register there.")
    ] = "",
    lens: Annotated[
        str,
        typer.Option(help="Tuned or Jacobian lens, named like a probe; the logit lens by default."),
    ] = "",
    layers: Annotated[
        str, typer.Option(help="'all', 'none', or numbers such as 8,10-14; six by default.")
    ] = "",
    top_k: Annotated[int, typer.Option(min=1, help="Predicted tokens to show for each layer.")] = 5,
    vector: Annotated[
        str, typer.Option(help="Steering vector: its name on the server, or one to register there.")
    ] = "",
    scale: Annotated[
        float | None, number("Scale of the vector to begin with; its own by default.")
    ] = None,
    api_key: Annotated[str, typer.Option(help="Key of the server; VLLM_API_KEY by default.")] = "",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Local port of the page; 0 takes a free one.")
    ] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Chat with a model, steer it, and sweep patches, on pages that are drawn as results come.

    The page is served on this machine only, until you stop the command.
    """
    from inspect_lens.view import ChatPage, open_talk

    chosen = [] if layers == "none" else parse_layers(layers, none=True) if layers else None
    talk = open_talk(
        base_url, model=model or None, probe=probe or None, lens=lens or None, layers=chosen,
        top_k=top_k, vector=vector or None, scale=scale, api_key=server_key(api_key) or None,
    )  # fmt: skip
    with ChatPage(talk, port=port) as page:
        sys.stdout.write(f"{page.url}\nCtrl-C ends it.\n")
        sys.stdout.flush()
        if browser:
            webbrowser.open(page.url)
        with contextlib.suppress(KeyboardInterrupt):  # that is how it ends
            page.wait()
