"""What outputs of running requests carry: rows of their own tokens, once, and none too early."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._base.partial import PARTIAL_KEY, Joined, Partial
from inspect_lens._vllm.frontend.wrappers import FRONT_END_WRAPPERS
from inspect_lens._vllm.http.bodies import as_json, payloads, with_results
from inspect_lens._vllm.registered.contents import TIERS_KEY
from inspect_lens._vllm.results import choices, streaming
from inspect_lens._vllm.results.choices import Ticket
from inspect_lens._vllm.results.event_loop import arrivals_of
from inspect_lens._vllm.results.streaming import Pace, Streaming
from inspect_lens._vllm.sinks import alerts
from inspect_lens._vllm.sinks.sink import Exchange
from inspect_lens.errors import SpecError
from inspect_lens.model._scores import columns_of
from inspect_lens.spec import (
    GateReceipt,
    ProbeReceipt,
    ProbeUse,
    Receipt,
    TensorData,
    TierReceipt,
)
from tests.kit.steps import HIDDEN
from tests.unit.vllm.results.test_ahead import N_MAX, N_PROMPT, Engine
from tests.unit.vllm.results.test_results import completion, output

ROWS = LensRequest(capture=CaptureSpec(layers=(0, 5)), probes=["p"], stream_results=True)


def going_on(key: str, n_completion: int) -> Any:
    choice = completion(0)
    choice.inspect_lens_running = Ticket(key, n_completion=n_completion)
    return output(choice)


def part_of(one: Any) -> Partial | None:
    found: Partial | None = one.outputs[0].__dict__.get("inspect_lens_partial")
    return found


def test_an_output_waits_for_the_rows_of_its_tokens_and_carries_no_others(engine: Engine) -> None:
    """The step that sampled a token is told of before its rows have come, or long behind."""
    key = engine.start(ROWS)
    joined = Joined()
    positions: list[int] = []

    async def read() -> None:
        arrivals = arrivals_of(asyncio.get_running_loop(), engine.results)
        for n_completion in range(1, N_MAX - N_PROMPT + 1):
            one = going_on(key, n_completion)
            carried = asyncio.ensure_future(arrivals.wait_for(one))
            await asyncio.sleep(0.02)
            assert not carried.done(), "before its rows have come"
            if n_completion == 1:
                engine.step([key], 0, N_PROMPT)
            else:
                engine.step([key], N_PROMPT + n_completion - 2)
            await carried
            due = engine.results.n_bytes(one, is_kept=True)
            engine.results.carry(one, is_kept=True)
            part = part_of(one)
            assert part is not None
            assert part.nbytes == due
            assert not part.scores
            joined.add(part)
            positions.extend(part.positions["residual_stream"])
            assert positions == list(range(N_PROMPT + n_completion - 1))

    asyncio.run(read())
    engine.step([key], N_MAX - 1)
    (done,) = engine.end([key])
    rest = part_of(done)
    assert rest is not None
    joined.add(rest)
    whole = done.activations["residual_stream"].numpy()
    np.testing.assert_array_equal(joined.tensors()["residual_stream"].storage, whole)
    assert list(rest.positions["residual_stream"]) == [N_MAX - 1]
    assert done.outputs[0].inspect_lens_tensors == {}, "a client has had all of it"
    assert done.inspect_lens.capture.n_positions == N_MAX


def test_nobody_waits_while_rows_of_a_prompt_are_written(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the event loop nor who else wants results: they are written without their lock.

    The thread knows whose request it is, for the share of a client in what waits to be fetched.
    """
    from inspect_lens._vllm.frontend import wrappers
    from inspect_lens._vllm.http.bodies import Body, part_as_json
    from inspect_lens._vllm.telemetry import CALLER, Caller

    key = engine.start(ROWS)
    engine.step([key], 0, N_PROMPT)
    engine.settle()
    lock = engine.collector.notifier.changed
    written: list[tuple[bool, str, str]] = []

    def noted(part: Partial, handles: list[str]) -> list[list[bytes]]:
        free = lock.acquire(blocking=False)
        written.append((free, threading.current_thread().name, CALLER.get().client))
        if free:
            lock.release()
        return part_as_json(part, handles)

    class Front:
        results = engine.results
        waiting = ThreadPoolExecutor(1, thread_name_prefix="waiting")

    monkeypatch.setattr(wrappers, "part_as_json", noted)
    monkeypatch.setattr(wrappers, "front_end", Front)
    one = going_on(key, 1)
    monkeypatch.setattr(wrappers, "_LARGE_PART", engine.results.n_bytes(one, is_kept=False))

    async def carry() -> None:
        CALLER.set(Caller({"client": ("10.0.0.1", 1)}, lambda scope: "key"))
        await wrappers._carry(one, Body(), may_wait=True)

    with Front.waiting:
        asyncio.run(carry())
    assert written == [(True, "waiting_0", "10.0.0.1 key")]
    assert "inspect_lens_partial_json" in one.outputs[0].__dict__
    engine.results.abandon([key])
    engine.worker.stepper.remove(key)


def test_the_end_of_a_stream_takes_a_thread_only_where_much_is_left(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"capture": CaptureSpec(layers=(0, 5))}
    stream = engine.start(LensRequest(**rows, stream_results=True))
    whole = engine.start(LensRequest(**rows))
    engine.step([stream, whole], 0, N_PROMPT)
    engine.run([stream, whole])
    engine.settle()
    n_completion = N_MAX - N_PROMPT + 1

    def is_light(key: str) -> bool:
        choice = completion(0)
        choice.inspect_lens_ticket = Ticket(key, n_completion=n_completion)
        return engine.results.is_light(output(choice), encodes=True)

    left = engine.results.n_bytes(going_on(stream, n_completion), is_kept=False)
    monkeypatch.setattr(choices, "_LIGHT_BYTES", left - 1)
    assert not is_light(stream)
    engine.results.carry(going_on(stream, 2), is_kept=False)
    assert is_light(stream), "most has gone out"
    monkeypatch.undo()
    assert not is_light(whole), "all of it is written into one answer"
    engine.end([stream, whole])


@pytest.mark.parametrize(
    ("layers", "transport", "stays"),
    [((5,), "binary", True), ((0, 5), "binary", False), ((5,), "inline", False)],
)
def test_rows_that_stay_where_they_lie_until_they_are_fetched_take_no_thread(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, layers: Any, transport: Any, stays: bool
) -> None:
    capture = CaptureSpec(layers=layers, transport=transport)
    stream = engine.start(LensRequest(capture=capture, stream_results=True))
    whole = engine.start(LensRequest(capture=capture))
    engine.step([stream, whole], 0, N_PROMPT)
    engine.settle()
    assert (not engine.results.n_bytes(going_on(stream, 1), is_kept=False)) == stays
    assert engine.results.n_bytes(going_on(stream, 1), is_kept=True)
    expected = engine.results.expected(stream)
    assert expected is not None
    assert expected.envelope.capture is not None
    # Rows that are cut to the width of a site are copied.
    narrow = replace(expected.envelope.capture, widths=((HIDDEN // 2, 1),))
    envelope = replace(expected.envelope, capture=narrow)
    assert Streaming(envelope, None, None).n_bytes(N_PROMPT, is_kept=False)
    monkeypatch.setattr(choices, "_LIGHT_BYTES", 0)
    early = completion(0)
    early.inspect_lens_ticket = Ticket(whole, n_completion=1)
    assert engine.results.is_light(output(early), encodes=True) == stays
    engine.results.abandon([stream, whole])
    for key in (stream, whole):
        engine.worker.stepper.remove(key)


def test_what_nobody_read_comes_with_the_last_output(engine: Engine) -> None:
    slow, fast = engine.start(ROWS), engine.start(ROWS)
    engine.step([slow, fast], 0, N_PROMPT)
    engine.run([slow, fast])
    engine.settle()
    first = going_on(fast, 2)
    engine.results.carry(first, is_kept=True)
    assert [len(part.positions["residual_stream"]) for part in [part_of(first)] if part] == [4]
    for one, n in zip(engine.end([slow, fast]), (N_MAX, N_MAX - 4), strict=True):
        part = part_of(one)
        assert part is not None
        assert part.tensors["residual_stream"].shape[:2] == (2, n)
        whole = one.activations["residual_stream"].numpy()
        np.testing.assert_array_equal(part.tensors["residual_stream"].storage, whole[:, -n:])


def test_a_request_that_was_given_up_or_failed_carries_nothing(engine: Engine) -> None:
    key = engine.start(ROWS)
    one = going_on(key, 1)
    engine.results.abandon([key])
    assert engine.results.has_come(one)
    engine.results.carry(one, is_kept=True)
    assert part_of(one) is None
    engine.worker.stepper.remove(key)


def test_requests_that_do_not_stream_have_outputs_as_before(engine: Engine) -> None:
    key = engine.start(LensRequest(capture=CaptureSpec(layers=(0,)), probes=["p"]))
    expected = engine.results.expected(key)
    assert expected is not None
    assert expected.streaming is not None
    assert not expected.streaming.is_due
    engine.results.abandon([key])
    engine.worker.stepper.remove(key)


def test_a_part_is_read_as_it_was_written(engine: Engine) -> None:
    key = engine.start(
        LensRequest(
            capture=CaptureSpec(layers=(0, 5), positions=(0, 2), dtype="bfloat16"),
            probes=[{"name": "q", "tokens": True, "positions": "all"}],
            stream_results=True,
        )
    )
    engine.step([key], 0, N_PROMPT)
    engine.settle()
    one = going_on(key, 1)
    engine.results.carry(one, is_kept=True)
    part = part_of(one)
    assert part is not None
    for most, n in ((1, 3), (part.nbytes // 2, 2), (part.nbytes, 1)):
        again, positions = Joined(), list[int]()
        pieces = list(part.split(most))
        assert len(pieces) == n, "of less than a token there are none, and scores come first"
        for piece in pieces:
            again.add(piece)
            positions += piece.positions.get("residual_stream", ())
        assert positions == [0, 2]
        assert again.scores == part.scores
        joined, whole = again.tensors(), part.tensors
        np.testing.assert_array_equal(
            joined["residual_stream"].storage, whole["residual_stream"].storage
        )
    read = Partial.from_json(json.loads(b"".join(part.to_json())))
    assert read.scores == dict(part.scores)
    assert list(read.positions["residual_stream"]) == [0, 2]
    mine, theirs = (p.tensors["residual_stream"] for p in (part, read))
    assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
    np.testing.assert_array_equal(mine.storage, theirs.storage)
    engine.results.abandon([key])
    engine.worker.stepper.remove(key)


def test_gates_are_read_as_they_were_written_and_rows_without_their_positions_are_not() -> None:
    gate = GateReceipt(layer=1, site="resid_post", fired_at=3, n_tokens=None, sha256="a" * 64)
    tensor = TensorData(np.zeros((1, 2, 4), np.float32), "float32")
    part = Partial(tensors={"x": tensor}, positions={"x": (0, 2)}, gates=(gate,))
    form = json.loads(b"".join(part.to_json()))
    assert Partial.from_json(form).gates == (gate,)
    for positions in (None, [0], 3):
        form["activations"]["x"]["positions"] = positions
        with pytest.raises(SpecError, match="without the positions of its 2 tokens"):
            Partial.from_json(form)


def test_events_of_a_stream_have_rows_behind_their_tokens_and_the_receipt_last(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_last = N_MAX - N_PROMPT + 1
    assert served(engine, monkeypatch) == ["text", True] * n_last + [False]


def test_rows_that_are_fetched_are_kept_for_it_and_each_event_names_its_own(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"layers": (0, 5), "transport": "binary"}
    request = LensRequest(capture=asked, probes=["p"], stream_results=True)
    n_last = N_MAX - N_PROMPT + 1
    assert served(engine, monkeypatch, request) == ["text", True] * n_last + [False]
    assert not payloads.n_bytes, "all was fetched, and nothing else was kept"


def test_among_many_streams_tokens_share_an_event_and_none_is_lost(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = served_among_many(engine, monkeypatch, every_s=0.8)
    # The first token has its rows. Two seconds are over with the fourth; the fifth is the last.
    assert kinds == ["text", True, "text", "text", "text", True, "text", True, False]


def test_among_many_streams_only_a_first_token_waits_for_rows_and_missing_ones_come_later(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on being due while there are rows on their way."""
    carry, late = engine.results.carry, iter([False, True])
    asked: list[Any] = []

    def carry_late(output: Any, *, is_kept: bool) -> None:
        if not next(late, False):
            carry(output, is_kept=is_kept)

    def has_come(output: Any) -> bool:
        asked.append(output)
        return len(asked) == 1

    monkeypatch.setattr(engine.results, "carry", carry_late)
    monkeypatch.setattr(engine.results, "has_come", has_come)
    kinds = served_among_many(engine, monkeypatch, every_s=1.5)
    # The third event is due, and so is the fourth, as the third has carried nothing.
    assert kinds == ["text", True, "text", "text", "text", True, "text", True, False]
    assert len(asked) == 2


def test_among_many_streams_one_that_has_had_all_its_rows_is_not_looked_at_for_each_token(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry = engine.results.carry
    carried: list[Any] = []

    def noted(output: Any, *, is_kept: bool) -> None:
        carry(output, is_kept=is_kept)
        carried.append(part_of(output))

    monkeypatch.setattr(engine.results, "carry", noted)
    of_prompt = {"layers": (0, 5), "positions": "prompt", "transport": "binary"}
    request = LensRequest(capture=of_prompt, stream_results=True)
    kinds = served_among_many(engine, monkeypatch, request, every_s=1.5)
    assert kinds == ["text", True, "text", "text", "text", "text", False]
    assert [part is not None for part in carried] == [True, False], "the third of four, too"


@pytest.mark.parametrize("n", [1, 2])
def test_between_two_events_with_rows_an_output_is_any_streams(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """It has nothing of ours, and nothing is asked about it."""
    from inspect_lens._vllm.frontend import wrappers

    counted: Counter[str] = Counter()
    for owner, name in ((wrappers, "Ticket"), (Pace, "is_due"), (Streaming, "take")):
        what = getattr(owner, name)

        def noted(*args: Any, _what: Any = what, _name: str = name, **kwargs: Any) -> Any:
            counted[_name] += 1
            return _what(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)
    kinds = served_among_many(engine, monkeypatch, every_s=0.001, n=n)
    assert kinds == ["text", True, "text", "text", "text", "text", True, False]
    assert counted == {"Ticket": 1, "is_due": 1, "take": 1}, "for the first token"


def served_among_many(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    request: LensRequest = ROWS,
    *,
    every_s: float,
    n: int = 1,
) -> list[Any]:
    """As `served`, beside 300 other streams; each look at the clock takes so long."""
    others = Pace()
    others.begin(range(300))
    clock = SimpleNamespace(monotonic=itertools.count(0, every_s).__next__)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(streaming, "time", clock)
            return served(engine, monkeypatch, request, settles=True, n=n)
    finally:
        others.end()


def test_the_pace_is_that_of_the_streams_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(streaming, "time", SimpleNamespace(monotonic=lambda: now[0]))
    mine, others = Pace(), Pace()

    def next_due(*choices: int) -> float:
        """Seconds until the next event with results."""
        began = now[0]
        mine.begin(choices)
        while not mine.is_due(choices):
            assert not mine.may_wait(choices)
            now[0] += 1 / 1024
        assert mine.is_due(choices), "until it has carried something"
        mine.note(choices)
        return now[0] - began

    assert next_due(0) == next_due(0) == 0.0, "with each token where a stream is alone"
    for n, seconds in ((10, 0.08), (100, 0.8), (1000, 2.0), (10_000, 2.0)):
        others.begin(range(n))
        assert all(others.is_due([i]) for i in range(n)), "the first of each"
        assert next_due(0) == pytest.approx(seconds, abs=1 / 512)
    assert Pace._n_under_way == 10_001
    assert not mine.is_due([0])
    mine.begin([0, 1])
    assert Pace._n_under_way == 10_002, "each choice once"
    assert mine.is_due([0, 1]), "another choice has its first token in the same event"
    assert mine.may_wait([0, 1])
    others.end()
    mine.end()
    assert Pace._n_under_way == 0


def goes_on(key: str, n_completion: int) -> Any:
    """A choice of an output as vLLM makes it, with what is ours."""
    make = FRONT_END_WRAPPERS["new_completion_output"](lambda self, *args: completion(0))
    detokenizer = SimpleNamespace(num_output_tokens=lambda: n_completion)
    return make(
        SimpleNamespace(request_id=key, detokenizer=detokenizer, stream_interval=1), [1], None, None
    )


def served(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    request: LensRequest = ROWS,
    *,
    settles: bool = False,
    n: int = 1,
) -> list[Any]:
    """Of each event of an answer, whether it is vLLM's, and if not whether it is of a part.

    With `settles`, rows have come when their token is told of. Of `n` choices one has rows.
    """
    from inspect_lens._vllm.frontend import wrappers
    from inspect_lens._vllm.http.bodies import SERVED, Answer, Body

    def fetch(name: str, entry: Mapping[str, Any]) -> Any:
        assert ("data" in entry) == (request is ROWS)
        return payloads.get(entry["handle"]) if "handle" in entry else None

    key = engine.start(request)
    sent: list[bytes] = []
    n_last = N_MAX - N_PROMPT + 1

    async def outputs(self: Any, *args: Any) -> Any:
        for n_completion in range(1, n_last):
            if n_completion == 1:
                engine.step([key], 0, N_PROMPT)
            else:
                engine.step([key], N_PROMPT + n_completion - 2)
            if settles:
                engine.settle()
            yield output(goes_on(key, n_completion), finished=False)
        engine.step([key], N_MAX - 1)
        engine.worker.stepper.leave([key])
        choice = completion(0)
        choice.inspect_lens_ticket = Ticket(key, n_completion=n_last)
        yield output(choice)

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def serve() -> None:
        body = Body(kind="text_completion")
        SERVED.set(body)
        answer = Answer(send, body)
        head = [(b"content-type", b"text/event-stream")]
        await answer({"type": "http.response.start", "status": 200, "headers": head})
        served = FRONT_END_WRAPPERS["async_generate"](outputs)
        fake = SimpleNamespace(input_processor=None, engine_core=None)
        params = SimpleNamespace(extra_args=None, n=n)
        async for _ in served(fake, "a prompt", params):
            said = b'data: {"choices": [{"index": 0, "text": "x"}]}\n\n'
            await answer({"type": "http.response.body", "body": said, "more_body": True})
        done = b"data: [DONE]\n\n"
        await answer({"type": "http.response.body", "body": done, "more_body": False})

    with ThreadPoolExecutor(1) as pool:
        front = SimpleNamespace(results=engine.results, waiting=pool)
        monkeypatch.setattr(wrappers, "front_end", lambda: front)
        monkeypatch.setattr(wrappers, "judge_early", lambda *args: 1)
        asyncio.run(serve())
        monkeypatch.undo()
    engine.worker.stepper.remove(key)
    *texts, done, end = b"".join(sent).split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    events = [json.loads(text.removeprefix(b"data: ")) for text in texts]
    kinds = ["text" if event["choices"] else PARTIAL_KEY in event for event in events]
    joined, positions, n_tokens = Joined(), list[int](), 0
    for event in events[:-1]:
        n_tokens += len(event["choices"])
        for value in event.get(PARTIAL_KEY, ()):
            part = Partial.from_json(value, fetch)
            joined.add(part)
            positions += part.positions["residual_stream"]
            assert positions == list(range(N_PROMPT + n_tokens - 1)), "as far as its token was fed"
    n_rows = N_PROMPT if getattr(request.capture, "positions", "") == "prompt" else N_MAX
    receipt = events[-1]["inspect_lens"]
    assert receipt["capture"]["n_positions"] == n_rows == len(positions)
    assert "activations" not in events[-1], "each row once"
    assert joined.tensors()["residual_stream"].shape[:2] == (2, n_rows)
    return kinds


def test_an_alarm_is_told_where_nobody_knows_what_was_said(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(alerts, "look_at", lambda receipt, **by: told.append((receipt, by)))
    probe = {"name": "p", "alarm": "flag", "threshold": -1e6, "positions": "all"}
    key = engine.start(LensRequest(probes=[probe]))
    expected = engine.results.expected(key)
    assert expected is not None
    tier = TierReceipt(tier="server", sha256="s", edits=0)
    expected.packed = {**expected.packed, TIERS_KEY: (0, [tier.model_dump(mode="json")])}
    expected.asked_by = Exchange("cmpl-1", (1, 2), "what was asked")

    def unknown() -> Any:
        raise RuntimeError("no text")

    engine.results.hear(key, unknown)
    engine.step([key], 0, N_PROMPT)
    engine.settle()
    engine.results.abandon([key])
    engine.worker.stepper.remove(key)
    ((receipt, by),) = told
    assert (receipt.tiers[0].probes[0].alarm_position, by["text"]) == (0, "")


@pytest.mark.parametrize("end", ["fails", "is broken off", "is whole"])
def test_an_alarm_of_the_servers_probe_is_told_whatever_becomes_of_the_results(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(alerts, "look_at", lambda receipt, **by: told.append((receipt, by)))
    key = engine.start(LensRequest(probes=[{"name": "p", "alarm": "flag", "threshold": -1e6}]))
    expected = engine.results.expected(key)
    assert expected is not None
    tier = TierReceipt(tier="server", sha256="s", edits=0)
    expected.packed = {**expected.packed, TIERS_KEY: (0, [tier.model_dump(mode="json")])}
    expected.asked_by = Exchange("cmpl-1", (1, 2), "what was asked")
    engine.results.hear(key, lambda: ((7, 8), "so far"))
    engine.step([key], 0, N_PROMPT)
    if end == "is whole":
        engine.run([key])
    else:
        engine.step([key], N_PROMPT)
    engine.settle()
    if end == "is broken off":
        engine.results.abandon([key])
        engine.worker.stepper.remove(key)
    else:
        if end == "fails":
            engine.results.spoil([key], RuntimeError("of ours"))
        engine.end([key], 2 if end == "fails" else N_MAX - N_PROMPT + 1)
    ((receipt, by),) = told
    (probe,) = receipt.tiers[0].probes
    assert (probe.name, probe.alarm_position) == ("p", N_PROMPT)
    assert by["prompt"] == "what was asked"


def test_scores_that_are_no_numbers_of_json_come_back_as_they_were() -> None:
    """In the numbers of JSON there is no infinity, and strict clients refuse its name."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    scores = (1.5, math.inf, -math.inf, math.nan)
    probe = ProbeReceipt(
        name="p", sha256="", aggregate="mean", score=math.inf, n_tokens=4, tokens=scores
    )
    receipt = Receipt(
        n_prompt=1, n_completion=4, cache_salted=False, paths=(), probes=(probe,), engine="e",
        version="0", vllm_version="0",
    )  # fmt: skip
    part = json.loads(b"".join(Partial({"p": scores}).to_json()), parse_constant=refuse)
    read = Partial.from_json(part).scores["p"]
    np.testing.assert_array_equal(read, scores)
    answer = SimpleNamespace(
        inspect_lens=receipt, inspect_lens_tensors={}, inspect_lens_transport="inline"
    )
    body = b"".join(with_results(b'{"choices": []}', {0: as_json(answer, [])}, 1))
    back = Receipt.model_validate(json.loads(body, parse_constant=refuse)["inspect_lens"])
    assert back.probes[0].score == math.inf
    np.testing.assert_array_equal(back.probes[0].tokens, scores)
    uses = (ProbeUse(name="p", positions=[0, 1, 2, 3], tokens=True),)
    said = json.loads(body)["inspect_lens"]
    said["probes"][0]["first_position"] = 0
    (column,) = columns_of(said, uses, n_prompt=1, n_completion=4)
    np.testing.assert_array_equal(column.scores, np.float32(scores))
