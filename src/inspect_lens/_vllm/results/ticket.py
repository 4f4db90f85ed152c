"""Finished choices, and what they get: tensors, scores and a receipt."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from inspect_lens._base.to_torch import to_torch
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.collect.placement import Collected
from inspect_lens._engine.collect.result_memory import STORAGE
from inspect_lens._engine.hooks.runner import EAGER_KEY
from inspect_lens._engine.protocol.messages import ROWS, SCORES
from inspect_lens._engine.protocol.processes import ends_process
from inspect_lens._engine.protocol.readouts import CaptureEnvelope
from inspect_lens._vllm.registered.named import put_lens, put_qk, tensors_by_name
from inspect_lens._vllm.registered.persistent_hooks import EagerResults, put_eager, take_eager
from inspect_lens._vllm.registered.probe_scores import Whole
from inspect_lens._vllm.sinks.sink import HIDDEN, Done, Said
from inspect_lens.errors import CaptureError
from inspect_lens.spec import TensorData

from .expected import Expected, Prepared, fill, receipt_of, shorten

logger = logging.getLogger("vllm.inspect_lens")

_LIGHT_BYTES = 1 << 18
"""A result that is so small is quickly made of its rows, whatever is made of them."""
_LIGHT_READS = 128
"""Tokens, times probes that are read token by token: half a millisecond."""


@dataclass(frozen=True)
class Ticket:
    """Put on a finished choice: what to collect for it."""

    key: str
    """Internal id of the choice."""
    n_completion: int
    """Sampled tokens."""
    n_last: int = 1
    """Those of the last step; more than one where drafts were accepted."""
    said: tuple[tuple[int, ...], str] | None = None
    """All that was sampled, as ids and as text, where a sink takes it."""


@dataclass
class Job:
    """An output, vLLM's `RequestOutput`, whose finished choices get their results."""

    output: Any
    choices: list[Choice] = field(default_factory=list)
    error: Exception | None = None

    def take_error(self) -> Exception | None:
        """The error, of which nothing is left here: its traceback has a frame that holds this."""
        error, self.error = self.error, None
        return error


def prepare(key: str, expected: Expected, collector: Collector) -> bool:
    """Do what can be done for a choice before its last rows have come."""
    envelope, n_fed = expected.envelope, expected.n_max
    if not n_fed or EAGER_KEY in expected.packed:
        return True
    if envelope.is_edited_alone:
        expected.prepared = Prepared(receipt_of(expected, n_fed - expected.n_prompt + 1))
        return True
    if envelope.edited.edits or envelope.qk is not None:
        return True  # receipts of these are of what was done
    if expected.n_known or envelope.lens is not None:
        return True  # a part of the rows is known already, or more is made of them
    # What drafts left is settled only when the last step has told.
    coming = None if envelope.is_speculative else collector.preview(key, expected.counts(n_fed))
    if coming is not None and not coming:
        return False
    n_completion = n_fed - expected.n_prompt + 1
    prepared = Prepared(receipt_of(expected, n_completion), coming or {})
    if expected.reading is not None:
        expected.reading.prepare()
    if coming:
        if envelope.capture is not None and envelope.capture.is_simple:
            prepared.named = _named(coming[ROWS], envelope.capture)
        if expected.reading is not None:
            prepared.whole = expected.reading.whole(coming[SCORES].storage)
    expected.prepared = prepared
    return True


def is_ready(ticket: Ticket, expected: Expected, collector: Collector) -> bool:
    """Whether all has come for a choice, or it has failed; not asked of what hooks save."""
    n_fed = expected.n_fed(ticket.n_completion)
    return not ticket.n_completion or collector.is_ready(
        ticket.key,
        counts=expected.counts(n_fed),
        n_fed=n_fed,
        settled=expected.settled(n_fed, ticket.n_last),
    )


def is_light(ticket: Ticket, expected: Expected, *, encodes: bool) -> bool:
    """Whether a choice takes little time once everything has come: less than a thread does."""
    envelope = expected.envelope
    if expected.sink is not None:
        return False  # rows are copied, and the answer may wait
    if EAGER_KEY in expected.packed or envelope.qk is not None or envelope.lens is not None:
        return False
    n_fed = expected.n_fed(ticket.n_completion)
    if expected.reading is not None:
        n_left = expected.n_read(n_fed) - expected.reading.n_seen
        if expected.reading.n_by_token * n_left > _LIGHT_READS:
            return False
    if (capture := envelope.capture) is None:
        return True
    if encodes and capture.transport != "binary":
        return False
    taps, width = capture.shape
    count = len(expected.positions(n_fed)) + expected.n_known
    if taps * count * width * np.dtype(STORAGE[capture.wire]).itemsize <= _LIGHT_BYTES:
        return True
    # Else the rows have to be the result, where they lie, and fill most of what they lie in.
    if expected.n_known:
        return False
    is_plain = capture.combine is None and not capture.is_last and capture.is_simple
    most = len(expected.positions(expected.n_max))
    return is_plain and (count == most or (taps == 1 and 5 * count >= 4 * most))


@dataclass(slots=True)
class Choice:
    """A finished choice, and what has come for it."""

    completion: Any
    """vLLM's `CompletionOutput`."""
    ticket: Ticket
    expected: Expected
    eager: EagerResults | None = None
    collected: Collected | None = None
    whole: Whole | None = None
    """What probes read, where that is to be taken together with others'."""

    @property
    def prepared(self) -> Prepared | None:
        """What was prepared for it, if it ran to its end."""
        prepared = self.expected.prepared
        if prepared is None or prepared.receipt.n_completion != self.ticket.n_completion:
            return None
        return prepared

    def take(self, collector: Collector, timeout_s: float, *, may_wait: bool = True) -> None:
        ticket, expected = self.ticket, self.expected
        if not ticket.n_completion:
            # An engine that is paused ends what waits; no row of it will ever come.
            raise CaptureError(
                f"request {ticket.key} was aborted before its first token; it has no results"
            )
        n_fed = expected.n_fed(ticket.n_completion)
        self.eager = take_eager(
            collector, ticket.key, expected.packed, n_fed=n_fed, timeout_s=timeout_s
        )
        self.collected = collector.take(
            ticket.key,
            counts=expected.counts(n_fed),
            n_fed=n_fed,
            timeout_s=timeout_s,
            settled=expected.settled(n_fed, ticket.n_last),
            may_wait=may_wait,
        )

    def read(self) -> dict[str, list[float]]:
        """Have probes read what was taken, but for what is read together with others'."""
        reading = self.expected.reading
        if reading is None or self.whole is not None:
            return {}
        assert self.collected is not None
        numbers = self.collected.tensors[SCORES].storage
        self.whole = reading.whole(numbers)
        return {} if self.whole is not None else reading.feed(numbers[:, reading.n_seen :])

    def finish(self, cached_tokens: int) -> None:
        """Put everything where users find it."""
        collected, expected, prepared = self.collected, self.expected, self.prepared
        assert collected is not None
        if prepared is not None:
            receipt = prepared.receipt
        elif expected.prepared is not None:
            receipt = expected.prepared.receipt
            shorten(receipt, expected, self.ticket.n_completion)
        else:
            receipt = receipt_of(expected, self.ticket.n_completion)
        fill(receipt, expected, collected, cached_tokens, self.eager)
        completion, capture = self.completion, expected.envelope.capture
        completion.inspect_lens = receipt
        completion.inspect_lens_transport = capture.transport if capture else "inline"
        completion.inspect_lens_tensors = {}
        captured: dict[str, TensorData] = {}
        if capture is not None:
            # What was prepared lies where rows are, also where the last of them were waited for.
            named = None if prepared is None else prepared.named
            rows = collected.tensors[ROWS]
            if expected.reuse is not None:
                # Streams bring the last piece of a text alone.
                ids, n = completion.token_ids, self.ticket.n_completion
                rows = expected.reuse.whole(rows, ids if len(ids) == n else ())
            if capture.transport == HIDDEN:
                captured = tensors_by_name(rows, capture)
            else:
                captured, completion.activations = named or _named(rows, capture)
                completion.inspect_lens_tensors = captured
        if expected.envelope.qk is not None:
            put_qk(completion, expected.envelope.qk, collected)
        if expected.envelope.lens is not None:
            put_lens(completion, expected.envelope.lens, collected)
        if self.eager is not None:
            put_eager(completion, self.eager)
        if expected.sink is not None:
            self._offer(captured)

    def _offer(self, captured: dict[str, TensorData]) -> None:
        """Give what was captured to the sink of the request."""
        expected, ticket, task = self.expected, self.ticket, self.expected.sink
        asked, by = expected.asked, expected.asked_by
        assert task is not None
        assert asked is not None
        assert by is not None
        ids, text = ticket.said or ((), "")
        positions = asked.fed(expected.n_fed(ticket.n_completion))
        done = Done(
            tensors=captured,
            positions=tuple(positions[-1:] if asked.is_last else positions),
            layers=asked.layers,
            said=Said(by.key, by.prompt_ids, by.prompt, ids, text),
            use=task.use,
        )
        offered = task.offer(done)
        self.completion.inspect_lens.__dict__["sink"] = offered.receipt
        self.completion.inspect_lens_offered = offered


def take_whole(choices: Iterable[Choice], collector: Collector) -> None:
    """Take at once what there is of many choices: what was prepared, and what is told of edits.

    A fault of this leaves choices to be taken one by one: it must not end those of others.
    """
    try:
        _take_together(choices, collector)
    except BaseException as error:
        if ends_process(error):
            raise
        logger.exception("inspect_lens: the results of a batch are taken one by one")


def _take_together(choices: Iterable[Choice], collector: Collector) -> None:
    ended: dict[str, tuple[Choice, Prepared]] = {}
    edited: dict[str, Choice] = {}
    for choice in choices:
        prepared, expected = choice.prepared, choice.expected
        if prepared is not None and prepared.coming:
            ended[choice.ticket.key] = choice, prepared
        elif expected.envelope.is_edited_alone and EAGER_KEY not in expected.packed:
            edited[choice.ticket.key] = choice
    if ended:
        for key, paths in collector.take_whole(ended).items():
            choice, prepared = ended[key]
            choice.collected = Collected(prepared.coming, 0, paths)
            choice.whole = prepared.whole
    if edited:
        # An engine that was paused may end some before their first token: these are told so.
        fed = {k: c.expected.n_fed(n) for k, c in edited.items() if (n := c.ticket.n_completion)}
        for key, collected in collector.take_edited(fed).items():
            edited[key].collected = collected


def _named(
    rows: TensorData, capture: CaptureEnvelope
) -> tuple[dict[str, TensorData], dict[str, Any]]:
    """Captured rows by the names users know, and the same for torch."""
    tensors = tensors_by_name(rows, capture)
    return tensors, {name: to_torch(t, copy=False) for name, t in tensors.items()}
