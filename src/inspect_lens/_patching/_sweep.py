"""A sweep as a stream of events: baselines, noise floor, cells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from inspect_lens.errors import SpecError
from inspect_lens.spec import Site, shown

from ._align import Alignment, align_tokens, choose_positions
from ._asked import SweepSpec
from ._cells import CellRuns, Stored, idle_runs, windows
from ._result import PatchCell, PatchSweep, RunScore, Source
from ._runs import Rows, Run, Runs, next_token

__all__ = ["CellDone", "FloorFound", "SweepEvent", "SweepStarted", "gather", "sweep"]


class SweepStarted(NamedTuple):
    """What is known before the first cell; fields as in `PatchSweep`."""

    layers: tuple[int, ...]
    positions: tuple[int, ...]
    tokens: tuple[str, ...]
    clean_tokens: tuple[str, ...]
    answer: str
    foil: str | None
    site: Site
    source: Source
    alpha: float
    window: int
    clean: RunScore
    corrupted: RunScore


class FloorFound(NamedTuple):
    """Noise floor as far as it is known; one that comes later is not lower."""

    floor: float


class CellDone(NamedTuple):
    """One cell, and both log-probabilities behind its prompt."""

    cell: PatchCell
    score: RunScore


SweepEvent = SweepStarted | FloorFound | CellDone


def sweep(runs: Runs, spec: SweepSpec) -> Iterator[SweepEvent]:
    """Run a sweep.

    Args:
        runs: the engine.
        spec: what is asked.

    Yields:
        `SweepStarted`, `FloorFound` after one idle run of each kind, then cells as they come. Where
        a later idle run is further from the corrupted one, `FloorFound` comes again.

    Raises:
        SpecError: what is asked does not fit the prompts or the engine.
        UnsupportedError: there is no such site.
    """
    spec.check()
    ids, bad_ids = runs.tokens(spec.clean), runs.tokens(spec.corrupted)
    texts, bad_texts = runs.texts(ids), runs.texts(bad_ids)
    pairs = align_tokens(ids, bad_ids, mode=spec.align, texts=(texts, bad_texts))
    at = choose_positions(spec.positions, pairs, skip_equal=spec.source == "clean")
    wanted = [next_token(runs, spec.clean, ids, spec.answer, "answer")]
    if spec.foil is not None:
        wanted.append(next_token(runs, spec.clean, ids, spec.foil, "foil"))
        if wanted[0] == wanted[1]:
            raise SpecError(
                f"foil={shown(spec.foil)}: begins with the same token as the answer "
                f"{shown(spec.answer)}; put what they share at the end of both prompts"
            )
    swept = None if spec.layers is None else tuple(sorted(set(spec.layers)))
    own = runs.capture(bad_ids, None if spec.window > 1 else swept, spec.site)
    swept = swept or own.layers
    near = windows(swept, own.layers, spec.window)
    stored = _stored(runs, spec, ids, pairs, at, own, swept)
    first = dict(runs.logprobs([Run(ids), Run(bad_ids)], wanted, spec.in_flight))
    good, bad = RunScore(*first[0]), RunScore(*first[1])
    yield SweepStarted(
        layers=swept, positions=at, tokens=tuple(bad_texts),
        clean_tokens=tuple("" if q is None else texts[q] for q in pairs.pairs),
        answer=_shown(runs, spec.answer),
        foil=None if spec.foil is None else _shown(runs, spec.foil),
        site=spec.site, source=spec.source, alpha=spec.alpha, window=spec.window,
        clean=good, corrupted=bad,
    )  # fmt: skip
    idle = idle_runs(own, swept, bad_ids, at, spec.site, spec.alpha, spec.floor_runs)
    asked = CellRuns(bad_ids, stored, near, spec.site, spec.alpha, idle)
    gap = good.metric - bad.metric
    floor, missing = 0.0, {-1, -2}
    held: list[CellDone] = []
    for k, values in runs.logprobs(asked, wanted, spec.in_flight):
        score, which = RunScore(*values), asked.order[k]
        if which >= 0:
            i, j = divmod(which, len(at))
            share = (score.metric - bad.metric) / gap if gap else math.nan
            held.append(CellDone(PatchCell(swept[i], at[j], score.metric, share), score))
        else:
            is_first = which in missing
            missing.discard(which)
            moved = abs(score.metric - bad.metric)
            if not missing and (is_first or moved > floor):
                yield FloorFound(max(floor, moved))
            floor = max(floor, moved)
        if not missing:
            yield from held
            held.clear()


def gather(events: Iterable[SweepEvent]) -> PatchSweep:
    """Put the events of one sweep together.

    Args:
        events: all of them; cells in any order.

    Raises:
        SpecError: a cell is missing, or comes twice.
    """
    stream = iter(events)
    start = next(stream, None)
    if not isinstance(start, SweepStarted):
        raise SpecError(f"events: the first is {shown(start)}; a sweep begins with SweepStarted")
    shape = (len(start.layers), len(start.positions))
    logprob = np.full(shape, np.nan)
    foil = None if start.foil is None else np.full(shape, np.nan)
    floor, n = math.nan, 0
    for event in stream:
        if isinstance(event, FloorFound):
            floor = event.floor
        elif isinstance(event, CellDone):
            where = start.layers.index(event.cell.layer), start.positions.index(event.cell.position)
            logprob[where] = event.score.logprob
            if foil is not None:
                foil[where] = event.score.foil_logprob
            n += 1
    if n != logprob.size or math.isnan(floor):
        raise SpecError(f"events: {n} cells of {logprob.size} came; the sweep was cut off")
    return PatchSweep(**start._asdict(), floor=floor, logprob=logprob, foil_logprob=foil)


def _stored(
    runs: Runs, spec: SweepSpec, ids: list[int], pairs: Alignment, at: tuple[int, ...],
    own: Rows, swept: tuple[int, ...],
) -> Stored:  # fmt: skip
    """The rows of the source, for all layers that a cell may patch."""
    source = spec.source
    if source == "clean":
        taken = runs.capture(ids, own.layers, spec.site)
        partners = [q for p in at if (q := pairs.pairs[p]) is not None]
        return Stored(own.layers, at, taken.values[:, partners])
    width = own.values.shape[-1]
    if source == "zero":
        return Stored(own.layers, at, np.zeros((len(own.layers), len(at), width), np.float32))
    given = np.asarray(spec.rows, dtype=np.float32)
    if spec.window > 1:
        raise SpecError(
            f"window={spec.window}: given rows are patched one layer at a time; allowed is 1"
        )
    n = given.shape[1] if source == "mean" and given.ndim == 3 else len(at)
    if given.shape != (len(swept), n, width) or not n:
        raise SpecError(
            f"rows: have the shape {given.shape}; allowed for source={shown(source)} is "
            f"({len(swept)} layers, {'n' if source == 'mean' else f'{n} positions'}, {width})"
        )
    if source == "mean":
        given = np.repeat(given.mean(axis=1, keepdims=True), len(at), axis=1)
    return Stored(swept, at, given)


def _shown(runs: Runs, answer: str | int) -> str:
    return answer if isinstance(answer, str) else runs.texts([answer])[0]
