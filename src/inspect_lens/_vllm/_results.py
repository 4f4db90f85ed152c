"""Results that this front-end waits for: from a finished output to tensors and a receipt."""

from __future__ import annotations

import secrets
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from inspect_lens._engine._collector import ROWS, SCORES, Collector
from inspect_lens._engine._envelope import Envelope
from inspect_lens._engine._hooks import EAGER_KEY
from inspect_lens._torch import to_torch
from inspect_lens.errors import CaptureError, LensError

from ._expected import Expected, fill, receipt_of, shorten
from ._hook_book import put_eager, take_eager
from ._named import tensors_by_name
from ._scores import Reading

__all__ = ["Results", "Ticket"]

_PREPARED_AT_ONCE = 32
"""Requests: half a millisecond, where a step takes several."""


@dataclass(frozen=True)
class Ticket:
    """Put on a finished choice: what to collect for it."""

    key: str
    """Internal id of the choice."""
    n_completion: int
    """Sampled tokens."""
    n_last: int = 1
    """Those of the last step; more than one where drafts were accepted."""


class Results:
    """Owns the collector, and the envelopes of requests in flight."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._expected: dict[str, Expected] = {}
        self._choices: dict[str, set[str]] = {}
        """Open choices of each request, by its internal id."""
        self.n_processes = 1
        """Front-ends of this machine, which share its memory."""
        self._collector: Collector | None = None
        self._lock = threading.Lock()
        self._nonce = secrets.token_hex(8)
        self._failures: Counter[str] = Counter()
        self._unsent: dict[str, dict[str, list[float]]] = {}

    @property
    def address(self) -> str:
        """Where workers send rows; opens the socket when first asked."""
        with self._lock:
            if self._collector is None:
                self._collector = Collector(n_processes=self.n_processes)
            return self._collector.address

    @property
    def n_open(self) -> int:
        """Requests in flight."""
        return len(self._expected)

    def salt(self, steer_hash: str) -> str:
        """The cache salt of a steering content.

        A steered request that the worker could not steer still runs to its end and leaves plain
        blocks under its salt, so the salt changes with every failure. Other front-end processes
        do not hear of it, so each has salts of its own.
        """
        return f"{self._nonce}:{self._failures[steer_hash]}:{steer_hash}"

    def expect(
        self,
        key: str,
        packed: Mapping[str, Any],
        *,
        n_prompt: int,
        n_max: int = 0,
        reading: Reading | None = None,
        request: str | None = None,
    ) -> None:
        """Take note of a choice before the engine sees it.

        Args:
            key: of the choice.
            packed: its envelope.
            n_prompt: prompt tokens.
            n_max: tokens that are fed at most, where that is known.
            reading: of its probes.
            request: what it belongs to; by default itself.
        """
        envelope, owner = Envelope.unpack(packed), request or key
        with self._lock:
            self._choices.setdefault(owner, set()).add(key)
            self._expected[key] = Expected(envelope, n_prompt, reading, packed, owner, n_max)
        self._the_collector().open(key, envelope)
        if EAGER_KEY in packed:
            self._the_collector().saved.expect(key, packed[EAGER_KEY]["n_layers"])

    def prepare(self, unprepared: deque[str]) -> None:
        """Do for a few requests what their results take that is known before these come.

        For whoever goes on to wait for an engine in another process: a batch ends in one step,
        behind which nothing hides the work.

        Args:
            unprepared: requests of one engine; the first few are taken out. Called in the thread
                that takes that engine's results.
        """
        for _ in range(min(_PREPARED_AT_ONCE, len(unprepared))):
            expected = self._expected.get(unprepared.popleft())
            if expected is None or not expected.n_max:
                continue
            if expected.envelope.steer or EAGER_KEY in expected.packed:
                continue  # whose receipts are of what was done
            if expected.reading is not None:
                expected.reading.prepare()
            expected.prepared = receipt_of(
                expected, expected.n_max - expected.n_prompt + 1, expected.positions(expected.n_max)
            )

    def new_scores(self, key: str, n_completion: int) -> dict[str, list[float]]:
        """Token scores of a running request that have come since the last call, by probe.

        Args:
            key: of the choice.
            n_completion: tokens that have been sampled, as far as is known here. The engine may be
                ahead, and the request may turn out to end with the last of these.
        """
        expected = self._expected.get(key)
        if expected is None or expected.reading is None:
            return {}
        if expected.envelope.is_speculative:
            # Numbers of a rejected draft come again, corrected: all are read at the end.
            return {}
        numbers = self._the_collector().scores(key, expected.reading.n_seen)
        if numbers is None:
            return {}
        n_new = expected.n_read(expected.n_prompt + n_completion - 1) - expected.reading.n_seen
        return expected.reading.feed(numbers[:, : max(n_new, 0)])

    def alarm(self, key: str, n_completion: int) -> str | None:
        """Name of a probe whose alarm has to end a running request; see `new_scores`."""
        expected = self._expected.get(key)
        if expected is None or expected.reading is None:
            return None
        self._pending_scores(key, self.new_scores(key, n_completion))
        return expected.reading.alarm()

    def streams_tokens(self, key: str) -> bool:
        """Whether a request wants the scores of its tokens."""
        expected = self._expected.get(key)
        reading = expected.reading if expected is not None else None
        return reading is not None and reading.streams_tokens

    def take_new_scores(self, key: str, n_completion: int) -> dict[str, list[float]]:
        """Token scores that no response has carried yet; see `new_scores`."""
        self._pending_scores(key, self.new_scores(key, n_completion))
        return self._unsent.pop(key, {})

    def _pending_scores(self, key: str, new: Mapping[str, list[float]]) -> None:
        for name, scores in new.items():
            self._unsent.setdefault(key, {}).setdefault(name, []).extend(scores)

    def is_expected(self, key: str) -> bool:
        """Whether a request uses the lens."""
        return key in self._expected

    def abandon(self, ids: Iterable[str]) -> None:
        """Forget aborted requests with all their choices, also those that have finished.

        vLLM keeps finished choices until the others have finished, too, and a client that goes
        away in between never takes them.

        Args:
            ids: internal ids of requests, or of choices of theirs.
        """
        for key in ids:
            expected = self._expected.get(key)
            for choice in tuple(self._choices.get(expected.request if expected else key, ())):
                self._unsent.pop(choice, None)
                if self._close(choice) is not None:
                    self._the_collector().discard(choice)

    def _close(self, key: str) -> Expected | None:
        """Expect nothing more for a choice."""
        with self._lock:
            expected = self._expected.pop(key, None)
            if expected is not None and (choices := self._choices.get(expected.request)):
                choices.discard(key)
                if not choices:
                    del self._choices[expected.request]
            return expected

    def attach(self, output: Any) -> None:
        """Put tensors and receipts on an output and on each of its finished choices.

        `activations` holds a tensor per site where something was captured (`residual_stream`
        is `resid_post`), and `inspect_lens` the receipt; on the output they are those of the
        first choice.

        Args:
            output: vLLM's `RequestOutput`.

        Raises:
            LensError: a result is not whole, or the worker failed the request.
        """
        mine: list[tuple[Any, Ticket, Expected]] = []
        for completion in output.outputs:
            ticket: Ticket | None = getattr(completion, "inspect_lens_ticket", None)
            if ticket is None or hasattr(completion, "inspect_lens"):
                continue
            expected = self._close(ticket.key)
            if expected is None:
                raise CaptureError(f"request {ticket.key} was aborted; it has no activations")
            mine.append((completion, ticket, expected))
        try:
            self._attach(mine, output.num_cached_tokens or 0)
        except BaseException as error:
            for _, ticket, expected in mine:
                self._the_collector().discard(ticket.key)
                self._unsent.pop(ticket.key, None)
                if isinstance(error, LensError) and expected.envelope.steer_hash is not None:
                    self._failures[expected.envelope.steer_hash.rpartition(":")[2]] += 1
            raise
        first = output.outputs[0]
        if hasattr(first, "inspect_lens"):
            output.inspect_lens = first.inspect_lens
        for name in ("activations", "hook_results"):
            if hasattr(first, name):
                setattr(output, name, getattr(first, name))

    def _attach(self, mine: list[tuple[Any, Ticket, Expected]], cached_tokens: int) -> None:
        for completion, ticket, expected in mine:
            if not ticket.n_completion:
                # An engine that is paused ends what waits; no row of it will ever come.
                raise CaptureError(
                    f"request {ticket.key} was aborted before its first token; it has no results"
                )
            n_fed = expected.n_prompt + ticket.n_completion - 1
            positions = expected.positions(n_fed)
            eager = take_eager(
                self._the_collector(),
                ticket.key,
                expected.packed,
                n_fed=n_fed,
                timeout_s=self._timeout_s,
            )
            collected = self._the_collector().take(
                ticket.key,
                counts={ROWS: len(positions), SCORES: expected.n_read(n_fed)},
                n_fed=n_fed,
                timeout_s=self._timeout_s,
                settled=n_fed + 1 - max(ticket.n_last, 1)
                if expected.envelope.is_speculative
                else None,
            )
            if (reading := expected.reading) is not None:
                numbers = collected.tensors[SCORES].storage[:, reading.n_seen :]
                self._pending_scores(ticket.key, reading.feed(numbers))
                for name, scores in self._unsent.pop(ticket.key, {}).items():
                    unsent = completion.__dict__.setdefault("inspect_lens_scores", {})
                    unsent[name] = unsent.get(name, []) + scores
            receipt = expected.prepared
            if receipt is None:
                receipt = receipt_of(expected, ticket.n_completion, positions)
            elif receipt.n_completion != ticket.n_completion:
                shorten(receipt, expected, ticket.n_completion, positions)
            fill(receipt, expected, collected, cached_tokens, eager)
            completion.inspect_lens = receipt
            capture = expected.envelope.capture
            completion.inspect_lens_transport = capture.transport if capture else "inline"
            completion.inspect_lens_tensors = {}
            if capture is not None:
                tensors = tensors_by_name(collected.tensors[ROWS], capture)
                completion.inspect_lens_tensors = tensors
                completion.activations = {
                    name: to_torch(t, copy=False) for name, t in tensors.items()
                }
            if eager is not None:
                put_eager(completion, eager)

    def _the_collector(self) -> Collector:
        if self._collector is None:
            self.address  # noqa: B018 - opens the socket
        assert self._collector is not None
        return self._collector
