"""A server starts as a process below this one, and nothing of it is left."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.kit.api_server import api_server
from tests.kit.child import ChildError

STUB = """
import http.server, subprocess, sys, time
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("last words", flush=True)
if "--fails" in sys.argv:
    sys.exit(3)
# One that does not end with the server, as after a crash.
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(child.pid).encode())
address = arguments["--host"], int(arguments["--port"])
http.server.HTTPServer(address, Answers).serve_forever()
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "stub" / "vllm" / "entrypoints" / "openai"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parent.parent):
        (package / "__init__.py").write_text("")
    (folder / "api_server.py").write_text(STUB)
    return {**os.environ, "PYTHONPATH": str(tmp_path / "stub")}


def test_a_server_is_ended_with_all_that_it_started(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    with api_server({"model": "m"}, environment=environment, log=tmp_path / "log") as made:
        with urllib.request.urlopen(f"{made.url}/health", timeout=5) as answer:
            child = psutil.Process(int(answer.read()))
        server = child.parent()
        assert server is not None
        assert server.pid == made.pid
        assert server.ppid() == os.getpid()
    gone = [not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in (child, server)]
    assert gone == [True, True]


def test_an_error_ends_it_too(tmp_path: Path, environment: dict[str, str]) -> None:
    before = set(psutil.Process().children(recursive=True))
    with (
        pytest.raises(ValueError, match="mine"),
        api_server({"model": "m"}, environment=environment, log=tmp_path / "log"),
    ):
        raise ValueError("mine")
    assert set(psutil.Process().children(recursive=True)) <= before


def test_one_that_does_not_start_is_told_with_its_last_words(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    options = {"model": "m", "fails": True}
    with (
        pytest.raises(ChildError, match="last words"),
        api_server(options, environment=environment, log=tmp_path / "log"),
    ):
        pass
