"""A handle is fetched from any API server of a user, and by this user without HTTP."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from inspect_lens._base import same_host, temp_dirs
from inspect_lens._base.http import HTTPError, fetch_result
from inspect_lens._base.same_host import NotHere, fetch_here, is_here
from inspect_lens._vllm.http import bodies, payloads, server
from inspect_lens._vllm.http.payloads import PayloadStore
from inspect_lens.errors import CaptureError, UnsupportedError
from tests.kit.waiting import until

SIZE = 3_000_000

SIBLING = f"""
import sys
from inspect_lens._vllm.http.payloads import PayloadStore
store = PayloadStore(ttl_s=float(sys.argv[1]))
store.serve(is_needed=True)
print(store.put(bytes(range(250)) * {SIZE // 250}), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    deep = tmp_path / ("a-folder-with-a-long-name" * 5)  # longer than paths of sockets may be
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    return deep


def new_name() -> str:
    """Of a server; names of servers never come again."""
    return secrets.token_hex(8)


def sibling(folder: Path, ttl_s: float) -> Any:
    return subprocess.Popen(
        [sys.executable, "-c", SIBLING, str(ttl_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )


@pytest.fixture
def client() -> Iterator[TestClient]:
    app = FastAPI()
    server._routers((), lambda app: None)(app)
    with TestClient(app) as made:
        yield made


@pytest.mark.parametrize(("ttl_s", "status"), [(60.0, 200), (0.0, 410)])
def test_a_handle_of_another_process_is_fetched_from_there(
    client: TestClient, folder: Path, ttl_s: float, status: int
) -> None:
    with sibling(folder, ttl_s) as other:
        handle = other.stdout.readline().strip()
        answer = client.get(f"/v1/activations/{handle}")
        assert answer.status_code == status
        if status == 200:
            assert answer.content == bytes(range(250)) * (SIZE // 250)
        assert client.get(f"/v1/activations/{handle}").status_code == 410, "once"
        unknown = client.get(f"/v1/activations/{handle.partition('-')[0]}-x")
        assert unknown.status_code == 410
        other.stdin.close()
    assert client.get(f"/v1/activations/{handle}").status_code == 404, "it has ended"
    assert not list(folder.iterdir())


@pytest.mark.parametrize("handle", ["unknown", "..-x", "%2e%2e-x", "a" * 300, "é-x", "."])
def test_a_handle_that_nobody_made_gets_404(client: TestClient, handle: str) -> None:
    assert client.get(f"/v1/activations/{handle}").status_code == 404


@pytest.mark.parametrize("root", ["/api", "/v1"])
def test_behind_a_root_path_results_are_where_the_other_routes_are(root: str) -> None:
    """And nowhere else: vLLM asks for no key of `/v1/activations` below a root path `/v1`."""
    app = FastAPI(root_path=root)
    server._routers((), lambda app: None)(app)
    handle = bodies.payloads.put(b"mine")
    with TestClient(app) as made:
        if root == "/v1":
            assert made.get(f"/v1/activations/{handle}").status_code == 404
        assert made.get(f"{root}/v1/activations/{handle}").content == b"mine"
        assert made.get(f"{root}/v1/activations/{handle}").status_code == 410


def test_a_server_gives_what_it_made(client: TestClient) -> None:
    assert client.get("/v1/activations/ab12-x").status_code == 404
    handle = bodies.payloads.put(b"mine")
    assert client.get(f"/v1/activations/{handle}").content == b"mine"


def test_a_large_payload_arrives_whole_and_once() -> None:
    store = PayloadStore()
    store.serve(is_needed=False)
    data = os.urandom(40_000_000)
    handle = store.put(data)
    assert fetch_here(handle) == data
    assert fetch_here(handle) is None
    assert store.n_bytes == 0


def test_many_threads_fetch_at_once() -> None:
    store = PayloadStore()
    store.serve(is_needed=False)
    handles = {store.put(i.to_bytes(4, "big") * 100_000): i for i in range(64)}
    with ThreadPoolExecutor(16) as threads:
        for handle, data in zip(handles, threads.map(fetch_here, handles), strict=True):
            assert data == handles[handle].to_bytes(4, "big") * 100_000


def test_a_process_that_was_killed_leaves_no_folder_and_its_client_asks_by_http(
    folder: Path,
) -> None:
    with sibling(folder, 60.0) as other:
        handle = other.stdout.readline().strip()
        assert is_here(handle.partition("-")[0])
        other.kill()
    with pytest.raises(NotHere):
        fetch_here(handle)
    assert not is_here(handle.partition("-")[0])
    temp_dirs.sweep()
    assert not list(folder.iterdir())


def test_a_client_that_was_killed_while_it_fetches_leaves_nothing(folder: Path) -> None:
    store = PayloadStore()
    store.serve(is_needed=False)
    handle = store.put(bytes(40_000_000))
    code = (
        "import sys, os, signal; from inspect_lens._base import same_host as s;"
        "s._received = lambda *_: os.kill(os.getpid(), signal.SIGKILL); s.fetch_here(sys.argv[1])"
    )
    environment = {**os.environ, "TMPDIR": str(folder)}
    ended = subprocess.run([sys.executable, "-c", code, handle], env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert until(lambda: store.n_bytes == 0)
    assert fetch_here(store.put(b"next")) == b"next"


def test_a_connection_that_the_server_closed_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(same_host, "_IDLE_S", 1)
    store = PayloadStore()
    store.serve(is_needed=False)
    assert fetch_here(store.put(b"first")) == b"first"
    time.sleep(1.5)
    assert fetch_here(store.put(b"second")) == b"second"


def test_what_was_fetched_is_held_no_longer() -> None:
    store = PayloadStore()
    store.serve(is_needed=False)
    data = memoryview(bytes(1000))
    seen = weakref.ref(data)
    handle = store.put(data)
    del data
    assert fetch_here(handle) == bytes(1000)
    assert until(lambda: seen() is None)


@pytest.mark.parametrize("says", ["nothing", "half"])
def test_a_server_that_does_not_answer_in_time_is_asked_once(says: str) -> None:
    name, asked = new_name(), list[str]()
    waits = threading.Event()

    class Half(bytes):
        def __len__(self) -> int:
            return 2 * super().__len__()

    def get(handle: str) -> bytes | None:
        asked.append(handle)
        if says == "nothing":
            waits.wait(20)
        return Half(b"late") if says == "half" else b"late"

    same_host.serve_here(name, get)
    for _ in range(3):
        same_host._kept.setdefault(name, []).append(same_host._connected(name))
    # Neither by another connection nor by HTTP.
    with pytest.raises(CaptureError, match=rf"'{name}-x': .* gave nothing for 0\.2 s"):
        fetch_result("http://127.0.0.1:9", {}, f"{name}-x", timeout_s=0.2)
    waits.set()
    # Its thread may have its turn only now.
    assert until(lambda: asked)
    assert asked == [f"{name}-x"]


def test_a_sibling_that_does_not_answer_is_a_504(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(handle: str) -> None:
        raise CaptureError(f"{handle}: slow")

    monkeypatch.setattr(payloads, "fetch_here", slow)
    answer = client.get("/v1/activations/ab12-x")
    assert (answer.status_code, "ab12-x: slow" in answer.text) == (504, True)


def test_connections_to_servers_that_have_ended_are_closed(folder: Path) -> None:
    names = []
    for _ in range(3):
        with sibling(folder, 60.0) as other:
            handle = other.stdout.readline().strip()
            assert fetch_here(handle)
            names.append(handle.partition("-")[0])
            other.kill()
    assert [len(same_host._kept[name]) for name in names] == [0, 0, 1]


FORKING = """
import os, sys, time
from inspect_lens._base import same_host
same_host.serve_here(sys.argv[1], lambda handle: b"x")
sys.stdin.readline()  # a client is connected
if not (child := os.fork()):
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


def test_a_forked_child_does_not_look_like_its_ended_server(folder: Path) -> None:
    name = new_name()
    with subprocess.Popen(
        [sys.executable, "-c", FORKING, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    ) as other:
        assert until(lambda: is_here(name))
        assert fetch_here(f"{name}-x") == b"x"
        other.stdin.write("\n")
        other.stdin.flush()
        child = int(other.stdout.readline())
        try:
            assert fetch_here(f"{name}-x") == b"x"
            other.kill()
            other.wait()
            with pytest.raises(NotHere):
                fetch_here(f"{name}-x", timeout_s=5)
            assert not is_here(name)
            temp_dirs.sweep()
            assert not list(folder.iterdir())
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("fault", ["mode", "link", "owner"])
def test_a_folder_that_others_may_have_made_is_not_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    store = PayloadStore()
    store.serve(is_needed=False)
    (own,) = folder.glob(f"*{store.name}")
    if fault == "mode":
        own.chmod(0o755)
    elif fault == "link":
        own.rename(folder / "elsewhere")
        own.symlink_to(folder / "elsewhere")
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(NotHere):
        fetch_here(store.put(b"x"))


@pytest.mark.parametrize("size", [-2, 1 << 62])
def test_a_size_that_no_result_has_is_not_believed(size: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        theirs.sendall(same_host._SIZE.pack(size))
        with pytest.raises(OSError, match="a result of"):
            same_host._asked(ours, "ab-x")


def test_without_a_folder_handles_are_given_by_http_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    alone, several = PayloadStore(), PayloadStore()
    alone.serve(is_needed=False)
    several.serve(is_needed=True)
    assert not alone.is_served
    assert alone.get(alone.put(b"x")) == b"x"
    with pytest.raises(UnsupportedError, match="use base64") as raised:
        several.put(b"x")
    assert "(No such file or directory)" in str(raised.value)


def test_a_client_of_this_host_takes_results_without_http() -> None:
    store = PayloadStore()
    store.serve(is_needed=False)
    handle = store.put(b"rows")
    assert fetch_result("http://127.0.0.1:9", {}, handle, timeout_s=60) == b"rows"
    with pytest.raises(CaptureError, match="expired, or was fetched before"):
        fetch_result("http://127.0.0.1:9", {}, handle, timeout_s=1)
    with pytest.raises(HTTPError):
        fetch_result("http://127.0.0.1:9", {}, "ab12-x", timeout_s=1)


def test_a_middleware_that_cannot_be_added_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class App(FastAPI):
        def add_middleware(self, middleware: Any, **options: Any) -> None:
            raise RuntimeError("no room")

    monkeypatch.setattr(server.logger, "propagate", True)
    server._routers((), lambda app: None)(App())
    (line,) = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert "bodies with lens keys are passed over" in line
    assert line.endswith("no room")
