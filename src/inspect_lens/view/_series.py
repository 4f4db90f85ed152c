"""From probes and captured rows to token scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from inspect_ai.log import EvalLog, EvalSample
from numpy.typing import NDArray

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model import Activations
from inspect_lens.model._places import may_follow
from inspect_lens.probe import (
    SENTENCE_POOL,
    AnyProbe,
    NeuralProbe,
    check_model,
    found_above,
    load_probe,
    parse_pool,
    pool_scores,
    sentence_ends,
)
from inspect_lens.reading import TokenScores
from inspect_lens.reading._rows import pick_rows
from inspect_lens.spec import resolve_positions, result_name

from ._page import Series


class Source(NamedTuple):
    """A series and the probe that makes it."""

    series: Series
    probe: AnyProbe | None
    """None where the probe is not here and its scores were kept."""

    @property
    def sha256(self) -> str:
        """Of the probe that wrote such scores, restricted to the layers that it read."""
        return self.series.sha256 if self.probe is None else self.probe.sha256


class Scored(NamedTuple):
    """What one series says of one call."""

    scores: NDArray[np.float32]
    """(n_prompt + n_completion,) float32; NaN where a token has no row."""
    value: float | None


def make_sources(probes: Sequence[AnyProbe]) -> list[Source]:
    """One series per probe, and one more for each layer of a probe of several."""
    made = []
    for probe in probes:
        several = len(probe.layers) > 1
        parts = [(None, probe), *((n, probe.at(n)) for n in probe.layers if several)]
        for layer, part in parts:
            limit = part.threshold
            finds = found_above(part.card, limit.value) if limit else None
            series = Series(
                probe=probe.name, layer=layer, layers=part.layers, sha256=probe.sha256,
                pool=probe.pool, positions=_say(probe.positions),
                threshold=limit.value if limit else None, fpr=limit.fpr if limit else None,
                description=probe.card.description, neural=isinstance(probe, NeuralProbe),
                finds=str(finds or ""),
            )  # fmt: skip
            made.append(Source(series, part))
    return made


def kept_sources(records: Sequence[TokenScores], have: Sequence[Source]) -> list[Source]:
    """Series of probes that are not here, from the token scores that scorers kept."""
    known, names = {s.sha256 for s in have}, {s.series.probe for s in have}
    made = []
    for record in records:
        if record.probe_sha256 in known:
            continue
        known.add(record.probe_sha256)
        series = Series(
            probe=f"{record.probe} (as scored)" if record.probe in names else record.probe,
            layer=None, layers=record.layers, sha256=record.probe_sha256,
            pool=record.pool, positions="as scored", threshold=record.threshold, fpr=None,
            description="",
        )  # fmt: skip
        made.append(Source(series, None))
    return made


def score_call(handle: Activations, source: Source, pieces: Sequence[str]) -> Scored | None:
    """Score every captured token of a call, and pool those that the probe reads."""
    probe, pool = source.probe, source.series.pool
    if probe is None:
        return None
    info = handle.tensors.get(result_name(probe.site))
    if info is None or not set(probe.layers) <= set(info.layers):
        return None
    rows = pick_rows(handle, probe.layers, probe.site)
    n_prompt, total = handle.n_prompt, handle.n_prompt + handle.n_completion
    scores = np.full(max(total, max(rows.positions, default=-1) + 1), np.nan)
    if len(rows.positions):
        scores[list(rows.positions)] = probe.score_tokens(rows.acts, rows.layers)
    value = None
    try:
        read = resolve_positions(
            probe.positions, n_prompt=n_prompt, n_max=total - 1, field="positions"
        )
    except SpecError:
        read = ()
    by_sentence = parse_pool(pool).name == SENTENCE_POOL
    if len(read) and np.isfinite(scores[list(read)]).all() and not (by_sentence and not pieces):
        ends = sentence_ends(list(pieces))[list(read)] if by_sentence else None
        value = (
            float(
                probe.score(
                    rows.acts[:, _rows_at(rows.positions, read)], rows.layers, pool=pool, ends=ends
                )
            )
            if isinstance(probe, NeuralProbe)
            else float(pool_scores(scores[list(read)], pool, ends=ends))
        )
    return Scored(scores[:total].astype(np.float32), value)


def _rows_at(have: Sequence[int], wanted: Sequence[int]) -> list[int]:
    at = {position: i for i, position in enumerate(have)}
    return [at[position] for position in wanted]


def _say(positions: object) -> str:
    return positions if isinstance(positions, str) else str(list(positions))  # type: ignore[call-overload]


def choose_probes(
    asked: Sequence[str | Path | AnyProbe],
    header: EvalLog,
    first: EvalSample | None,
    *,
    any_model: bool,
    have_kept: bool = False,
) -> tuple[list[AnyProbe], list[str]]:
    """Load the probes of a page."""
    model = header.eval.model.partition("/")[2].partition(":")[0]
    notes: list[str] = []
    probes: list[AnyProbe] = []
    if asked:
        probes = [load_probe(name) for name in asked]
    else:
        scored_with = dict(_of_scores(first))
        for name in dict.fromkeys([*_of_options(header), *scored_with]):
            if name in {p.name for p in probes}:
                continue  # of the card of one that was named by its path
            path = Path(name)
            if ("://" in name or path.is_absolute() or ".." in path.parts) and not may_follow(name):
                notes.append(
                    f"The log was scored with {name!r}, which was not fetched: a log may name any "
                    f"place. Pass --probe {name}, or allow it with --follow {name}."
                )
                continue
            try:
                probe = load_probe(name)
            except ArtifactError as error:
                notes.append(f"The log was scored with {name!r}, which is not here: {error}")
                continue
            wanted = scored_with.get(probe.name)
            if wanted and wanted != probe.sha256:
                notes.append(
                    f"The log was scored with another version of {probe.name} "
                    f"({wanted[:12]}…, here is {probe.sha256[:12]}…)."
                )
            if probe.sha256 not in {p.sha256 for p in probes}:
                probes.append(probe)
    if not probes and not have_kept:
        raise SpecError(
            "probe: none was given, and the log names none that is here; allowed are a name below "
            f"probes/, a folder or an hf:// address; pass --probe. {' '.join(notes)}".strip()
        )
    for probe in probes:
        if not any_model:
            check_model(probe, model)
        elif probe.card.model and probe.card.model.name != model:
            notes.append(f"{probe.name} was trained on {probe.card.model.name}, not on {model}.")
    return probes, notes


def _of_options(header: EvalLog) -> Iterator[str]:
    for scorer in header.eval.scorers or []:
        yield from _names((scorer.options or {}).get("probe"))
        yield from _names((scorer.options or {}).get("probes"))


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (v for v in value.values() if isinstance(v, str))
    elif isinstance(value, Sequence):
        yield from (v for v in value if isinstance(v, str))


def _of_scores(sample: EvalSample | None) -> Iterator[tuple[str, str]]:
    for score in ((sample.scores if sample else None) or {}).values():
        facts = score.metadata or {}
        # A dict score has the facts of each part under its key.
        for part in (facts, *(v for v in facts.values() if isinstance(v, Mapping))):
            if isinstance(part.get("probe"), str):
                yield part["probe"], str(part.get("probe_sha256") or "")
