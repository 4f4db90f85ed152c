"""Alerts: sent beside the requests, tried again, and written down when nobody takes them."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from inspect_lens._vllm.sinks import alerts
from inspect_lens._vllm.sinks.alerts import Alerts, AlertsConfig
from inspect_lens.errors import SpecError
from inspect_lens.spec import ProbeReceipt, Receipt, TierReceipt
from tests.kit.webhook import webhook

URL = "https://host.example/hook?token=secret"


def config(folder: Path, **options: Any) -> AlertsConfig:
    given = {"url": URL, "dead_letter": str(folder / "dead.jsonl"), "pause_s": 0.001} | options
    return AlertsConfig.model_validate(given)


def letters(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "dead.jsonl").read_text().splitlines()]


def receipt(*, alarm: int | None = 5) -> Receipt:
    probe = ProbeReceipt(
        name="p", sha256="a" * 64, aggregate="last", score=2.0, n_tokens=3, threshold=1.0,
        alarm_position=alarm,
    )  # fmt: skip
    tier = TierReceipt(tier="server", sha256="b" * 64, edits=0, probes=(probe,))
    return Receipt(
        n_prompt=4, n_completion=3, cache_salted=False, paths=(), tiers=(tier,),
        engine="inspect_lens", version="0", vllm_version="0",
    )  # fmt: skip


def test_what_fails_is_tried_again_in_order(tmp_path: Path) -> None:
    sent: list[tuple[int, int]] = []
    statuses = iter([503, 429, 200, 408, 200])

    def send(alert: dict[str, Any]) -> int:
        sent.append((alert["n"], status := next(statuses)))
        return status

    made = Alerts(config(tmp_path), send)
    for n in (1, 2):
        made.put({"n": n})
    assert made.flush(10)
    assert sent == [(1, 503), (1, 429), (1, 200), (2, 408), (2, 200)]
    assert made.counts == {"delivered": 2}
    assert letters(tmp_path) == []


def test_what_nobody_takes_becomes_a_dead_letter(tmp_path: Path) -> None:
    def send(alert: dict[str, Any]) -> int:
        if alert["n"] == 1:
            raise ConnectionError(f"no route to {URL}")
        return 404

    made = Alerts(config(tmp_path, tries=3), send)
    for n in (1, 2):
        made.put({"n": n})
    assert made.flush(10)
    one, two = letters(tmp_path)
    assert one == {"why": "ConnectionError", "tries": 3, "alert": {"n": 1}}
    assert two == {"why": "the webhook answered 404", "tries": 1, "alert": {"n": 2}}
    assert (tmp_path / "dead.jsonl").stat().st_mode & 0o077 == 0
    assert "secret" not in json.dumps(made.describe()) + repr(made.config)


def test_a_webhook_that_hangs_holds_nobody_up_and_nothing_is_lost(tmp_path: Path) -> None:
    goes_on, has_begun = threading.Event(), threading.Event()

    def send(alert: dict[str, Any]) -> int:
        has_begun.set()
        goes_on.wait(20)
        return 200

    made = Alerts(config(tmp_path, waiting=2), send)
    made.put({"n": 0})
    assert has_begun.wait(10)
    for n in range(1, 6):
        made.put({"n": n})
    assert made.describe()["waiting"] == 2
    goes_on.set()
    assert made.flush(10)
    assert made.counts == {"delivered": 3, "dead": 3}
    assert [one["alert"]["n"] for one in letters(tmp_path)] == [3, 4, 5]


def test_long_texts_wait_on_the_disk_and_not_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, has_begun = threading.Event(), threading.Event()

    def send(alert: dict[str, Any]) -> int:
        has_begun.set()
        goes_on.wait(20)
        return 200

    monkeypatch.setattr(alerts, "_MOST_BYTES", 100_000)
    made = Alerts(config(tmp_path), send)
    for n in range(12):
        made.put({"n": n, "prompt": "x" * 20_000})
        assert has_begun.wait(10)
        while made._dead:  # until the disk has them
            time.sleep(0.001)
    assert made.describe()["waiting"] == 3, "and one is on its way"
    assert made._n_bytes <= 100_000
    assert len(letters(tmp_path)) == 8
    goes_on.set()
    assert made.flush(10)
    assert made.counts == {"delivered": 4, "dead": 8}
    assert made._n_bytes == 0


def test_a_process_that_ends_writes_what_waits(tmp_path: Path) -> None:
    has_begun = threading.Event()

    def send(alert: dict[str, Any]) -> int:
        has_begun.set()
        return 503

    made = Alerts(config(tmp_path, pause_s=30.0), send)
    for n in range(3):
        made.put({"n": n})
    assert has_begun.wait(10)
    made.close()
    assert sorted(one["alert"]["n"] for one in letters(tmp_path)) == [0, 1, 2]
    assert all("the process ended" in one["why"] for one in letters(tmp_path))


def test_a_process_that_ends_writes_what_the_webhook_has_not_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, goes_on = threading.Event(), threading.Event()

    def send(alert: dict[str, Any]) -> int:
        has_begun.set()
        goes_on.wait(20)
        return 503

    monkeypatch.setattr(alerts, "_EXIT_S", 0.2)
    made = Alerts(config(tmp_path, tries=1), send)
    made.put({"n": 1})
    assert has_begun.wait(10)
    made.put({"n": 2})
    made.close()
    two, one = letters(tmp_path)
    assert (one["alert"]["n"], one["tries"]) == (1, 1)
    assert one["why"] == "the process ended before the webhook answered"
    assert two["alert"]["n"] == 2
    goes_on.set()
    assert made.flush(10)
    assert made.counts == {"dead": 2}
    assert len(letters(tmp_path)) == 2, "each once"


def test_a_disk_that_is_full_leaves_no_half_letter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = os.write, [1 << 20]
    """Bytes that the disk has room for."""

    def short(file: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        n = real(file, data[: left[0]])
        left[0] -= n
        return n

    made = Alerts(config(tmp_path), lambda alert: 404)
    monkeypatch.setattr(os, "write", short)
    for n, room in ((1, 1 << 20), (2, 10), (3, 1 << 20)):
        left[0] = room
        made.put({"n": n})
        assert made.flush(10)
    assert [one["alert"]["n"] for one in letters(tmp_path)] == [1, 3]
    assert made.counts == {"dead": 2, "lost": 1}


def test_an_alert_that_cannot_be_written_holds_no_other_up(tmp_path: Path) -> None:
    made = Alerts(config(tmp_path), lambda alert: 404)
    for text in ("\ud800", "fine"):
        made.put({"text": text})
        assert made.flush(10)
    assert [one["alert"]["text"] for one in letters(tmp_path)] == ["fine"]
    assert made.counts == {"lost": 1, "dead": 1}


def test_no_log_has_the_address(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.INFO, logger="httpx")  # Inspect makes it quieter
    with webhook(tmp_path / "dead.jsonl") as hook:
        made = Alerts(config(tmp_path, url=hook.url))
        made.put({"n": 1})
        assert made.flush(10)
        assert hook.received == [{"n": 1}]
        assert "secret-path" not in caplog.text
        httpx.get(f"{hook.url}/of-others")
        assert "of-others" in caplog.text, "others' requests are logged as before"


def test_an_answer_without_an_end_holds_no_alert_up(tmp_path: Path) -> None:
    class Endless(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):  # whoever asked has gone
                while True:
                    self.wfile.write(b"x" * 1024)
                    time.sleep(0.01)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made = Alerts(config(tmp_path, url=f"http://127.0.0.1:{server.server_port}"))
        for n in (1, 2):
            made.put({"n": n})
        assert made.flush(10)
        server.shutdown()
    assert made.counts == {"delivered": 2}


@pytest.mark.parametrize("key", ["", "k"])
def test_a_webhook_gets_its_key_and_has_so_long_for_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("INSPECT_LENS_WEBHOOK_KEY", key)
    with webhook(tmp_path / "dead.jsonl") as hook:
        hook.goes_on.clear()
        made = Alerts(config(tmp_path, url=hook.url, tries=1, timeout_s=0.1))
        made.put({"n": 1})
        assert made.flush(10)
        assert hook.keys == [f"Bearer {key}" if key else None]
    assert letters(tmp_path) == [{"why": "ReadTimeout", "tries": 1, "alert": {"n": 1}}]


def test_a_score_that_is_no_number_of_json_is_delivered(tmp_path: Path) -> None:
    with webhook(tmp_path / "dead.jsonl") as hook:
        made = Alerts(config(tmp_path, url=hook.url, tries=1))
        made.put({"score": math.inf})
        assert made.flush(10)
        assert (hook.received, made.counts) == ([{"score": "Infinity"}], {"delivered": 1})


@pytest.mark.parametrize("text", [False, True])
def test_text_of_users_is_in_it_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bool
) -> None:
    sent: list[dict[str, Any]] = []

    def send(alert: dict[str, Any]) -> int:
        sent.append(alert)
        return 200

    made = Alerts(config(tmp_path, text=text), send)
    monkeypatch.setattr(alerts._Holder, "made", made)
    alerts.look_at(receipt(alarm=None), key="r0", prompt="who", text="me")
    alerts.look_at(receipt(), key="r1", prompt="who", text="me")
    assert made.flush(10)
    (alert,) = sent
    assert (alert["request"], alert["probe"], alert["alarm_position"]) == ("r1", "p", 5)
    assert ({"prompt", "text"} <= alert.keys()) is text
    assert alerts.want_text() is text


def test_a_wrong_address_and_a_file_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="no address of a webhook"):
        config(tmp_path, url="ftp://x")
    with pytest.raises(ValidationError, match="url"):
        AlertsConfig.model_validate({"dead_letter": "x"})
    with pytest.raises(SpecError, match=r"alerts\.dead_letter"):
        Alerts(config(tmp_path, dead_letter=str(tmp_path / "none" / "dead")))
