"""Alarms of the server's probes, told to a webhook beside the requests that raised them.

A request leaves an alert in a queue and goes its way. One thread sends, and tries again where the
webhook fails or is slow; another one writes what could not be sent to a file of dead letters. An
alert has no text of a user unless the operator asks for it, and no log line has the address of the
webhook, which may be a secret.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import random
import secrets
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, Field, field_validator

from inspect_lens import _settings
from inspect_lens._base.http import json_bytes
from inspect_lens._vllm.telemetry import add, note
from inspect_lens.errors import SpecError
from inspect_lens.spec import ProbeReceipt, Receipt

from .threads import Threads

logger = logging.getLogger("vllm.inspect_lens")

_AGAIN: Final = frozenset({408, 425, 429})
"""Statuses of a client's error that may be another one next time."""
_LONGEST_PAUSE_S: Final = 30.0
_DEAD_MOST: Final = 1 << 14
"""Alerts that wait for the disk."""
_MOST_BYTES: Final = 64 << 20
"""Of alerts that wait for the webhook, with their texts; as much again may wait for the disk."""
_EXIT_S: Final = 5.0
"""Seconds that a process gives the one on its way when it ends, and the disk behind it."""
_THREAD: Final = "inspect-lens-alerts"


class AlertsConfig(BaseModel):
    """Where alerts go, and what happens when nobody takes them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)

    url: str = Field(repr=False)
    """Address of the webhook; alerts are sent to it as JSON, with POST."""
    dead_letter: str
    """File that takes alerts which could not be delivered, a line of JSON each. A path that is not
    absolute is one beside the file that names it."""
    text: bool = False
    """Whether alerts have the prompt and the answer."""
    tries: int = Field(default=5, ge=1, le=100)
    """How often an alert is sent before it counts as dead."""
    pause_s: float = Field(default=0.5, gt=0.0, le=60.0)
    """Seconds before the second try; each later pause is twice the one before, 30 at most."""
    timeout_s: float = Field(default=10.0, gt=0.0, le=300.0)
    """Seconds that the webhook has for an answer."""
    waiting: int = Field(default=1024, ge=1, le=1 << 20)
    """Alerts that wait in the memory of each front-end process; more are dead at once."""

    @field_validator("url")
    @classmethod
    def _url(cls, value: str) -> str:
        try:
            parts = urlsplit(value)
            is_fine = parts.scheme in ("http", "https") and bool(parts.hostname)
        except ValueError:
            is_fine = False
        if not is_fine:
            raise ValueError("is no address of a webhook; give one such as https://host/alerts")
        return value

    def below(self, folder: Path) -> Self:
        """The same with a path that holds wherever the process stands."""
        path = (folder / self.dead_letter).absolute()
        return self.model_copy(update={"dead_letter": str(path)})


@dataclass
class _Dead:
    alert: dict[str, Any]
    why: str
    tries: int


@dataclass
class Alerts:
    """Sends alerts, in threads of its own."""

    config: AlertsConfig
    send: Callable[[dict[str, Any]], int] | None = None
    """Sends one, and returns the status of the answer; by default to the webhook."""
    counts: Counter[str] = field(default_factory=Counter)
    """What became of alerts."""

    def __post_init__(self) -> None:
        self._waiting: deque[dict[str, Any]] = deque()
        self._dead: deque[_Dead] = deque()
        self._changed = threading.Condition()
        self._has_begun = self._is_ending = False
        self._n_bytes = 0
        """Of all alerts of which it is open what becomes of them."""
        self._threads = Threads(_THREAD, "alerts", self._send_next, self._bury_next)
        self._told: set[str] = set()
        """What has been said once of alerts that nobody took."""
        self._current: dict[str, Any] | None = None
        """The one on its way."""
        self._tries = 0
        """How often it was sent."""
        self._client: httpx.Client | None = None
        try:
            _append(self.config.dead_letter, b"")
        except OSError as error:
            raise SpecError(f"alerts.dead_letter: {error}") from None

    def put(self, alert: dict[str, Any]) -> None:
        """Take an alert; never waits for a webhook or a disk."""
        with self._changed:
            if not self._has_begun:
                self._has_begun = True
                atexit.register(self.close)
            self._threads.begin()
            self._n_bytes += _size(alert)
            if self._is_ending:
                self._bury(alert, "the process ended", 0)
            elif len(self._waiting) < self.config.waiting and self._n_bytes <= _MOST_BYTES:
                self._waiting.append(alert)
            else:
                self._bury(alert, f"{len(self._waiting)} alerts were waiting", 0)
            note("inspect_lens_alerts_waiting", len(self._waiting))
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing waits; False where the time was too short."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._waiting or self._dead or self._current), timeout_s
            )

    def close(self) -> None:
        """Write what still waits to the file of dead letters, and what nobody has answered yet."""
        with self._changed:
            self._is_ending = True
            while self._waiting:
                self._bury(self._waiting.popleft(), "the process ended", 0)
            self._changed.notify_all()
        if not self.flush(_EXIT_S):
            with self._changed:
                if self._current is not None:
                    self._bury(
                        self._current, "the process ended before the webhook answered", self._tries
                    )
                    self._current = None
            self.flush(_EXIT_S)

    def describe(self) -> dict[str, Any]:
        """What an operator wants to know; not the address, which may have a secret."""
        return {
            "to": urlsplit(self.config.url).hostname,
            "text": self.config.text,
            "waiting": len(self._waiting),
            "counts": dict(self.counts),
        }

    # -- threads -----------------------------------------------------------------------

    def _send_next(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting))
            self._current = alert = self._waiting.popleft()
            note("inspect_lens_alerts_waiting", len(self._waiting))
        why, tries = "a fault of ours", 0
        try:
            why, tries = self._deliver(alert)
        finally:
            with self._changed:
                if self._current is alert:  # or it was written when the process ended
                    if why:
                        self._bury(alert, why, tries)
                    else:
                        self._count("delivered", alert)
                    self._current = None
                self._changed.notify_all()

    def _deliver(self, alert: dict[str, Any]) -> tuple[str, int]:
        """Why nobody has taken an alert, empty where somebody has, and how often it was sent."""
        why, pause = "", self.config.pause_s
        for i in range(self.config.tries):
            if i:
                # So that several processes do not come back in step.
                wait_s = pause * random.uniform(0.8, 1.2)
                with self._changed:
                    if self._changed.wait_for(lambda: self._is_ending, wait_s):
                        return f"the process ended; {why}", i
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            self._tries = i + 1
            try:
                status = (self.send or self._post)(alert)
            except Exception as error:  # noqa: BLE001 - whatever a connection raises
                why = type(error).__name__  # its text may have the address
                continue
            if 200 <= status < 300:
                return "", i + 1
            why = f"the webhook answered {status}"
            if status < 500 and status not in _AGAIN:
                return why, i + 1
        return why, self.config.tries

    def _post(self, alert: dict[str, Any]) -> int:
        if self._client is None:
            key = _settings.text("webhook_key")
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            logging.getLogger("httpx").addFilter(_is_of_others)  # it logs addresses
            self._client = httpx.Client(headers=headers, timeout=self.config.timeout_s)
        kind, url = {"Content-Type": "application/json"}, self.config.url
        # What it answers beside its status is not read: it may have no end.
        with self._client.stream("POST", url, content=json_bytes(alert), headers=kind) as answer:
            return answer.status_code

    def _bury(self, alert: dict[str, Any], why: str, tries: int) -> None:
        with self._changed:
            if len(self._dead) >= _DEAD_MOST or self._n_bytes > 2 * _MOST_BYTES:
                self._count("lost", alert)
                self._tell("lost", "alerts are lost: too many wait for the file of dead letters")
                return
            self._dead.append(_Dead(alert, why, tries))
            self._changed.notify_all()

    def _bury_next(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._dead))
            dead = list(self._dead)
        status = "dead"
        try:
            lines = [
                json_bytes({"why": one.why, "tries": one.tries, "alert": one.alert}) for one in dead
            ]
            _append(self.config.dead_letter, b"".join(b"%b\n" % line for line in lines))
            self._tell(status, f"alerts could not be delivered ({dead[0].why}), and are in the "
                       "file of dead letters")  # fmt: skip
        except Exception as error:  # noqa: BLE001 - or the same ones would be tried for ever
            status = "lost"
            reason = getattr(error, "strerror", None) or type(error).__name__
            why = f"the file of dead letters takes none ({reason})"
            self._tell(status, f"alerts are lost: {why}")
        with self._changed:
            for one in dead:
                self._dead.popleft()
                self._count(status, one.alert)
            self._changed.notify_all()

    def _count(self, status: str, alert: dict[str, Any]) -> None:
        self._n_bytes -= _size(alert)
        self.counts[status] += 1
        add("inspect_lens_alerts_total", 1, status)

    def _tell(self, status: str, text: str) -> None:
        if status not in self._told:
            self._told.add(status)
            logger.error(
                "inspect_lens: %s; further ones are only counted (inspect_lens_alerts_total)", text
            )


def _size(alert: dict[str, Any]) -> int:
    return sum(map(sys.getsizeof, alert.values()))


def _append(path: str, data: bytes) -> None:
    """Add all of some lines to a file, or none: what is written of them is taken back."""
    # A pipe that nobody reads is an error, and keeps neither a start nor other letters waiting.
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # other processes have the same file
        before = os.fstat(file).st_size
        try:
            while data:
                data = data[os.write(file, data) :]
        except OSError:
            os.ftruncate(file, before)
            raise
    finally:
        os.close(file)


def _is_of_others(record: logging.LogRecord) -> bool:
    return record.threadName != _THREAD


class _Holder:
    made: Alerts | None = None


def begin(config: AlertsConfig | None) -> None:
    """Send alerts of this process from now on; None: to nobody."""
    _Holder.made = None if config is None else Alerts(config)


def want_text() -> bool:
    """Whether alerts have the text of requests."""
    made = _Holder.made
    return made is not None and made.config.text


def describe() -> dict[str, Any] | None:
    """Where alerts go, and what became of them; None where they go nowhere."""
    return None if _Holder.made is None else _Holder.made.describe()


def look_at(receipt: Receipt, *, key: str, prompt: str, text: str) -> None:
    """Tell of alarms that the server's probes have raised in a request that is over."""
    found = [
        (tier.sha256, probe)
        for tier in receipt.tiers
        for probe in tier.probes
        if probe.alarm_position is not None
    ]
    for sha256, probe in found:
        add("inspect_lens_alarms_total", 1, probe.name)
        if (made := _Holder.made) is not None:
            alert = _alert(receipt, probe, sha256, key)
            if made.config.text:
                alert |= {"prompt": prompt, "text": text}
            made.put(alert)


def _alert(receipt: Receipt, probe: ProbeReceipt, sha256: str, key: str) -> dict[str, Any]:
    return {
        "id": secrets.token_hex(16),
        "time": time.time(),
        "host": socket.gethostname(),
        "request": key,
        "probe": probe.name,
        "probe_sha256": probe.sha256,
        "server_sha256": sha256,
        "configs": [tier.name for tier in receipt.tiers if tier.tier == "named"],
        "aggregate": probe.aggregate,
        "score": probe.score,
        "threshold": probe.threshold,
        "alarm_position": probe.alarm_position,
        "n_prompt": receipt.n_prompt,
        "n_completion": receipt.n_completion,
        "stopped": probe.stopped,
    }
