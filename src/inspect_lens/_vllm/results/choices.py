"""A choice whose results are on their way, and what it gets: tensors, scores and a receipt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import numpy as np

import inspect_lens
from inspect_lens._base.to_torch import to_torch
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.collect.placement import Collected
from inspect_lens._engine.collect.result_memory import STORAGE
from inspect_lens._engine.hooks.runner import EAGER_KEY
from inspect_lens._engine.protocol.messages import ROWS, SCORES, Envelope
from inspect_lens._engine.protocol.processes import contained
from inspect_lens._engine.protocol.programs import open_among
from inspect_lens._engine.protocol.readouts import CaptureEnvelope, LensEnvelope
from inspect_lens._vllm.compat.monkeypatches import vllm_version
from inspect_lens._vllm.registered.contents import TIERS_KEY, alarms_of, receipts_of
from inspect_lens._vllm.registered.persistent_hooks import EagerResults, put_eager, take_eager
from inspect_lens._vllm.registered.probe_scores import Reading, Whole
from inspect_lens._vllm.registered.rows import Reuse, put_lens, put_qk, reuse_of, tensors_by_name
from inspect_lens._vllm.sinks import alerts
from inspect_lens._vllm.sinks.process import SinkTask, task_of
from inspect_lens._vllm.sinks.sink import HIDDEN, Done, Exchange
from inspect_lens.errors import CaptureError
from inspect_lens.spec import (
    CaptureReceipt,
    GateReceipt,
    LensReceipt,
    QKReceipt,
    Receipt,
    SteerReceipt,
    TensorData,
    in_site_order,
)

from .streaming import Streaming

logger = logging.getLogger("vllm.inspect_lens")


@dataclass(slots=True)
class Prepared:
    """What a choice gets that runs to its end, as far as that is known before."""

    receipt: Receipt
    coming: dict[int, TensorData] = field(default_factory=dict)
    """Results by kind, whose rows are still to come; none where they are made at the end."""
    named: tuple[dict[str, TensorData], dict[str, Any]] | None = None
    """The captured ones by name, and for torch if anybody reads it, where they are of one site."""
    whole: Whole | None = None
    """What probes read."""


@dataclass(slots=True)
class Expected:
    envelope: Envelope
    n_prompt: int
    reading: Reading | None
    """Probes of the request."""
    packed: Mapping[str, Any]
    """The envelope as it travels."""
    request: str
    """Internal id of the request that this choice belongs to."""
    n_max: int
    """Tokens that are fed to the model at most."""
    prepared: Prepared | None = None
    reuse: Reuse | None = field(init=False)
    """Rows of other requests with the same beginning, and theirs for others."""
    sink: SinkTask | None = field(init=False)
    """Where the results go too."""
    asked_by: Exchange | None = None
    """Of a request with a sink or with a tier."""
    let_go: Callable[[], None] | None = None
    """See `Registry.hold`."""
    is_served: bool = False
    """Whether a body has asked for it, in whose answer nobody reads tensors of torch."""
    said: Callable[[], tuple[tuple[int, ...], str]] | None = None
    """Gives what was sampled so far, where somebody hears of an answer that is broken off."""
    has_told: bool = False
    """Whether alarms were told."""
    streaming: Streaming | None = field(init=False)
    """What its outputs carry before the last one; None where nothing comes by token."""

    def __post_init__(self) -> None:
        self.reuse = reuse_of(self.packed)
        self.sink = task_of(self.packed)
        self.streaming = None
        if self.envelope.is_streamed or self.reading is not None:
            self.streaming = Streaming(self.envelope, self.reading, self.reuse)

    @property
    def is_recorded(self) -> bool:
        """Whether a rule has chosen the request, whose client knows nothing of it."""
        return self.sink is not None and self.sink.use is None

    @property
    def keeps_text(self) -> bool:
        """Whether somebody wants to know what was sampled."""
        return self.sink is not None or (TIERS_KEY in self.packed and alerts.want_text())

    @property
    def asked(self) -> CaptureEnvelope | None:
        """The capture that was asked for; the envelope's leaves out what is known already."""
        return self.envelope.capture if self.reuse is None else self.reuse.asked

    @property
    def n_known(self) -> int:
        """Captured positions whose rows are known already."""
        return 0 if self.reuse is None else self.reuse.n_positions

    def tell_alarms(self, n_completion: int, text: str) -> None:
        """Tell once of alarms of the server's probes, whatever became of the other results."""
        packed, reading, by = self.packed.get(TIERS_KEY), self.reading, self.asked_by
        if packed is None or reading is None or by is None or self.has_told:
            return
        self.has_told = True
        with contained(
            lambda _: logger.exception("inspect_lens: alarms of %s cannot be told", by.key)
        ):
            receipt = receipt_of(self, n_completion)
            receipt.__dict__["tiers"] = alarms_of(packed, reading.raised())
            alerts.look_at(receipt, key=by.key, prompt=by.prompt, text=text)

    def n_fed(self, n_completion: int) -> int:
        """Tokens that a request fed to the model which sampled so many."""
        return self.n_prompt + n_completion - 1

    def settled(self, n_fed: int, n_last: int) -> int | None:
        """Where drafts may be rejected, one past the first position of the last step."""
        return n_fed + 1 - max(n_last, 1) if self.envelope.is_speculative else None

    def counts(self, n_fed: int) -> dict[int, int]:
        """Positions that come, by kind of result, of a request that fed `n_fed` tokens."""
        return self.envelope.results_of(n_fed)

    def positions(self, n_fed: int) -> Sequence[int]:
        """Captured positions, ascending, of a request that fed `n_fed` tokens to the model."""
        capture = self.envelope.capture
        return () if capture is None else capture.fed(n_fed)

    def n_read(self, n_fed: int) -> int:
        """Positions that probes read of a request that fed `n_fed` tokens to the model."""
        probes = self.envelope.probes
        return 0 if probes is None else len(probes.fed(n_fed))


def receipt_of(expected: Expected, n_completion: int) -> Receipt:
    """The receipt of a request that samples so many tokens, before its results have come."""
    return Receipt(
        n_prompt=expected.n_prompt,
        n_completion=n_completion,
        capture=_capture_receipt(expected, n_completion),
        steer=None,
        probes=(),
        hooks=None,
        qk=None,
        cache_salted=expected.envelope.steer_hash is not None,
        paths=(),
        engine="inspect_lens",
        version=inspect_lens.__version__,
        vllm_version=vllm_version(),
    )


def shorten(receipt: Receipt, expected: Expected, n_completion: int) -> None:
    """Correct a prepared receipt, which nobody has seen yet, of a request that ended early."""
    receipt.__dict__["n_completion"] = n_completion
    receipt.__dict__["capture"] = _capture_receipt(expected, n_completion)


def fill(
    receipt: Receipt,
    expected: Expected,
    collected: Collected,
    cached_tokens: int,
    eager: EagerResults | None,
) -> None:
    """Add to a receipt, which nobody has seen yet, what is known when the request is over."""
    # Frozen for everybody else; a copy would be as much work as a new one.
    values = receipt.__dict__
    values["paths"] = collected.paths
    edited = expected.envelope.edited
    if edited.edits:
        n_fed = expected.n_fed(receipt.n_completion)
        values["steer"] = SteerReceipt(
            layers=edited.layers,
            sites=in_site_order(edited.sites),
            n_tokens=collected.n_steered,
            # What lies in front of the first edited token came as it is.
            cached_tokens=max(cached_tokens - expected.envelope.edited_from, 0),
            vectors=edited.hashes,
            gates=_gate_receipts(expected.envelope, collected, n_fed),
        )
    probes = () if expected.reading is None else expected.reading.receipts()
    values["probes"], values["tiers"] = receipts_of(expected.packed.get(TIERS_KEY), probes)
    if (qk := expected.envelope.qk) is not None:
        n_fed = expected.n_fed(receipt.n_completion)
        heads = tuple((layer, head) for site, layer, head in qk.heads if site == "q")
        values["qk"] = QKReceipt(
            layers=qk.layers, heads=heads or None, n_positions=n_fed, dtype=qk.dtype
        )
    if (lens := expected.envelope.lens) is not None:
        values["lens"] = _lens_receipt(lens, expected.n_fed(receipt.n_completion))
    if eager is not None:
        values["hooks"] = eager.hook_receipt
        values["cache_salted"] = receipt.cache_salted or eager.hook_receipt is not None
        values["paths"] = tuple(sorted({"eager", *collected.paths}))


def _gate_receipts(envelope: Envelope, collected: Collected, n_fed: int) -> tuple[GateReceipt, ...]:
    """When each gate that lasts fired, and how long it was open, in the order of the request."""
    made: list[GateReceipt] = []
    if not envelope.edited.has_latches:
        return ()
    for edit in envelope.edits:
        if (latch := edit.latch) is not None:
            at = collected.fired.get(latch)
            behind: int | None = 0 if at is None else n_fed - at - 1
            if at is not None and (decides_on := edit.decides_on) is not None:
                n_read = n_fed - envelope.n_prompt - decides_on
                behind = open_among(collected.open_at.get(latch, 0), n_read)
            if edit.is_open:
                behind = n_fed - envelope.n_prompt
            made.append(
                GateReceipt(
                    layer=edit.layers[0],
                    site=edit.site,
                    fired_at=at,
                    n_tokens=behind,
                    sha256=edit.sha256,
                    began_open=edit.is_open,
                    key=edit.key or None if edit.is_open or at is not None else None,
                )
            )
    return tuple(made)


def _first_or_all(positions: Sequence[int]) -> tuple[int | None, tuple[int, ...] | None]:
    """The first of consecutive positions, or all of others."""
    if positions and positions[-1] - positions[0] + 1 == len(positions):
        return positions[0], None
    return None, tuple(positions)


def _lens_receipt(lens: LensEnvelope, n_fed: int) -> LensReceipt:
    positions = lens.fed(n_fed)
    first, listed = _first_or_all(positions)
    return LensReceipt(
        kind=cast("Any", lens.kind),
        name=lens.name,
        sha256=lens.lens or None,
        layers=lens.layers,
        n_positions=len(positions),
        first_position=first,
        listed=listed,
        top_k=lens.top_k,
        tokens=lens.tokens,
    )


def _capture_receipt(expected: Expected, n_completion: int) -> CaptureReceipt | None:
    capture = expected.asked
    if capture is None:
        return None
    positions = capture.fed(expected.n_fed(n_completion))
    if capture.is_last:
        positions = positions[-1:]
    first, listed = _first_or_all(positions)
    return CaptureReceipt(
        site=capture.sites[0] if len(capture.sites) == 1 else capture.sites,
        layers=capture.layers,
        heads=tuple(dict.fromkeys(head for _, _, head in capture.heads)) or None,
        n_positions=len(positions),
        first_position=first,
        positions=listed,
        dtype=capture.dtype,
        reduce=capture.reduce,
        rows=len(capture.taps) * len(positions),
        cached_positions=expected.n_known,
    )


_TICKETS = ("inspect_lens_ticket", "inspect_lens_running")
_FIELDS = (*_TICKETS, "inspect_lens_json")


def keep_tickets(outputs: list[Any], later: list[Any]) -> None:
    """Give the tickets of an output's choices to those that they were merged into."""
    for new in later:
        tickets = {name: new.__dict__[name] for name in _TICKETS if name in new.__dict__}
        for completion in outputs if tickets else ():
            if completion.index == new.index:
                completion.__dict__.update(tickets)


def has_fields(output: Any) -> bool:
    """Whether anything of ours stands on an output's choices."""
    return any(
        any(hasattr(completion, name) for name in _FIELDS) for completion in choices_of(output)
    )


def attached(output: Any) -> int:
    return sum(hasattr(completion, "inspect_lens") for completion in output.outputs)


def told_of(output: Any) -> list[Any]:
    """Choices of an output of which something of ours is known: most of a stream have nothing."""
    return [c for c in output.outputs if not c.__dict__.keys().isdisjoint(_TICKETS)]


def has_tickets(output: Any) -> bool:
    """Whether an output holds finished choices that used the lens."""
    return any(
        "inspect_lens_ticket" in completion.__dict__ and not hasattr(completion, "inspect_lens")
        for completion in choices_of(output)
    )


def is_running(completion: Any) -> bool:
    """Whether a choice goes on, and its output carries what is ready of its results."""
    said = completion.__dict__
    return "inspect_lens_running" in said and "inspect_lens_ticket" not in said


def running_keys(output: Any) -> list[str]:
    """Choices of an output that go on, by internal id."""
    return [c.inspect_lens_running.key for c in filter(is_running, choices_of(output))]


def carries_results(output: Any) -> bool:
    """Whether an output has choices that go on and want what is ready."""
    return any(map(is_running, choices_of(output)))


def ticket_keys(output: Any) -> list[str]:
    tickets = (getattr(c, "inspect_lens_ticket", None) for c in choices_of(output))
    return [ticket.key for ticket in tickets if ticket is not None]


def choices_of(output: Any) -> list[Any]:
    """Choices of generated text; engines that pool have outputs that are none."""
    outputs = getattr(output, "outputs", None)
    return outputs if isinstance(outputs, list) else []


_LIGHT_BYTES = 1 << 18
"""A result that is so small is quickly made of its rows, whatever is made of them."""
_LIGHT_READS = 128
"""Tokens, times probes that are read token by token: half a millisecond."""
_LIGHT_SCORES = 1 << 12
"""Tokens, times probes whose scores are listed: as long, most of it spelling them as JSON."""


class Ticket(NamedTuple):
    """Put on a choice: what to collect for it when it has finished, or what to carry before."""

    key: str
    """Internal id of the choice."""
    n_completion: int
    """Sampled tokens."""
    n_last: int = 1
    """Those of the last step; more than one where drafts were accepted."""
    said: tuple[tuple[int, ...], str] | None = None
    """All that was sampled, as ids and as text, where a sink takes it."""
    n_cached: int = 0
    """Prompt tokens that came out of a cache; an output says one number for all its choices."""


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
    coming = None
    if not envelope.is_speculative:
        if collector.waits(key):
            return False
        coming = collector.preview(key, expected.counts(n_fed))
    n_completion = n_fed - expected.n_prompt + 1
    prepared = Prepared(receipt_of(expected, n_completion), coming or {})
    if expected.reading is not None:
        expected.reading.prepare()
    if coming:
        if envelope.capture is not None and envelope.capture.is_simple:
            prepared.named = _named(coming[ROWS], envelope.capture, expected)
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
        reading, n_left = expected.reading, expected.n_read(n_fed) - expected.reading.n_seen
        if reading.n_by_token * n_left > _LIGHT_READS or reading.n_others * n_left > _LIGHT_SCORES:
            return False
    if (capture := envelope.capture) is None:
        return True
    if encodes and capture.transport != "binary":
        # What the last event of a stream brings, or a whole answer.
        streaming = expected.streaming if envelope.is_streamed else None
        if streaming is None or streaming.n_bytes(n_fed, is_kept=False) > _LIGHT_BYTES:
            return False
    taps, width = capture.shape
    count = len(expected.positions(n_fed)) + expected.n_known
    if taps * count * width * np.dtype(STORAGE[capture.wire]).itemsize <= _LIGHT_BYTES:
        return True
    # Else the rows have to be the result, where they lie.
    if expected.n_known:
        return False
    is_plain = capture.combine is None and not capture.is_last and capture.is_simple
    most = len(expected.positions(expected.n_max))
    return is_plain and (count == most or taps == 1)


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

    def read(self) -> None:
        """Have probes read what was taken, but for what is read together with others'."""
        reading, streaming = self.expected.reading, self.expected.streaming
        if reading is None or streaming is None or self.whole is not None:
            return
        assert self.collected is not None
        numbers = self.collected.tensors[SCORES].storage
        self.whole = reading.whole(numbers)
        if self.whole is None:
            streaming.add_scores(reading.feed(numbers[:, reading.n_seen :]))

    def finish(self) -> None:
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
        fill(receipt, expected, collected, self.ticket.n_cached, self.eager)
        completion, capture = self.completion, expected.envelope.capture
        completion.inspect_lens = receipt
        completion.inspect_lens_transport = capture.transport if capture else "inline"
        completion.inspect_lens_tensors = {}
        captured, for_torch = dict[str, TensorData](), dict[str, Any]()
        if capture is not None:
            # What was prepared lies where rows are, also where the last of them were waited for.
            named = None if prepared is None else prepared.named
            rows = collected.tensors[ROWS]
            if expected.reuse is not None:
                # Streams bring the last piece of a text alone.
                ids, n = completion.token_ids, self.ticket.n_completion
                whole, is_offered = expected.reuse.whole, expected.sink is not None
                rows = whole(rows, ids if len(ids) == n else (), copies=is_offered)
            if capture.transport == HIDDEN:
                captured = tensors_by_name(rows, capture)
            else:
                captured, for_torch = named or _named(rows, capture, expected)
                completion.inspect_lens_tensors = captured
        if expected.envelope.qk is not None:
            put_qk(completion, expected.envelope.qk, collected)
        if expected.envelope.lens is not None:
            put_lens(completion, expected.envelope.lens, collected)
        if not expected.is_served and (tensors := completion.inspect_lens_tensors):
            others = {n: to_torch(t, copy=False) for n, t in tensors.items() if n not in for_torch}
            plain = getattr(completion, "inspect_lens_plain", {})
            completion.activations = {**for_torch, **others, **plain}
        if self.eager is not None:
            put_eager(completion, self.eager)
        if expected.streaming is not None:
            self._finish_stream(expected.streaming, collected)
        if expected.sink is not None:
            self._offer(captured)
        said = self.ticket.said
        expected.tell_alarms(self.ticket.n_completion, said[1] if said else "")

    def _finish_stream(self, streaming: Streaming, collected: Collected) -> None:
        """Put on the choice what no output of it has carried, which completes the others."""
        part = streaming.rest(collected)
        if part is not None:
            self.completion.inspect_lens_partial = part
        if self.expected.envelope.is_streamed:
            self.completion.inspect_lens_tensors = {}  # a client gets each row once

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
            said=replace(by, token_ids=ids, text=text),
            use=task.use,
        )
        offered = task.offer(done)
        self.completion.inspect_lens.__dict__["sink"] = offered.receipt
        self.completion.inspect_lens_offered = offered


def take_whole(choices: Iterable[Choice], collector: Collector) -> None:
    """Take at once what there is of many choices: what was prepared, and what is told of edits.

    A fault of this leaves choices to be taken one by one: it must not end those of others.
    """
    with contained(
        lambda _: logger.exception("inspect_lens: the results of a batch are taken one by one")
    ):
        _take_together(choices, collector)


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
    rows: TensorData, capture: CaptureEnvelope, expected: Expected
) -> tuple[dict[str, TensorData], dict[str, Any]]:
    """Captured rows by the names users know, and the same for torch if anybody reads it."""
    tensors = tensors_by_name(rows, capture)
    read = {} if expected.is_served else tensors
    return tensors, {name: to_torch(t, copy=False) for name, t in read.items()}
