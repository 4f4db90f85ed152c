"""Of a request's results, a worker copies rows of those alone that it has a part in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inspect_lens._engine.plan import Batch, RequestTable, plan_step
from inspect_lens._engine.protocol.edits import NO_EDITS
from inspect_lens._engine.protocol.messages import Envelope
from inspect_lens._engine.protocol.readouts import CaptureEnvelope, ProbesEnvelope
from inspect_lens._engine.step.capture_groups import Groups
from inspect_lens.spec import RESID_POST, tap_points

FIRST, SECOND = (tap_points((RESID_POST,), (layer,))[0] for layer in (0, 1))


class Probes:
    def find(self, names: Any) -> list[Any]:
        return []

    def readout(self, *_: Any) -> object:
        return object()


@pytest.mark.parametrize("stage", ["both", "second"])
@pytest.mark.parametrize("positions", [None, (5, 7)])
def test_rows_of_a_stage_are_those_of_its_own_results(
    stage: str, positions: tuple[int, ...] | None
) -> None:
    capture = CaptureEnvelope(
        sites=(RESID_POST,), layers=(1,), hidden=4, dtype="float32", transport="handle",
        lo=5, hi=8, positions=positions,
    )  # fmt: skip
    probes = ProbesEnvelope(lo=0, hi=20, names=("p",), points=(FIRST,), columns=1)
    envelope = Envelope("r", 1, capture, NO_EDITS, probes, 20, False, None)
    taps = {FIRST: 0, SECOND: 1} if stage == "both" else {SECOND: 0}
    store: Any = Probes()
    groups, table = Groups(taps, store, np.ones(len(taps), dtype=np.int64)), RequestTable()
    slot = table.take()
    group = groups.take(envelope)
    assert group is not None
    table.group[slot] = group
    groups.watch(table, np.asarray([slot]), [envelope])
    groups.watch_listed(table, slot, envelope)
    one: Any = {"slots": [slot], "offset": [0], "n_tokens": [20], "position": [0]}
    batch = Batch(**{name: np.asarray(value, dtype=np.int64) for name, value in one.items()})
    plan = plan_step(batch, table, groups.taps, np.zeros((1, len(taps)), dtype=bool), ring_rows=99)
    (block,) = plan.blocks
    cut = groups.cut(block, 0)
    if cut is None:
        n, first, listed = block.counts, block.first, block.listed
    else:
        _, n, first, listed = cut
    wanted = [5, 6, 7] if positions is None else [5, 7]
    at = list(listed[0]) if 0 in listed else list(range(first[0], first[0] + n[0]))
    assert at == wanted
