"""Results that this front-end waits for: from a finished output to tensors and a receipt."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from inspect_lens._engine.collect.collector import Collector, Notifier
from inspect_lens._engine.hooks.runner import EAGER_KEY
from inspect_lens._engine.protocol.messages import Envelope
from inspect_lens._engine.protocol.processes import Links, as_exception, contained, ends_process
from inspect_lens._vllm.compat.features import busy, fault_of
from inspect_lens._vllm.registered.probe_scores import Reading, feed_together
from inspect_lens._vllm.sinks.sink import Exchange
from inspect_lens._vllm.sinks.threads import Threads
from inspect_lens._vllm.telemetry import failed, note, waited
from inspect_lens.errors import CapacityError, CaptureError, LensError

from .choices import (
    Choice,
    Expected,
    Job,
    Ticket,
    is_light,
    is_ready,
    is_running,
    prepare,
    take_whole,
)
from .streaming import Streaming

logger = logging.getLogger("vllm.inspect_lens")


def log_fault(message: str, error: BaseException) -> None:
    """Say what has not been done, and why."""
    logger.error("inspect_lens: %s", message, exc_info=error)


_CHOSEN_S = 1.0


class Running:
    """Where callers wait for the outputs of requests, by key."""

    def __init__(self) -> None:
        self._queues: dict[str, tuple[asyncio.AbstractEventLoop, Any]] = {}
        self._lock = threading.Lock()
        self._has_far_workers = False
        self.routes: Mapping[str, Any] = {}
        """Which engine has each request, where there are several; see `routes_of`."""
        self._gone: dict[Any, LensError] = {}
        """Engines that have lost a worker, and how: vLLM may send them requests still."""

    def listen(self, collector: Collector) -> None:
        """Hear of workers on other hosts that go, and of those that come back."""
        collector.ends, collector.came = self.end, self._gone.clear
        self._has_far_workers = collector.listener is not None

    def watch(self, key: str, queue: Any) -> None:
        """Take note of a request that has begun; called in its event loop."""
        if queue is None or not self._has_far_workers:
            return
        loop = asyncio.get_running_loop()
        with self._lock:
            self._queues[key] = loop, queue
        if self._gone:
            # By then vLLM has chosen an engine for it.
            loop.call_later(_CHOSEN_S, self._end_if_gone)

    def forget(self, key: str) -> None:
        """Take note that it is over."""
        with self._lock:
            self._queues.pop(key, None)

    def end(self, failed: Mapping[str, LensError]) -> None:
        """Have requests end with an error, and all others of their engines; from any thread."""
        for key, error in failed.items():
            if (engine := self.routes.get(key)) is not None:
                self._gone[engine] = error
            self._end(key, error)
        self._end_if_gone()

    def _end_if_gone(self) -> None:
        with self._lock:
            keys = list(self._queues)
        for key in keys:
            if (error := self._gone.get(self.routes.get(key))) is not None:
                self._end(key, error)

    def _end(self, key: str, error: LensError) -> None:
        with self._lock:
            found = self._queues.pop(key, None)
        if found is None:
            return
        loop, queue = found
        try:
            loop.call_soon_threadsafe(queue.put, failed(error))
        except RuntimeError:
            logger.debug("inspect_lens: nobody waits for request %s any more", key)


@contextlib.contextmanager
def faults_told() -> Iterator[None]:
    """Have a fault of our code end one request, as an error of ours."""
    try:
        yield
    except BaseException as error:
        # A SystemExit in a task ends the event loop, and with it the server.
        if isinstance(error, LensError) or ends_process(error):
            raise
        raise fault_of(error) from error


def named(error: Exception) -> Exception:
    """An error of vLLM's, or our own as its client gets it.

    vLLM wraps it in one without a word where it is raised while a request is taken in, or waits: a
    name was removed since it was judged, or a worker has gone.
    """
    ours = error if isinstance(error, LensError) else error.__cause__
    if isinstance(ours, CaptureError):
        # The body's `type` is vLLM's own; clients tell from the text that a retry is no use.
        return CaptureError(f"{CaptureError.__name__}: {ours}")
    if isinstance(ours, CapacityError):
        return busy(str(ours))
    return ours if isinstance(ours, LensError) else error


_EVERY_S = 0.005
_MOST = 4096
"""Choices whose rows are on their way."""


@dataclass
class _Coming:
    ticket: Ticket
    expected: Expected
    began: float = field(default_factory=time.monotonic)


class Recorded:
    """Choices that have ended, and whose rows are on their way to a sink."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._new: deque[_Coming] = deque()
        self._changed = threading.Condition()
        self._n_coming = 0
        self._unflushed: deque[str] = deque(maxlen=_MOST)
        self._coming: list[_Coming] = []
        self._threads = Threads("inspect-lens-recorded", "requests that are recorded", self._look)

    def put(self, ticket: Ticket) -> None:
        """Take over a choice that has ended; never waits and never raises for what it holds."""
        expected = self._results.take_over(ticket.key)
        if expected is None or expected.sink is None:
            return
        if not ticket.n_completion or self._n_coming >= _MOST:
            self._results.the_collector().discard(ticket.key)
            if ticket.n_completion:  # else it was broken off before there was anything to record
                expected.sink.recorder.count("dropped")
            return
        self._unflushed.append(ticket.key)
        with self._changed:
            self._n_coming += 1
            self._new.append(_Coming(ticket, expected))
            self._threads.begin()
            self._changed.notify_all()

    def take_unflushed(self) -> list[str]:
        """Choices since the last call: an engine in this process may take no further step."""
        found = []
        while self._unflushed:
            found.append(self._unflushed.popleft())
        return found

    def _look(self) -> None:
        with self._changed:
            if not self._new:
                self._changed.wait(_EVERY_S if self._coming else None)
            while self._new:
                self._coming.append(self._new.popleft())
        coming, self._coming = self._coming, []
        try:
            self._coming = [one for one in coming if not self._is_over(one)]
        finally:
            with self._changed:
                self._n_coming -= len(coming) - len(self._coming)

    def _is_over(self, one: _Coming) -> bool:
        """See to a choice; False where its rows are still on their way."""
        collector = self._results.the_collector()
        try:
            is_late = time.monotonic() - one.began > self._results.timeout_s
            if not is_late and not is_ready(one.ticket, one.expected, collector):
                return False
            choice = Choice(SimpleNamespace(token_ids=()), one.ticket, one.expected)
            choice.take(collector, self._results.timeout_s, may_wait=False)
            choice.finish()
        except Exception as error:  # noqa: BLE001 - its answer is on its way already
            collector.discard(one.ticket.key)
            if one.expected.sink is not None:
                one.expected.sink.recorder.failed(error)
        return True


_PREPARED_AT_ONCE = 32
"""Requests: half a millisecond, where a step takes several."""
_UNPREPARED_MOST = 1 << 14
_FAILURES_MOST = 1 << 14
"""Contents of steering that have failed: anybody may send another one each time."""


def unprepared() -> deque[str]:
    """Requests whose results nobody has prepared for yet, by key; of too many the oldest go.

    Nobody takes any out where an engine is in this process.
    """
    return deque(maxlen=_UNPREPARED_MOST)


class Results:
    """Owns the collector, and the envelopes of requests in flight."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        """Seconds to wait for rows that are on their way."""
        self._expected: dict[str, Expected] = {}
        self._choices: dict[str, set[str]] = {}
        """Open choices of each request, by its internal id."""
        self.n_processes = 1
        """Front-ends of this machine, which share its memory."""
        self.links: Links | None = None
        """Where workers of other hosts find this process; set before the first request."""
        self.running = Running()
        self.recorded = Recorded(self)
        self._collector: Collector | None = None
        self._lock = threading.Lock()
        self._nonce = secrets.token_hex(8)
        self._failures: Counter[str] = Counter()
        self._spoiled: dict[str, LensError] = {}
        """Requests for which something of ours went wrong in a loop of vLLM's."""

    @property
    def address(self) -> str:
        """Where workers send rows; opens the socket when first asked."""
        with self._lock:
            if self._collector is None:
                self._collector = Collector(n_processes=self.n_processes, links=self.links)
                self.running.listen(self._collector)
            return self._collector.address

    @property
    def n_open(self) -> int:
        return len(self._expected)

    def salt(self, steer_hash: str) -> str:
        """The cache salt of a steering content.

        A steered request that the worker could not steer still runs to its end and leaves plain
        blocks under its salt, so the salt changes with every failure. Other front-end processes
        do not hear of it, so each has salts of its own.
        """
        return f"{self._nonce}:{self._failures[steer_hash]}:{steer_hash}"

    def _note_failure(self, content: str) -> None:
        if len(self._failures) >= _FAILURES_MOST:
            # All salts are new from now on, so that none of those before comes again.
            self._nonce, self._failures = secrets.token_hex(8), Counter()
        self._failures[content] += 1

    def expect(
        self,
        key: str,
        packed: Mapping[str, Any],
        *,
        n_prompt: int,
        n_max: int = 0,
        reading: Reading | None = None,
        request: str | None = None,
        asked_by: Exchange | None = None,
        let_go: Callable[[], None] | None = None,
        is_served: bool = False,
    ) -> None:
        """Take note of a choice before the engine sees it."""
        envelope, owner = Envelope.unpack(packed), request or key
        with self._lock:
            self._choices.setdefault(owner, set()).add(key)
            expected = Expected(envelope, n_prompt, reading, packed, owner, n_max)
            expected.asked_by, expected.let_go = asked_by, let_go
            expected.is_served = is_served
            self._expected[key] = expected
            note("inspect_lens_running", len(self._expected))
        n_hook_layers = packed[EAGER_KEY]["n_layers"] if EAGER_KEY in packed else 0
        self.the_collector().open(key, envelope, n_hook_layers)

    def prepare(self, unprepared: deque[str]) -> bool:
        """Do for a few requests what their results take that is known before these come.

        For whoever waits for an engine in another process, in a call or in an event loop: a batch
        ends in one step, behind which nothing hides the work. Requests that the engine has not
        begun have their turn again behind the others; returns whether there were others.
        """
        n = min(_PREPARED_AT_ONCE, len(unprepared))
        later = 0
        for key in [unprepared.popleft() for _ in range(n)]:
            expected = self._expected.get(key)
            with contained(partial(self.spoil, [key])):
                if expected is not None and not prepare(key, expected, self.the_collector()):
                    unprepared.append(key)
                    later += 1
        return later < n

    def alarm(self, key: str, n_completion: int) -> str | None:
        """Name of a probe whose alarm has to end a running request, by what has come."""
        expected = self._expected.get(key)
        if expected is None or expected.reading is None:
            return None
        self._read_scores(key, expected, n_completion)
        return expected.reading.alarm()

    def _read_scores(self, key: str, expected: Expected, n_completion: int) -> None:
        """Have probes read what has come of so many sampled tokens."""
        if expected.streaming is not None and n_completion:
            n_fed = expected.n_fed(n_completion)
            # How many of the tokens are accepted drafts of the last step is not known here.
            settled = expected.settled(n_fed, 1)
            expected.streaming.read_scores(key, n_fed, settled, self.the_collector())

    def has_come(self, output: Any) -> bool:
        """Whether all has come that an output of running requests is to carry, or never will."""
        return all(
            ticket.key in self._spoiled
            or streaming.has_come(ticket.key, n_fed, settled, self.the_collector())
            for _, ticket, streaming, n_fed, settled in self._running_choices(output)
        )

    def wait_for(self, output: Any) -> None:
        """Wait until `has_come`, or as long as results are waited for."""
        with self.notifier.changed:
            self.notifier.wait_for(partial(self.has_come, output), self.timeout_s, 0.1)

    def n_bytes(self, output: Any, *, is_kept: bool) -> int:
        """Bytes of rows that are copied to `carry` them and to write them, at most."""
        return sum(
            streaming.n_bytes(n_fed, is_kept=is_kept)
            for _, _, streaming, n_fed, _ in self._running_choices(output)
        )

    def carry(self, output: Any, *, is_kept: bool) -> None:
        """Put what is ready on an output's choices that go on, as `inspect_lens_partial`.

        Whoever may keep it gets rows of its own, and who writes them into an event does not.
        """
        for completion, ticket, streaming, n_fed, settled in self._running_choices(output):
            part = streaming.take(ticket.key, n_fed, settled, self.the_collector())
            if part is not None:
                completion.inspect_lens_partial = part.copy() if is_kept else part

    def pause(self, output: Any, seconds: float) -> None:
        """Have no output of running requests carry anything for a while, after this one."""
        for _, _, streaming, _, _ in self._running_choices(output):
            streaming.pause(seconds)

    def _running_choices(
        self, output: Any
    ) -> Iterator[tuple[Any, Ticket, Streaming, int, int | None]]:
        for completion in filter(is_running, output.outputs):
            ticket: Ticket = completion.inspect_lens_running
            expected = self._expected.get(ticket.key)
            if expected is not None and expected.streaming is not None:
                n_fed = expected.n_fed(ticket.n_completion)
                settled = expected.settled(n_fed, ticket.n_last)
                yield completion, ticket, expected.streaming, n_fed, settled

    def spoil(self, keys: Iterable[str], error: BaseException) -> None:
        """Have requests end with an error: our code went wrong for them in a loop of many."""
        for key in keys:
            if key in self._expected and key not in self._spoiled:
                logger.error("inspect_lens: request %s has failed", key, exc_info=error)
                self._spoiled[key] = fault_of(error)

    def hear(self, key: str, said: Callable[[], tuple[tuple[int, ...], str]]) -> None:
        """Have somebody hear of a request's alarms, also where its client breaks it off."""
        if (expected := self._expected.get(key)) is not None:
            expected.said = said

    def expected(self, key: str) -> Expected | None:
        """What is known of a request that uses the lens, or is recorded."""
        return self._expected.get(key)

    def abandon(self, ids: Iterable[str]) -> None:
        """Forget aborted requests with all their choices, also those that have finished.

        vLLM keeps finished choices until the others have finished, too, and a client that goes
        away in between never takes them.
        """
        for key in ids:
            expected = self._expected.get(key)
            for choice in tuple(self._choices.get(expected.request if expected else key, ())):
                self._tell_broken_off(choice)
                if self.take_over(choice) is not None:
                    self.the_collector().discard(choice)

    def _tell_broken_off(self, key: str) -> None:
        """Tell what the server's probes found in an answer that its client has broken off."""
        expected = self._expected.get(key)
        if expected is None or expected.said is None:
            return
        n_completion, text = 1, ""  # what is told where nobody knows what it said
        with contained(partial(log_fault, f"what {key} said is not known")):
            ids, text = expected.said()
            n_completion = len(ids)
        self._tell_alarms(key, expected, n_completion, text)

    def _tell_alarms(self, key: str, expected: Expected, n_completion: int, text: str) -> None:
        """Tell of alarms in what has come of an answer whose results nobody puts together."""
        if expected.said is None or expected.has_told:
            return
        with contained(partial(log_fault, f"scores of {key} cannot be read")):
            self._read_scores(key, expected, n_completion)
        expected.tell_alarms(n_completion, text)

    def forget(self, output: Any) -> None:
        """Forget what was to be put on an output; nobody waits for it any more."""
        self.abandon([ticket.key for ticket, _ in self._open_choices(output)])

    def take_over(self, key: str) -> Expected | None:
        """Expect nothing more for a choice."""
        with self._lock:
            expected = self._expected.pop(key, None)
            if expected is not None and expected.let_go is not None:
                expected.let_go()
            self._spoiled.pop(key, None)
            self.running.forget(key)
            note("inspect_lens_running", len(self._expected))
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
        """
        with waited():
            if errors := self.attach_all([output]):
                raise errors.pop()

    def attach_all(self, outputs: Iterable[Any]) -> list[LensError]:
        """`attach` for many outputs: those of a batch mostly end in one step."""
        # In no name here: frames in an error's traceback lead back to this one.
        return _ours([error for error in self.attach_each(outputs) if error is not None])

    def attach_each(
        self, outputs: Iterable[Any], *, may_wait: bool = True
    ) -> list[Exception | None]:
        """`attach_all`, with the error of each output, or None, in their order.

        A fault of our code is one, too: the other outputs have their results.
        """
        begun = list(map(Job, outputs))
        if not begun:
            return []  # after most steps, also where nobody has asked for anything ever
        take = partial(self._take, may_wait=may_wait)
        try:
            jobs = [job for job in begun if self._has_done(self._begin, job)]
            take_whole((c for job in jobs for c in job.choices), self.the_collector())
            jobs = [job for job in jobs if self._has_done(take, job)]
            feed_together(c.whole for job in jobs for c in job.choices if c.whole is not None)
            for job in jobs:
                self._has_done(self._finish, job)
        except BaseException as error:
            # Interrupted: nobody will ask for what the others were to get.
            for job in begun:
                self._drop(job, error)
            raise
        return [job.take_error() for job in begun]

    def is_light(self, output: Any, *, encodes: bool) -> bool:
        """Whether attaching results takes little time once `is_ready`."""
        open_ = self._open_choices(output)
        return all([is_light(ticket, expected, encodes=encodes) for ticket, expected in open_])

    def is_ready(self, output: Any) -> bool:
        """Whether all results have come that are to be put on an output, or one has failed."""
        collector = self.the_collector()
        for ticket, expected in self._open_choices(output):
            if not (ticket.key in self._spoiled or is_ready(ticket, expected, collector)):
                return False
        return True

    def tells_all(self, output: Any) -> bool:
        """Whether `Notifier` tells when `is_ready` becomes true; else it has to be asked again."""
        envelopes = [expected.envelope for _, expected in self._open_choices(output)]
        return not any(envelope.edited.edits or envelope.is_speculative for envelope in envelopes)

    @property
    def notifier(self) -> Notifier:
        return self.the_collector().notifier

    def _open_choices(self, output: Any) -> list[tuple[Ticket, Expected]]:
        """Finished choices of an output that wait for results, and have not been aborted."""
        found: list[tuple[Ticket, Expected]] = []
        for completion in output.outputs:
            ticket: Ticket | None = getattr(completion, "inspect_lens_ticket", None)
            if ticket is not None and not hasattr(completion, "inspect_lens"):
                expected = self._expected.get(ticket.key)
                if expected is not None:
                    found.append((ticket, expected))
        return found

    def _has_done(self, work: Callable[[Job], None], job: Job) -> bool:
        """Do something for an output; where that fails, none of its choices has anything."""
        try:
            work(job)
        except LensError as error:
            self._drop(job, error)
            for choice in job.choices:
                if (steer_hash := choice.expected.envelope.steer_hash) is not None:
                    self._note_failure(steer_hash.rpartition(":")[2])
            job.error = failed(error)
            return False
        except BaseException as error:
            if ends_process(error):
                raise
            logger.exception("inspect_lens: the results of a request could not be put together")
            self._drop(job, error)
            job.error = as_exception(failed(error))
            return False
        return True

    def _drop(self, job: Job, error: BaseException) -> None:
        for choice in job.choices:
            ticket = choice.ticket
            text = ticket.said[1] if ticket.said else ""
            self._tell_alarms(ticket.key, choice.expected, ticket.n_completion, text)
            self.the_collector().discard(ticket.key)

    def _begin(self, job: Job) -> None:
        for completion in job.output.outputs:
            ticket: Ticket | None = getattr(completion, "inspect_lens_ticket", None)
            if ticket is None or hasattr(completion, "inspect_lens"):
                continue
            fault = self._spoiled.get(ticket.key)
            expected = self.take_over(ticket.key)
            if expected is None:
                raise CaptureError(f"request {ticket.key} was aborted; it has no activations")
            job.choices.append(Choice(completion, ticket, expected))
            if fault is not None:
                raise fault

    def _take(self, job: Job, *, may_wait: bool) -> None:
        for choice in job.choices:
            if choice.collected is None:
                choice.take(self.the_collector(), self.timeout_s, may_wait=may_wait)
            choice.read()

    def _finish(self, job: Job) -> None:
        output = job.output
        for choice in job.choices:
            choice.finish()
        first = output.outputs[0]
        for name in ("inspect_lens", "activations", "hook_results"):
            if hasattr(first, name):
                setattr(output, name, getattr(first, name))

    def the_collector(self) -> Collector:
        """The collector of this process; its socket is opened when it is first asked for."""
        if self._collector is None:
            self.address  # noqa: B018 - opens the socket
        assert self._collector is not None
        return self._collector


def _ours(errors: list[Exception]) -> list[LensError]:
    """The errors as ours: one that is none must not end a batch, whose others go on."""
    return [fault_of(error) for error in errors]


def stop_at_alarm(state: Any, results: Results) -> None:
    """End a request as a stop string would, once an alarm is raised.

    vLLM then finishes it with the reason `stop`, and tells the engine to give it up.
    """
    detokenizer, key = state.detokenizer, state.request_id
    update = detokenizer.update

    @functools.wraps(update)
    def update_or_stop(*args: Any, **kwargs: Any) -> Any:
        stop = update(*args, **kwargs)
        if stop is not None:
            return stop
        try:
            name = results.alarm(key, detokenizer.num_output_tokens())
        except BaseException as error:
            if ends_process(error):
                raise
            results.spoil([key], error)
            return "inspect_lens:fault"  # its text is nobody's any more
        return None if name is None else f"inspect_lens:alarm:{name}"

    detokenizer.update = update_or_stop
