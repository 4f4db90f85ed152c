"""`write_view`: a log as a page of coloured tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from inspect_ai.log import EvalLog

from inspect_lens._base.arguments import judged_arguments
from inspect_lens._base.labels import label_of
from inspect_lens._base.progress import progress_bar
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model import know_log
from inspect_lens.model._places import no_samples
from inspect_lens.model._request import capture_advice
from inspect_lens.probe import AnyProbe, write_atomic
from inspect_lens.spec import several

from ._log import ModelTexts, OpenLog, model_shown, open_log, read_sample
from ._page import LEVELS, Range, SampleView, TokenTable, pack_sample, ranges, render
from ._series import Source, choose_probes, kept_sources, make_sources, origin_notes, read_saved

__all__ = ["MAX_PAGE_BYTES", "WrittenView", "write_view"]

MAX_PAGE_BYTES = 64 << 20
"""Default limit for the size of a token page, in bytes."""


@dataclass(frozen=True, kw_only=True)
class WrittenView:
    """Facts about a written token page: path, samples, calls, tokens, notes."""

    path: Path
    nbytes: int
    n_samples: int
    """Shown."""
    n_left_out: int
    """Samples of the log that the bound left out, the last ones."""
    n_without: int
    """Samples without captured tokens."""
    n_calls: int
    n_tokens: int
    n_scored: int
    """Tokens with a score of the first series."""
    series: tuple[str, ...]
    """Name of each series."""
    has_texts: bool
    """Whether a tokenizer gave the texts."""
    n_kept: int
    """Calls whose activations are not here, and whose token scores scorers kept."""
    n_lost: int
    """Calls whose activations are not here, and of which nothing was kept."""
    notes: tuple[str, ...]
    """What the page says of its limits."""

    def as_dict(self) -> dict[str, Any]:
        """The facts as a dict for JSON."""
        return asdict(self) | {"path": str(self.path)}


@judged_arguments
def write_view(
    log: EvalLog | str | Path,
    out: str | Path | None = None,
    *,
    probes: str | Path | AnyProbe | Sequence[str | Path | AnyProbe] = (),
    tokenizer: str | None = None,
    limit: int | None = None,
    max_bytes: int = MAX_PAGE_BYTES,
    any_model: bool = False,
    follow: str | Sequence[str] = (),
    progress: bool = False,
) -> WrittenView:
    """Write one self-contained HTML page with the probe score of every token of a log.

    Works from the log and the files beside it: no server and no GPU, and no network unless
    `probes` or `follow` names an address; the page needs none, either. Token scores are computed
    here, from the activations that the log's calls captured. Where those are not on this machine,
    the page has the token scores that scorers kept beside the log, for the probes and tokens that
    they read, and says so.

    Args:
        log: with its samples, or its address.
        out: the file; beside the log, with the ending `.html`, by default.
        probes: a name, a path or a probe, or several; those that scored the log by default.
        tokenizer: folder or name of the tokenizer; that of the log's model by default.
        limit: samples at most, the first ones.
        max_bytes: of the page; samples that would go over it are left out, which the page says.
        any_model: accept probes of another model, to look at transfer.
        follow: folders and URLs below which files and probes may be read where the log names
            them, or `all`; see `know_log`.
        progress: show a bar on a terminal.

    Raises:
        SpecError: no probe was given and the log names none, or there is no place for the page.
        ArtifactError: the log or a probe is missing, a file is damaged, the probe belongs to
            another model, or no call has what the probes read, captured or kept.

    Example:
        ```python
        from inspect_lens.view import write_view

        page = write_view("logs/honesty.eval", "page.html", probes=["organism/deception-lr"])
        assert page.n_samples == 8
        assert page.path.exists()
        ```
    """
    probes = several(probes)
    opened = _open(log)
    target = _target(opened, out)
    stream = islice(opened.samples(), limit)
    if (first := next(stream, None)) is None:
        raise no_samples(opened.header, opened.location or "log")
    if opened.location:
        know_log(opened.location, follow=follow)
    saved = read_saved(first)
    kept = saved.all() if not probes else []
    texts = ModelTexts(model_shown(first, saved, opened), tokenizer)
    loaded, notes = choose_probes(
        probes, opened.header, first, texts.model, any_model=any_model, have_kept=bool(kept)
    )
    sources = make_sources(loaded, tokenizer)
    sources += kept_sources(kept, sources)
    samples: list[SampleView] = []
    total = min(limit or opened.total, opened.total)
    with progress_bar("samples", total=total, done=0, show=progress) as step:
        for sample in chain([first], stream):
            samples.append(read_sample(sample, sources, texts, location=opened.location))
            step()
    _require_scores(samples, sources, opened)
    notes += [*texts.notes, *origin_notes(samples)]
    return _write(target, opened, samples, sources, notes, texts, max_bytes)


def _open(log: EvalLog | str | Path) -> OpenLog:
    if isinstance(log, EvalLog) and log.samples is None:
        raise ArtifactError(
            f"{log.location or 'log'}: was read without its samples; pass its address, or read it "
            "again with header_only=False"
        )
    return open_log(log if isinstance(log, EvalLog) else str(log))


def _target(opened: OpenLog, out: str | Path | None) -> Path:
    if out is not None:
        if Path(out).suffix not in (".html", ".htm"):  # a log has another, and is not written over
            raise SpecError(f"out={out}: a page ends in .html; give it such a name")
        return Path(out)
    location = opened.location.removeprefix("file://")
    if not location or "://" in location:
        raise SpecError(
            f"out: is missing, and {location or 'a log in memory'!r} is no local file to write "
            "beside; pass out= with an HTML file"
        )
    return Path(location).with_suffix(".html")


def _require_scores(
    samples: Sequence[SampleView], sources: Sequence[Source], opened: OpenLog
) -> None:
    if any(np.isfinite(s.token_scores).any() for s in samples):
        return
    name = opened.location or "log"
    calls = [call for sample in samples for call in sample.calls]
    gone = [call for call in calls if call.origin != "activations"]
    wanted = sorted({n for source in sources for n in source.series.layers})
    if gone:
        kept = sorted({name for sample in samples for name in sample.kept_by})
        lost = next((sample.lost for sample in samples if sample.lost), "")
        found = (
            f"{', '.join(kept)} kept token scores of other probes only; leave probes= out"
            if kept
            else f"the file of token scores {lost} is not here either"
            if lost
            else "no scorer kept token scores of them"
        )
        missing = sum(call.captured for call in gone)
        raise ArtifactError(
            f"{name}: the activations of {missing} of its {len(calls)} captured calls are not "
            f"here, and {found}. Put the .lens folder of the log beside it, or set "
            "INSPECT_LENS_DIR to the folder that holds it"
            if missing
            else f"{name}: its {len(calls)} calls captured no activations, and {found}"
        )
    first = sources[0].reader
    site = first.probe.site if first else "resid_post"
    none = (
        f"none of its {len(calls)} captured calls has what the probes read,"
        if calls
        else f"no call of its samples ({len(samples)} in all) captured a row, and the probes read"
    )
    raise ArtifactError(f"{name}: {none} layers {wanted} at {site}; {capture_advice(wanted)}")


def _write(
    target: Path,
    opened: OpenLog,
    samples: Sequence[SampleView],
    sources: Sequence[Source],
    notes: list[str],
    texts: ModelTexts,
    max_bytes: int,
) -> WrittenView:
    spread = ranges(samples, len(sources))
    table = TokenTable()
    blocks: list[str] = []
    bytes_left = max_bytes
    for sample in samples:
        block = pack_sample(sample, table, spread)
        bytes_left -= len(block) + 400 + 4 * len(sample.preview)
        if blocks and bytes_left < 0:
            break
        blocks.append(block)
    shown = samples[: len(blocks)]
    left_out = len(samples) - len(shown)
    if left_out:
        notes.append(
            f"The page is limited to {max_bytes / 2**20:.0f} MiB: the first {len(shown)} of "
            f"{len(samples)} samples are shown."
        )
    without = sum(not np.isfinite(s.token_scores).any() for s in shown)
    if without and not any(call.origin == "none" for s in shown for call in s.calls):
        notes.append(f"{without} of {len(shown)} samples captured nothing that these probes read.")
    facts = _facts(opened, texts.model, shown, sources, spread, notes) | {"tokens": table.columns()}
    page = render("page.html", title=str(opened.header.eval.task), facts=facts, blocks=blocks)
    content = page.encode()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, content)
    return WrittenView(
        path=target, nbytes=len(content), n_samples=len(shown), n_left_out=left_out,
        n_without=without, n_calls=sum(len(s.calls) for s in shown),
        n_tokens=sum(int((s.token_ids >= 0).sum()) for s in shown),
        n_scored=sum(int(np.isfinite(s.token_scores[0]).sum()) for s in shown),
        series=tuple(_name(source) for source in sources), has_texts=not texts.notes,
        n_kept=sum(call.origin == "kept" for s in shown for call in s.calls),
        n_lost=sum(call.origin == "none" for s in shown for call in s.calls),
        notes=tuple(notes),
    )  # fmt: skip


def _facts(
    opened: OpenLog,
    model: str,
    samples: Sequence[SampleView],
    sources: Sequence[Source],
    spread: Sequence[Range],
    notes: Sequence[str],
) -> dict[str, Any]:
    spec = opened.header.eval
    columns = list(dict.fromkeys(name for s in samples for name in s.scores))
    return {
        "format": "inspect_lens.view/1",
        "levels": LEVELS,
        "log": {
            "task": spec.task, "model": model, "created": str(spec.created),
            "name": opened.location.rpartition("/")[2], "status": opened.header.status,
        },
        "notes": list(notes),
        "series": [
            {
                "name": _name(source), **asdict(source.series),
                "low": where.low, "high": where.high, "q02": where.q02,
                "median": where.median, "q98": where.q98,
            }
            for source, where in zip(sources, spread, strict=True)
        ],
        "columns": columns,
        "samples": [
            {
                "id": s.id, "epoch": s.epoch, "label": _label(s.label), "target": s.target,
                "text": s.preview, "scores": [s.scores.get(name) for name in columns],
                "values": [None if v is None else float(f"{v:.6g}") for v in s.values],
                "top": [_top(row[read]) for row, read in zip(s.token_scores, s.read, strict=True)],
                "tokens": int((s.token_ids >= 0).sum()), "calls": len(s.calls),
                "origin": _origin(s),
            }
            for s in samples
        ],
    }  # fmt: skip


def _name(source: Source) -> str:
    series = source.series
    return series.probe if series.layer is None else f"{series.probe} · layer {series.layer}"


def _origin(sample: SampleView) -> str:
    """Where a sample's scores come from, where it is not from activations."""
    origins = {call.origin for call in sample.calls}
    if "kept" in origins:
        return f"kept by {', '.join(sample.kept_by)}"
    return "none here" if origins == {"none"} else ""


def _label(value: Any) -> Any:
    if isinstance(value, str) and (kind := label_of(value)) is not None:
        return int(kind)
    return value if value is None or isinstance(value, bool | int) else str(value)


def _top(row: Any) -> float | None:
    known = row[np.isfinite(row)]
    return float(f"{known.max():.6g}") if known.size else None
