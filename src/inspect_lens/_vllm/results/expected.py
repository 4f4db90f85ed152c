"""A choice whose results are on their way, and the receipt that it will have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import inspect_lens
from inspect_lens._engine.collect.placement import Collected
from inspect_lens._engine.protocol.envelope import Envelope
from inspect_lens._engine.protocol.programs import open_among
from inspect_lens._engine.protocol.readouts import CaptureEnvelope, LensEnvelope
from inspect_lens._vllm.compat.monkeypatches import vllm_version
from inspect_lens._vllm.registered.persistent_hooks import EagerResults
from inspect_lens._vllm.registered.probe_scores import Reading, Whole
from inspect_lens._vllm.registered.prompt_rows import Reuse, reuse_of
from inspect_lens._vllm.sinks.process import SinkTask, task_of
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


@dataclass(frozen=True, slots=True)
class AskedBy:
    """A request as its client knows it."""

    key: str
    prompt_ids: tuple[int, ...]
    prompt: str


@dataclass(slots=True)
class Prepared:
    """What a choice gets that runs to its end, as far as that is known before."""

    receipt: Receipt
    coming: dict[int, TensorData] = field(default_factory=dict)
    """Results by kind, whose rows are still to come; none where they are made at the end."""
    named: tuple[dict[str, TensorData], dict[str, Any]] | None = None
    """The captured ones by name, and the same for torch, where they are of one site."""
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
    asked_by: AskedBy | None = None
    """Of a request with a sink."""
    let_go: Callable[[], None] | None = None
    """See `Registry.hold`."""

    def __post_init__(self) -> None:
        self.reuse = reuse_of(self.packed)
        self.sink = task_of(self.packed)

    @property
    def is_recorded(self) -> bool:
        """Whether a rule has chosen the request, whose client knows nothing of it."""
        return self.sink is not None and self.sink.use is None

    @property
    def asked(self) -> CaptureEnvelope | None:
        """The capture that was asked for; the envelope's leaves out what is known already."""
        return self.envelope.capture if self.reuse is None else self.reuse.asked

    @property
    def n_known(self) -> int:
        """Captured positions whose rows are known already."""
        return 0 if self.reuse is None else self.reuse.n_positions

    def n_fed(self, n_completion: int) -> int:
        """Tokens that a request fed to the model which sampled so many."""
        return self.n_prompt + n_completion - 1

    def settled(self, n_fed: int, n_last: int) -> int | None:
        """Where drafts may be rejected, one past the first position of the last step."""
        return n_fed + 1 - max(n_last, 1) if self.envelope.is_speculative else None

    def counts(self, n_fed: int) -> dict[int, int]:
        """Positions that come, by kind of result, of a request that fed `n_fed` tokens."""
        asked = enumerate(self.envelope.results)
        return {i: 0 if one is None else len(one.fed(n_fed)) for i, one in asked}

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
    if expected.reading is not None:
        values["probes"] = expected.reading.receipts()
    if (qk := expected.envelope.qk) is not None:
        n_fed = expected.n_fed(receipt.n_completion)
        values["qk"] = QKReceipt(layers=qk.layers, n_positions=n_fed, dtype=qk.dtype)
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
            made.append(
                GateReceipt(
                    layer=edit.layers[0],
                    site=edit.site,
                    fired_at=at,
                    n_tokens=behind,
                    sha256=edit.sha256,
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
        n_positions=len(positions),
        first_position=first,
        positions=listed,
        dtype=capture.dtype,
        reduce=capture.reduce,
        rows=len(capture.taps) * len(positions),
        cached_positions=expected.n_known,
    )


_FIELDS = ("inspect_lens_ticket", "inspect_lens_scores", "inspect_lens_json")


def keep_tickets(outputs: list[Any], later: list[Any]) -> None:
    """Give the tickets of an output's choices to those that they were merged into."""
    tickets = {c.index: c.inspect_lens_ticket for c in later if hasattr(c, "inspect_lens_ticket")}
    for completion in outputs:
        if completion.index in tickets:
            completion.inspect_lens_ticket = tickets[completion.index]


def has_fields(output: Any) -> bool:
    """Whether anything of ours stands on an output's choices."""
    return any(
        any(hasattr(completion, name) for name in _FIELDS) for completion in choices_of(output)
    )


def keep_scores(outputs: list[Any], later: Any, earlier: dict[str, list[float]]) -> None:
    """Give token scores of two outputs to the choice that they were merged into, or the later one.

    vLLM adds up what has come of a text, or lets the whole of it take the place of less.
    """
    scores: dict[str, list[float]] = getattr(later, "inspect_lens_scores", {})
    for completion in outputs:
        if completion.index == later.index and (scores or earlier):
            both = {name: earlier.get(name, []) + scores.get(name, []) for name in earlier | scores}
            completion.inspect_lens_scores = both


def attached(output: Any) -> int:
    return sum(hasattr(completion, "inspect_lens") for completion in output.outputs)


def has_tickets(output: Any) -> bool:
    """Whether an output holds finished choices that used the lens."""
    return any(
        hasattr(completion, "inspect_lens_ticket") and not hasattr(completion, "inspect_lens")
        for completion in choices_of(output)
    )


def ticket_keys(output: Any) -> list[str]:
    tickets = (getattr(c, "inspect_lens_ticket", None) for c in choices_of(output))
    return [ticket.key for ticket in tickets if ticket is not None]


def choices_of(output: Any) -> list[Any]:
    """Choices of generated text; engines that pool have outputs that are none."""
    outputs = getattr(output, "outputs", None)
    return outputs if isinstance(outputs, list) else []
