"""A sweep as a stream of events: baselines, noise floor, cells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from inspect_lens._base.http import event_of
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.spec import (
    RESID_POST,
    SITE_TABLE,
    Replace,
    Site,
    as_array,
    as_tensor_data,
    check_counts,
    check_word,
    encode_tensor,
    judging,
    shown,
)

from .result import PatchCell, PatchSweep, RunScore, Source
from .runs import (
    Align,
    Alignment,
    Prompt,
    Rows,
    Run,
    Runs,
    align_tokens,
    choose_positions,
    next_token,
)


def windows(
    layers: Sequence[int], served: Sequence[int], width: int
) -> tuple[tuple[int, ...], ...]:
    """For each layer those that are patched with it."""
    if width < 1:
        raise SpecError(f"window={width}; allowed is 1 or more layers")
    spans = [range(at - width // 2, at + (width + 1) // 2) for at in layers]
    return tuple(tuple(n for n in served if n in span) for span in spans)


class Stored(NamedTuple):
    """Rows to put in, by layer and position of the patched prompt."""

    layers: tuple[int, ...]
    positions: tuple[int, ...]
    values: NDArray[np.float32]
    """(layers, positions, width)."""


def patches(
    stored: Stored, layers: Sequence[int], position: int, site: Site, alpha: float = 1.0
) -> tuple[Replace, ...]:
    at = [stored.layers.index(layer) for layer in layers]
    values = stored.values[at, stored.positions.index(position)][:, None]
    edit = Replace(rows=values, layers=tuple(layers), positions=(position,), site=site, alpha=alpha)
    return (edit,)


class CellRuns(Sequence[Run]):
    """Runs of all cells with the idle ones between them; an edit is made when its run is read.

    Made at once, the edits of a long prompt in a large model would take gigabytes.
    """

    def __init__(
        self, ids: Sequence[int], stored: Stored, near: Sequence[tuple[int, ...]], site: Site,
        alpha: float, idle: Sequence[Run],
    ) -> None:  # fmt: skip
        self._ids, self._stored, self._near = ids, stored, near
        self._site, self._alpha, self._idle = site, alpha, idle
        self.order = spread(len(near) * len(stored.positions), len(idle))
        """Index of the cell of each run, layers first, or -1, -2, … for idle ones."""

    def __len__(self) -> int:
        return len(self.order)

    @overload
    def __getitem__(self, at: int) -> Run: ...

    @overload
    def __getitem__(self, at: slice) -> list[Run]: ...

    def __getitem__(self, at: int | slice) -> Run | list[Run]:
        if isinstance(at, slice):
            return [self._run(k) for k in self.order[at]]
        return self._run(self.order[at])

    def _run(self, k: int) -> Run:
        if k < 0:
            return self._idle[-1 - k]
        layer, position = divmod(k, len(self._stored.positions))
        where = self._stored.positions[position]
        edits = patches(self._stored, self._near[layer], where, self._site, self._alpha)
        return Run(self._ids, edits)


def idle_runs(
    own: Rows, swept: Sequence[int], ids: Sequence[int], at: tuple[int, ...], site: Site,
    alpha: float, n: int,
) -> list[Run]:  # fmt: skip
    """Runs that change nothing: repeats, and runs patched with their own rows."""
    made: list[Run] = []
    for k in range(n):
        layer = swept[k * len(swept) // n]
        rows = own.values[own.layers.index(layer), list(at)][None]
        edit = Replace(rows=rows, layers=(layer,), positions=at, site=site, alpha=alpha)
        made += [Run(ids), Run(ids, (edit,))]
    return made


def spread(n_cells: int, n_idle: int) -> list[int]:
    """The order of runs: two idle ones first, and the others evenly between the cells.

    Between them they meet the batches that cells meet; the first two say early what noise there is.
    """
    order = [-1, -2]
    left = list(range(2, n_idle))
    for i in range(n_cells):
        while left and (left[0] - 1) * n_cells // (n_idle - 1) <= i:
            order.append(-1 - left.pop(0))
        order.append(i)
    return order + [-1 - k for k in left]


IN_FLIGHT = 256
"""Requests that an engine gets at once."""
MOST_IN_FLIGHT = 1024
"""Requests that a server starts at once for one sweep, at most."""


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """One sweep; `inspect_lens.patch.patch_sweep` says what the fields mean."""

    clean: Prompt
    corrupted: Prompt
    answer: str | int
    foil: str | int | None = None
    layers: Sequence[int] | None = None
    positions: Sequence[int] | Sequence[bool] | None = None
    site: Site = RESID_POST
    source: Source = "clean"
    rows: ArrayLike | None = None
    alpha: float = 1.0
    window: int = 1
    align: Align = "equal"
    floor_runs: int = 4
    in_flight: int = IN_FLIGHT

    def check(self) -> None:
        """Refuse what can be told without an engine."""
        check_word("site", self.site, SITE_TABLE)
        check_word("source", self.source, Source)
        if (self.rows is None) != (self.source in ("clean", "zero")):
            raise SpecError(
                f"source={shown(self.source)} and rows={'none' if self.rows is None else 'given'}; "
                "rows belong to source='mean' and source='rows'"
            )
        if not math.isfinite(self.alpha):
            raise SpecError(f"alpha={self.alpha}; allowed is a finite number, mostly from 0 to 1")
        if self.floor_runs < 1 or self.in_flight < 1:
            raise SpecError(
                f"floor_runs={self.floor_runs}, in_flight={self.in_flight}; allowed is 1 or more "
                "of each"
            )


_Ids = Annotated[list[StrictInt], Field(fail_fast=True)]
"""One error is enough: ten thousand take seconds to write."""
_Messages = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class _Body(BaseModel):
    """Body of `POST /v1/inspect_lens/patch_sweep`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    clean: StrictStr | _Ids | _Messages
    corrupted: StrictStr | _Ids | _Messages
    answer: StrictStr | StrictInt
    foil: StrictStr | StrictInt | None = None
    sites: Annotated[list[str], Field(fail_fast=True)] = Field(default=[RESID_POST], min_length=1)
    layers: _Ids | None = None
    positions: Annotated[list[StrictBool], Field(fail_fast=True)] | _Ids | None = None
    source: str = "clean"
    rows: list[Any] | dict[str, Any] | None = None
    alpha: float = 1.0
    window: int = Field(default=1, ge=1)
    align: str = "equal"
    floor_runs: int = Field(default=4, ge=1, le=64)
    in_flight: int = Field(default=IN_FLIGHT, ge=1, le=MOST_IN_FLIGHT)


def specs_of(body: Any) -> tuple[str | None, list[SweepSpec]]:
    if not isinstance(body, Mapping):
        raise SpecError(f"the body: a JSON object is wanted, not {type(body).__name__}")
    check_counts(dict(body))
    if unknown := sorted(str(name)[:80] for name in body.keys() - _Body.model_fields.keys()):
        raise SpecError(
            f"{', '.join(unknown)}: unknown; allowed are {', '.join(_Body.model_fields)}"
        )
    with judging(""):
        asked = _Body.model_validate(dict(body))
    for i, site in enumerate(asked.sites):
        check_word(f"sites[{i}]", site, SITE_TABLE)
    if len(set(asked.sites)) < len(asked.sites):
        raise SpecError(f"sites={shown(asked.sites)}: one stands there twice; name each once")
    for name in ("clean", "corrupted", "answer", "foil"):
        if getattr(asked, name) in ("", []):
            raise SpecError(f"{name}: is empty; give a text, token ids, or messages")
    for name in ("clean", "corrupted"):
        _check_prompt(getattr(asked, name), name)
    fields = {name: getattr(asked, name) for name in _Body.model_fields}
    model, sites = fields.pop("model"), fields.pop("sites")
    if asked.rows is not None:
        fields["rows"] = as_tensor_data(asked.rows, field="rows").to_float32()
        if not np.isfinite(fields["rows"]).all():
            raise SpecError("rows: hold NaN or infinity; allowed are finite numbers")
        if len(sites) > 1:
            raise SpecError(
                f"rows with {len(sites)} sites: rows are of one site; send a request for each"
            )
    specs = [SweepSpec(site=site, **fields) for site in sites]
    for spec in specs:
        spec.check()
    return model, specs


def _check_prompt(prompt: Prompt, name: str) -> None:
    for i, part in enumerate(() if isinstance(prompt, str) else prompt):
        if isinstance(part, int):
            if not 0 <= part < 1 << 31:
                raise SpecError(f"{name}[{i}]: {shown(part)}; token ids are 0 to 2**31 - 1")
        elif isinstance(part, Mapping):
            for key in ("role", "content"):
                if key not in part or not (key == "content" or isinstance(part[key], str)):
                    raise SpecError(
                        f"{name}[{i}].{key}: {shown(part.get(key))}; a message has a role and "
                        'content, such as {"role": "user", "content": "Hello"}'
                    )


def to_body(spec: SweepSpec, model: str) -> dict[str, Any]:
    rows = None if spec.rows is None else encode_tensor(as_tensor_data(spec.rows))
    given = {each.name: getattr(spec, each.name) for each in fields(spec) if each.name != "site"}
    return given | {
        "model": model, "clean": _plain(spec.clean), "corrupted": _plain(spec.corrupted),
        "sites": [spec.site], "layers": _listed(spec.layers), "rows": rows,
        "positions": _listed(spec.positions), "alpha": float(spec.alpha),
    }  # fmt: skip


def _plain(prompt: Prompt) -> Any:
    if isinstance(prompt, str):
        return prompt
    return [dict(part) if isinstance(part, Mapping) else int(part) for part in prompt]


def _listed(values: Sequence[int] | Sequence[bool] | None) -> list[int] | None:
    return None if values is None else np.asarray(values).tolist()


class FloorFound(NamedTuple):
    """Noise floor as far as it is known; one that comes later is not lower."""

    floor: float


class CellDone(NamedTuple):
    """One cell, and both log-probabilities behind its prompt."""

    cell: PatchCell
    score: RunScore


SweepEvent = PatchSweep | FloorFound | CellDone
"""The first is the sweep without a floor and without a cell."""
_FOUND = ("floor", "logprob", "foil_logprob")
_FACTS = [field.name for field in fields(PatchSweep) if field.name not in _FOUND]
"""What is known of a sweep before its first cell."""


def sweep(runs: Runs, spec: SweepSpec) -> Iterator[SweepEvent]:
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
    empty = np.full((len(swept), len(at)), np.nan)
    yield PatchSweep(
        layers=swept, positions=at, tokens=tuple(bad_texts),
        clean_tokens=tuple("" if q is None else texts[q] for q in pairs.pairs),
        answer=_shown(runs, spec.answer),
        foil=None if spec.foil is None else _shown(runs, spec.foil),
        site=spec.site, source=spec.source, alpha=spec.alpha, window=spec.window,
        clean=good, corrupted=bad, floor=math.nan, logprob=empty,
        foil_logprob=None if spec.foil is None else empty,
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
    """Put the events of one sweep together."""
    stream = iter(events)
    start = next(stream, None)
    if not isinstance(start, PatchSweep):
        raise SpecError(f"events: the first is {shown(start)}; a sweep begins with a PatchSweep")
    logprob = start.logprob.copy()
    foil = None if start.foil_logprob is None else start.foil_logprob.copy()
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
    return replace(start, floor=floor, logprob=logprob, foil_logprob=foil)


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
    given = as_array(spec.rows).astype(np.float32, copy=False)
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


class EventLines:
    """Writes the events of sweeps as JSON objects, of which each names its site."""

    def __init__(self) -> None:
        self._site = ""
        self._floor = 0.0
        self._cells = 0

    def line(self, event: SweepEvent) -> dict[str, Any]:
        if isinstance(event, PatchSweep):
            self._site, self._cells = event.site, 0
            facts = {name: getattr(event, name) for name in _FACTS}
            both = {"clean": event.clean._asdict(), "corrupted": event.corrupted._asdict()}
            more = {"metric": event.metric_name, "cells": event.logprob.size}
            return {"event": "start", **facts, **both, **more}
        if isinstance(event, FloorFound):
            self._floor = event.floor
            return {"event": "floor", "site": self._site, "floor": event.floor}
        self._cells += 1
        cell, score = event
        share = cell.recovered if math.isfinite(cell.recovered) else None
        return {
            "event": "cell", "site": self._site, "layer": cell.layer, "position": cell.position,
            "value": cell.value, "recovered": share, **score._asdict(),
        }  # fmt: skip

    def end(self) -> dict[str, Any]:
        """The line after a sweep's last cell: without it the stream was cut off."""
        return {"event": "end", "site": self._site, "floor": self._floor, "cells": self._cells}


def events_of(lines: Iterable[str]) -> Iterator[SweepEvent]:
    for line in lines:
        if not line.strip():
            continue
        found = event_of(line)
        if (error := found.get("error")) is not None:
            message = error.get("message") if isinstance(error, Mapping) else error
            raise CaptureError(f"patch sweep: the server could not end it: {message}")
        kind = found.pop("event")
        if kind == "end":
            return
        if kind == "start":
            yield _start(found)
        elif kind == "floor":
            yield FloorFound(float(found["floor"]))
        else:
            share = math.nan if found["recovered"] is None else found["recovered"]
            cell = PatchCell(found["layer"], found["position"], float(found["value"]), share)
            yield CellDone(cell, _score(found["logprob"], found["foil_logprob"]))
    raise CaptureError("patch sweep: the response ended before the sweep did; ask again")


def _score(logprob: float | str, foil_logprob: float | str | None) -> RunScore:
    # In JSON, NaN and infinity are texts.
    return RunScore(float(logprob), None if foil_logprob is None else float(foil_logprob))


def _start(found: Mapping[str, Any]) -> PatchSweep:
    facts = {name: found[name] for name in _FACTS}
    for name in ("layers", "positions", "tokens", "clean_tokens"):
        facts[name] = tuple(facts[name])
    for name in ("clean", "corrupted"):
        facts[name] = _score(**facts[name])
    empty = np.full((len(facts["layers"]), len(facts["positions"])), np.nan)
    foil = None if facts["foil"] is None else empty
    return PatchSweep(**facts, floor=math.nan, logprob=empty, foil_logprob=foil)
