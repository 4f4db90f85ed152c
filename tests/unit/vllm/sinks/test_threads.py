"""A process that may have no more threads for a while loses nothing that waits for one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from inspect_lens._vllm.sinks.alerts import Alerts, AlertsConfig
from inspect_lens._vllm.sinks.recorder import Recorder
from inspect_lens._vllm.sinks.threads import Threads
from tests.kit.waiting import until
from tests.unit.vllm.sinks.test_recorder import NAME, Slow, config, done


def refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_sink_that_gets_no_thread_begins_with_the_next_result(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = Slow(let=True)
    recorder = Recorder("live", config(shard_bytes=1), receiver, NAME)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        for name in "ab":
            assert recorder.take(done(name)).receipt.status == "queued"
    assert caplog.text.count("no thread for the sink") == 1, "and not for each result"
    recorder.take(done("c"))
    assert recorder.flush(20)
    assert receiver.ids == ["a", "b", "c"]


def test_alerts_that_get_no_thread_go_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []

    def send(alert: dict[str, int]) -> int:
        sent.append(alert["n"])
        return 200

    made = Alerts(AlertsConfig(url="https://host/x", dead_letter=str(tmp_path / "dead")), send)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        made.put({"n": 1})
    made.put({"n": 2})
    assert made.flush(20)
    assert sent == [1, 2]


def test_no_thread_is_started_twice_and_a_fault_ends_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inspect_lens._vllm.sinks.threads.time.sleep", lambda seconds: None)
    did: dict[str, list[int]] = {"a": [], "b": []}

    def work(name: str) -> None:
        did[name].append(threading.get_ident())
        if len(did[name]) > 2:
            threading.Event().wait()
        raise SystemExit

    made = Threads("test-works", "a test", lambda: work("a"), lambda: work("b"))
    for _ in range(3):
        made.begin()
    assert until(lambda: all(len(idents) == 3 for idents in did.values()))
    assert {len(set(idents)) for idents in did.values()} == {1}
