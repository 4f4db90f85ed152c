"""Stores and functions behind two API servers of one engine, and what their clients see of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from math import sqrt
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from inspect_lens._vllm.sinks.sink import lot
from inspect_lens.client import LensClient
from inspect_lens.data import ActivationStore, Captured, Recording
from inspect_lens.errors import SpecError
from inspect_lens.spec import SinkUse, decode_tensor
from tests.kit.api_server import ApiServer, api_server
from tests.kit.waiting import until

pytestmark = pytest.mark.engine

MODEL = "organism/checkpoint"
PROMPT = "The founder of the town Velosh"
SHARE = 0.3
# While a file `hold` lies beside it, the function does not return; the file `held` says so.
FUNCTION = """
import time
from pathlib import Path

def sleep(sample, about):
    beside = Path(__file__)
    while beside.with_name("hold").exists():
        beside.with_name("held").touch()
        time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sinks")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ApiServer]:
    (folder / "slow_sinks.py").write_text(FUNCTION)
    (folder / "slow-1.dist-info").mkdir()
    (folder / "slow-1.dist-info/METADATA").write_text("Name: slow\nVersion: 1\n")
    (folder / "slow-1.dist-info/entry_points.txt").write_text(
        "[inspect_lens.sinks]\nsleep = slow_sinks:sleep\n"
    )
    named = {
        "recorded": {"store": str(folder / "recorded"), "layers": [2, 4], "positions": "all"},
        "ruled": {
            "store": f"file://{folder / 'ruled'}", "layers": [3], "share": SHARE, "seed": "s",
            "requests": False, "shard_s": 1.0,
        },
        "slow": {"callback": "sleep", "layers": [2], "positions": "all", "memory_bytes": 200_000},
    }  # fmt: skip
    options = {
        "model": MODEL,
        "dtype": "float32",
        "kv_cache_memory_bytes": 64 << 20,
        "api_server_count": 2,
        "enforce_eager": True,
    }
    environment = os.environ | {
        "INSPECT_LENS_SINKS": json.dumps(named),
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
    }
    log = folder / "server.log"
    with api_server(options, environment=environment, log=log, preloaded=True) as running:
        yield running


def ask(
    server: ApiServer,
    sink: Any = None,
    *,
    capture: Any = None,
    headers: dict[str, str] | None = None,
    over: httpx.Client | None = None,
    **more: Any,
) -> httpx.Response:
    """Over a connection of its own, which either of the servers takes, or over one that is open."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "temperature": 0.0, **more}
    wanted = {k: v for k, v in (("sink", sink), ("capture", capture)) if v is not None}
    if wanted:
        body["inspect_lens"] = wanted
    headers = {"Content-Type": "application/json", **(headers or {})}
    # httpx's own JSON cannot be half of a surrogate pair.
    content = json.dumps(body)
    url = f"{server.url}/v1/completions"
    return (over or httpx).post(url, content=content, headers=headers, timeout=120)


def samples(folder: Path) -> dict[str, Captured]:
    return {s.record.id: s for shard in Recording.open(folder).shards() for s in shard.samples()}


def counted(server: ApiServer) -> Counter[tuple[str, str]]:
    """Results at sinks, of all servers together, by sink and status."""
    found: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text):
        for sample in family.samples:
            if sample.name == "inspect_lens_sink_results_total":
                found[sample.labels["sink"], sample.labels["status"]] += int(sample.value)
    return found


def test_two_servers_write_one_store_and_its_rows_are_those_of_the_responses(
    server: ApiServer, folder: Path
) -> None:
    capture = {"layers": [2, 4], "positions": "all"}

    def one(i: int) -> dict[str, Any]:
        use = {"name": "recorded", "id": f"both-{i}", "label": i % 2 == 0}
        answer = ask(server, use, capture=capture, prompt=PROMPT + " and" * (i % 5))
        assert answer.status_code == 200, answer.text
        made: dict[str, Any] = answer.json()
        return made

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(64)))
    told = [answer["inspect_lens"]["sink"] for answer in answers]
    assert {t["status"] for t in told} == {"written"}
    assert len({t["shard"].split("-")[1] for t in told}) == 2, "each server wrote shards"
    found = samples(folder / "recorded")
    for i, answer in enumerate(answers):
        rows = decode_tensor(answer["activations"]["residual_stream"])
        sample = found[f"both-{i}"]
        assert sample.acts is not None
        np.testing.assert_array_equal(sample.acts.storage, rows.storage)
        assert sample.record.completion == answer["choices"][0]["text"]
        assert sample.record.label is (i % 2 == 0)
    ActivationStore.open(folder / "recorded").verify()


def test_a_stream_is_recorded_whole(server: ApiServer, folder: Path) -> None:
    whole = ask(server).json()["choices"][0]["text"]
    answer = ask(server, {"name": "recorded", "id": "streamed"}, stream=True)
    events = [json.loads(e[6:]) for e in answer.text.split("\n\n") if e.startswith("data: {")]
    (receipt,) = [event["inspect_lens"] for event in events if "inspect_lens" in event]
    assert receipt["sink"]["status"] == "written"
    assert not any("activations" in event for event in events)
    sample = samples(folder / "recorded")["streamed"]
    assert sample.record.completion == whole
    assert len(sample.token_ids) == receipt["n_prompt"] + receipt["n_completion"]


def test_clients_ask_and_read_the_status(server: ApiServer, folder: Path) -> None:
    with LensClient(server.url) as client:
        use = SinkUse(name="recorded", id="client", group="g")
        output = client.generate(PROMPT, sink=use)
        assert output.receipt is not None
        assert output.receipt.sink is not None
        assert output.receipt.sink.status == "written"
        assert output.activations is None
        output = client.chat([{"role": "user", "content": PROMPT}], sink="recorded")
        assert output.receipt is not None
        assert output.receipt.sink is not None
        assert output.receipt.sink.status == "written"
        with pytest.raises(SpecError, match="known are recorded, slow"):
            client.generate(PROMPT, sink="elsewhere")
    assert samples(folder / "recorded")["client"].record.group == "g"


def test_the_inspect_provider_asks_and_the_log_has_the_status(server: ApiServer) -> None:
    from inspect_ai.model import get_model

    from inspect_lens.model import lens_config

    async def run() -> Any:
        async with get_model(f"lens/{MODEL}", base_url=f"{server.url}/v1", memoize=False) as model:
            config = lens_config(sink={"name": "recorded", "label": True}, max_tokens=4)
            return await model.generate(PROMPT, config=config)

    output = asyncio.run(run())
    assert output.metadata["inspect_lens"]["sink"]["status"] == "written"


def test_no_client_learns_a_path(server: ApiServer, folder: Path) -> None:
    about = httpx.get(f"{server.url}/v1/inspect_lens").json()["sinks"]
    assert set(about) == {"recorded", "ruled", "slow"}
    assert about["recorded"]["layers"] == [2, 4]
    assert str(folder) not in json.dumps(about)
    assert str(folder) not in ask(server, "recorded").text


def test_a_rule_chooses_by_id_and_answers_are_as_without_it(
    server: ApiServer, folder: Path
) -> None:
    n = 120
    before = counted(server)["ruled", "written"]

    def one(i: int) -> dict[str, Any]:
        answer = ask(server, headers={"X-Request-Id": f"mine-{i}"}, prompt=f"{PROMPT} {i}")
        made: dict[str, Any] = answer.json()
        return made

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(n)))
    assert not any("inspect_lens" in a or "activations" in a for a in answers)
    ids = [f"{answer['id']}-0" for answer in answers]
    assert all("mine-" in key for key in ids)
    chosen = {key for key in ids if lot("s", "ruled", key) < SHARE}
    assert abs(len(chosen) - SHARE * n) < 4 * sqrt(n * SHARE * (1 - SHARE))
    deadline = time.monotonic() + 30
    found: dict[str, Captured] = {}
    while not chosen <= set(found) and time.monotonic() < deadline:
        time.sleep(0.2)
        found = samples(folder / "ruled")
    assert {key for key in found if "mine-" in key} == chosen
    by_id = dict(zip(ids, answers, strict=True))
    assert all(found[k].record.completion == by_id[k]["choices"][0]["text"] for k in chosen)
    assert counted(server)["ruled", "written"] - before >= len(chosen)


def test_who_waits_for_a_slow_sink_waits_alone_and_it_counts_what_it_drops(
    server: ApiServer, folder: Path
) -> None:
    before = counted(server)
    use = {"name": "slow", "wait": False}
    (folder / "held").unlink(missing_ok=True)
    with ThreadPoolExecutor(16) as pool, ExitStack() as stack:
        # A server that stands would leave new connections to the other one.
        clients = [stack.enter_context(httpx.Client()) for _ in range(16)]
        list(pool.map(lambda client: ask(server, over=client), clients))
        (folder / "hold").touch()
        stack.callback((folder / "hold").unlink, missing_ok=True)
        waiting = [pool.submit(ask, server, "slow", over=client) for client in clients[:4]]
        assert until((folder / "held").exists, 60)
        assert {ask(server, over=client).status_code for client in clients[4:]} == {200}
        more = [ask(server, use, prompt=PROMPT * 8).json()["inspect_lens"] for _ in range(20)]
        assert not any(one.done() for one in waiting)
        (folder / "hold").unlink()
        told = [one.result().json()["inspect_lens"]["sink"]["status"] for one in waiting]
    assert told == ["written"] * 4
    statuses = Counter(one["sink"]["status"] for one in more)
    assert set(statuses) == {"queued", "dropped"}
    assert (counted(server) - before)["slow", "dropped"] == statuses["dropped"]


def test_killed_while_they_write_the_store_is_whole(server: ApiServer, folder: Path) -> None:
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    told: list[str] = []

    def load(i: int) -> None:
        use = {"name": "recorded", "id": f"late-{i}"}
        answer = ask(server, use, max_tokens=20)
        if answer.json()["inspect_lens"]["sink"]["status"] == "written":
            told.append(f"late-{i}")

    with ThreadPoolExecutor(8) as pool:
        work = [pool.submit(load, i) for i in range(4000)]
        while len(told) < 60:
            time.sleep(0.01)
        for process in processes:
            process.send_signal(signal.SIGKILL)
        for one in work:
            one.cancel()
        for one in work:
            if not one.cancelled():
                one.exception()
    ActivationStore.open(folder / "recorded").verify()
    assert set(told) <= set(samples(folder / "recorded")), "what was told to be written is there"


@pytest.mark.nightly(
    held_by=(
        "tests/unit/vllm/sinks/test_recorder.py::test_a_slow_sink_spills_and_drains_in_the_end"
    ),
    why="a server of its own",
)
def test_a_server_that_ends_in_order_writes_what_is_queued(folder: Path) -> None:
    named = {"late": {"store": str(folder / "late"), "layers": [2], "share": 1.0}}
    options = {"model": MODEL, "dtype": "float32", "kv_cache_memory_bytes": 64 << 20}
    environment = os.environ | {"INSPECT_LENS_SINKS": json.dumps(named)}
    log = folder / "late.log"
    with api_server(options | {"enforce_eager": True}, environment=environment, log=log) as running:
        told = ask(running, {"name": "late", "id": "asked", "wait": False}).json()
        assert told["inspect_lens"]["sink"]["status"] == "queued"
        ids = {f"{ask(running).json()['id']}-0" for _ in range(5)}
        time.sleep(1.0)
        assert counted(running)["late", "written"] == 0
    assert set(samples(folder / "late")) == {"asked", *ids}
