"""Which results of a running request are ready, and what of them its outputs have not carried yet.

An output says how many tokens its text has. Rows of these are where their request's result will
lie, so they are taken when somebody reads the output, and not before: whoever reads slowly has
vLLM merge outputs, keeps nobody waiting, and costs no memory beside the result and the part that
is on its way.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from inspect_lens._base.partial import Partial
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.collect.placement import Collected, Further
from inspect_lens._engine.collect.result_memory import STORAGE
from inspect_lens._engine.protocol.messages import ROWS, SCORES, Envelope
from inspect_lens._engine.protocol.readouts import Readout
from inspect_lens._vllm.registered.probe_scores import Reading
from inspect_lens._vllm.registered.rows import Reuse, named_tensors
from inspect_lens._vllm.sinks.sink import HIDDEN
from inspect_lens.spec import GateReceipt, TensorData

_PER_OTHER_S, _AT_MOST_S = 0.008, 2.0
"""Seconds between two events of a stream that carry results: for each other stream; at most."""


class Pace:
    """Which events of one answer carry results.

    Such an event costs the event loop of all several times as much as one of text. So the more
    streams are under way, the more tokens share one: a stream has the next after `_PER_OTHER_S` for
    each other stream, and after `_AT_MOST_S` in any case, and that carries what has come. One that
    is alone has it with each token, and waits for the rows of that, as each stream does for those
    of its first token. The last event brings what is left. In between, `Streaming.pause` has
    nothing put on a token that somebody would have to look at.
    """

    _n_under_way = 0
    """Choices whose events carry results, of all answers."""

    def __init__(self) -> None:
        self._last: dict[int, float] = {}
        """By choice, when its last event with results was made; long ago, where there was none."""

    @property
    def pause_s(self) -> float:
        """Seconds between two events with results; none for a stream that is alone."""
        return min(_PER_OTHER_S * (Pace._n_under_way - 1), _AT_MOST_S)

    def begin(self, choices: Iterable[int]) -> None:
        """Count those of the choices that have not begun before, until the `end`."""
        n_known = len(self._last)
        self._last = dict.fromkeys(choices, -math.inf) | self._last
        Pace._n_under_way += len(self._last) - n_known

    def is_due(self, choices: Collection[int]) -> bool:
        """Whether an event that tells of these choices, which have begun, carries results."""
        return time.monotonic() - min(self._last[i] for i in choices) >= self.pause_s

    def may_wait(self, choices: Collection[int]) -> bool:
        """Whether an event that is due waits for results that are on their way."""
        return not self.pause_s or any(self._last[i] == -math.inf for i in choices)

    def note(self, choices: Collection[int]) -> None:
        """Note that an event has carried results, or that there were none."""
        self._last |= dict.fromkeys(choices, time.monotonic())

    def end(self) -> None:
        """Note that the answer is over."""
        Pace._n_under_way -= len(self._last)
        self._last = {}


class Streaming:
    """How much of each result of one request has gone out."""

    def __init__(self, envelope: Envelope, reading: Reading | None, reuse: Reuse | None) -> None:
        self._envelope, self._reading, self._reuse = envelope, reading, reuse
        # All of a request's travel alike, but for what is a sink's.
        asked = (envelope.capture, envelope.qk, envelope.lens)
        ways = [part.transport for part in asked if part and part.transport != HIDDEN]
        self._transport = (*ways, "inline")[0]
        kinds = streamed_kinds(envelope) if envelope.is_streamed else []
        self._sent = dict.fromkeys(kinds, 0)
        """Positions that outputs have carried, by kind of result."""
        self._copied = {kind: self._copied_bytes(kind) for kind in kinds}
        """Bytes of a position that are copied where nobody may keep them."""
        self._scores_tokens = reading is not None and reading.streams_tokens
        self._scores: dict[str, list[float]] = {}
        """Token scores that no output has carried yet."""
        self._told: set[int] = set()
        """Gates of which an output has told."""
        self._reads = threading.Lock()
        """Alarms have probes read in the event loop, and large parts are taken in a thread."""
        is_wanted = envelope.is_streamed or self._scores_tokens
        self._paused_until = -math.inf if is_wanted else math.inf

    @property
    def is_due(self) -> bool:
        """Whether an output before the last one may carry something."""
        return time.monotonic() >= self._paused_until

    def pause(self, seconds: float) -> None:
        """Have outputs carry nothing for a while: most of a text, which costs as much as any."""
        self._paused_until = time.monotonic() + seconds

    def _since(self) -> dict[int, int]:
        reading = self._reading
        if reading is None or not self._scores_tokens:
            return self._sent
        return {**self._sent, SCORES: reading.n_seen}

    def has_come(self, key: str, n_fed: int, settled: int | None, collector: Collector) -> bool:
        """Whether all has come of the tokens that were fed, or nothing will any more."""
        return collector.has_further(key, self._since(), n_fed=n_fed, settled=settled)

    def n_bytes(self, n_fed: int, *, is_kept: bool) -> int:
        """Bytes of rows that are copied for the next output at most; see `Results.carry`."""
        total = 0
        for kind, since in self._sent.items():
            n_known = 0
            if kind == ROWS and not since and self._reuse is not None:
                n_known = self._reuse.n_positions
            is_whole = is_kept or n_known
            if each := self._position_bytes(kind) if is_whole else self._copied[kind]:
                n = len(self._asked(kind).fed(n_fed)) - since + n_known
                total += max(n, 0) * each
        return total

    def _asked(self, kind: int) -> Readout:
        asked = self._envelope.results[kind]
        assert asked is not None
        return asked

    def _position_bytes(self, kind: int) -> int:
        """Bytes of all rows of a position."""
        asked = self._asked(kind)
        taps, width = asked.shape
        return taps * width * np.dtype(STORAGE[asked.wire]).itemsize

    def _copied_bytes(self, kind: int) -> int:
        """Of these, what is copied: nothing where they wait to be fetched as they lie."""
        asked, is_fetched = self._asked(kind), self._transport == "binary"
        if is_fetched and asked.shape[0] == 1 and getattr(asked, "is_simple", True):
            return 0
        return self._position_bytes(kind)

    def read_scores(self, key: str, n_fed: int, settled: int | None, collector: Collector) -> None:
        """Have probes read what has come."""
        reading = self._reading
        assert reading is not None
        with self._reads:
            since = {SCORES: reading.n_seen}
            found = collector.further(key, since, n_fed=n_fed, settled=settled)
            if found is not None:
                self.add_scores(reading.feed(found.rows[SCORES]))

    def add_scores(self, new: Mapping[str, list[float]]) -> None:
        """Keep token scores for the next output."""
        for name, scores in new.items():
            self._scores.setdefault(name, []).extend(scores)

    def take(
        self, key: str, n_fed: int, settled: int | None, collector: Collector
    ) -> Partial | None:
        """What has come since the last output of the tokens that were fed; None for nothing."""
        if self._scores_tokens:
            self.read_scores(key, n_fed, settled, collector)
        found: Further | None = Further({}, {}, {})
        if self._envelope.is_streamed:
            found = collector.further(key, self._sent, n_fed=n_fed, settled=settled)
        return None if found is None else self._part(found) or None

    def rest(self, collected: Collected) -> Partial | None:
        """What no output has carried of a request that is over; None for nothing."""
        rows = {i: collected.tensors[i].storage[:, n:] for i, n in self._sent.items()}
        return self._part(Further(rows, collected.fired, collected.attention)) or None

    def _part(self, found: Further) -> Partial:
        tensors: dict[str, TensorData] = {}
        positions: dict[str, Sequence[int]] = {}
        n_rows = 0
        for kind in self._sent:
            where, rows = self._further(kind, found.rows[kind])
            if kind == ROWS and (capture := self._envelope.capture) is not None:
                n_rows = len(capture.taps) * len(where)
            if len(where):
                named = named_tensors(self._envelope, kind, rows, found.attention)
                tensors |= named
                positions |= dict.fromkeys(named, where)
        with self._reads:
            scores, self._scores = self._scores, {}
        gates = self._fired(found.fired) if self._envelope.is_streamed else ()
        return Partial(scores, tensors, positions, gates, n_rows, self._transport)

    def _further(self, kind: int, rows: Any) -> tuple[Sequence[int], TensorData]:
        """Positions and rows of one kind that come next, and note that they have gone out."""
        asked, since, reuse = self._asked(kind), self._sent[kind], self._reuse
        until = since + rows.shape[1]
        where: Sequence[int] = asked.positions or range(asked.lo, asked.hi)
        where = where[since:until]
        if kind == ROWS and not since and until and reuse is not None and reuse.known is not None:
            # Rows of the beginning of the prompt, which an earlier request has captured.
            rows = reuse.known.before(rows, reuse.asked.lo)
            where = range(reuse.asked.lo, asked.lo + until)
        self._sent[kind] = until
        return where, TensorData(rows, asked.wire)

    def _fired(self, fired: Mapping[int, int]) -> tuple[GateReceipt, ...]:
        made: list[GateReceipt] = []
        for edit in self._envelope.edits:
            latch = edit.latch
            if latch is not None and latch in fired and latch not in self._told:
                self._told.add(latch)
                made.append(
                    GateReceipt(
                        layer=edit.layers[0],
                        site=edit.site,
                        fired_at=fired[latch],
                        n_tokens=None,
                        sha256=edit.sha256,
                        began_open=edit.is_open,
                        key=edit.key or None,
                    )
                )
        return tuple(made)


def streamed_kinds(envelope: Envelope) -> list[int]:
    """Kinds of results that are sent as they come, scores apart; what is a sink's alone is not."""
    capture = envelope.capture
    is_hidden = capture is not None and capture.transport == HIDDEN
    kinds = [i for i, part in enumerate(envelope.results) if part is not None and i != SCORES]
    return [i for i in kinds if not (i == ROWS and is_hidden)]
