"""Events of a sweep as lines of JSON, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from inspect_lens.errors import CaptureError

from ._result import PatchCell, RunScore
from ._sweep import CellDone, FloorFound, SweepEvent, SweepStarted

__all__ = ["EventLines", "events_of"]


class EventLines:
    """Writes the events of sweeps as JSON objects, of which each names its site."""

    def __init__(self) -> None:
        self._site = ""
        self._floor = 0.0
        self._cells = 0

    def line(self, event: SweepEvent) -> dict[str, Any]:
        """One event as a JSON object."""
        if isinstance(event, SweepStarted):
            self._site, self._cells = event.site, 0
            n = len(event.layers) * len(event.positions)
            metric = "log-probability" if event.foil is None else "logit difference"
            both = {"clean": event.clean._asdict(), "corrupted": event.corrupted._asdict()}
            return {"event": "start", **event._asdict(), **both, "metric": metric, "cells": n}
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
    """Read the lines of one sweep."""
    for line in lines:
        if not line.strip():
            continue
        found = json.loads(line)
        if (error := found.get("error")) is not None:
            message = error.get("message") if isinstance(error, Mapping) else error
            raise CaptureError(f"patch sweep: the server could not end it: {message}")
        kind = found.pop("event")
        if kind == "end":
            return
        if kind == "start":
            yield _start(found)
        elif kind == "floor":
            yield FloorFound(found["floor"])
        else:
            share = math.nan if found["recovered"] is None else found["recovered"]
            cell = PatchCell(found["layer"], found["position"], found["value"], share)
            yield CellDone(cell, RunScore(found["logprob"], found["foil_logprob"]))
    raise CaptureError("patch sweep: the response ended before the sweep did; ask again")


def _start(found: Mapping[str, Any]) -> SweepStarted:
    fields = {name: found[name] for name in SweepStarted._fields}
    for name in ("layers", "positions", "tokens", "clean_tokens"):
        fields[name] = tuple(fields[name])
    for name in ("clean", "corrupted"):
        fields[name] = RunScore(**fields[name])
    return SweepStarted(**fields)
