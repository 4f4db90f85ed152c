"""Children answer line by line whatever they print, and what a process tree holds is seen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from tests.kit.child import ROOT, Child, ChildError
from tests.kit.process_tree import cpu_clock, cpu_model, settled_usage, usage
from tests.kit.waiting import until

ECHO = """
import os, subprocess, sys, time
from tests.kit.child import requests_and_reply

commands, reply = requests_and_reply()
grandchild = subprocess.Popen(["sleep", "300"])
for command in commands:
    print("noise", flush=True)
    subprocess.run(["echo", "noise of a child"], check=True)
    if command["do"] == "echo":
        reply({"said": command["text"], "grandchild": grandchild.pid})
    elif command["do"] == "fail":
        reply({"error": "ValueError: no"})
    elif command["do"] == "die":
        sys.stderr.write("last words\\n")
        os._exit(3)
    else:
        time.sleep(60)
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    (tmp_path / "echo_child.py").write_text(ECHO)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    with Child("echo_child", environment=environment, log=tmp_path / "log") as made:
        yield made


def test_what_a_child_prints_is_in_the_log_and_not_in_its_answers(child: Child) -> None:
    for text in ("one", "two"):
        assert child.ask(30, do="echo", text=text)["said"] == text
    assert child.tail().count("noise of a child") == 2


def test_an_error_is_raised_and_the_child_goes_on(child: Child) -> None:
    with pytest.raises(ChildError, match="ValueError: no"):
        child.ask(30, do="fail")
    assert child.ask(30, do="echo", text="still")["said"] == "still"


def test_a_dead_child_is_reported_with_the_end_of_its_log(child: Child) -> None:
    with pytest.raises(ChildError, match="last words"):
        child.ask(30, do="die")


def test_a_late_answer_is_an_error_and_closing_ends_grandchildren(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.kit.child._STOP_S", 0.2)
    grandchild = child.ask(30, do="echo", text="")["grandchild"]
    with pytest.raises(ChildError, match="no answer after 0 s"):
        child.ask(0.3, do="sleep")
    process = psutil.Process(grandchild)
    child.close()
    # It is nobody's child now: ended, or ended and not yet collected.
    assert until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.timeout(300)
def test_a_paused_child_does_nothing_until_it_is_resumed_and_can_be_closed(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    grandchild = psutil.Process(child.ask(30, do="echo", text="")["grandchild"])
    child.pause()
    assert until(lambda: grandchild.status() == psutil.STATUS_STOPPED)
    child.send(do="echo", text="later")
    with pytest.raises(ChildError, match="no answer"):
        child.receive(0.5)
    child.resume()
    assert child.receive(30)["said"] == "later"
    child.pause()
    monkeypatch.setattr("tests.kit.child._STOP_S", 600)
    child.close()
    assert not psutil.pid_exists(child.pid)


PARENT = """
import os, sys, time
from pathlib import Path
from tests.kit.child import Child

child = Child("echo_child", environment=os.environ, log=Path(sys.argv[1]))
grandchild = child.ask(30, do="echo", text="")["grandchild"]
child.{way}
print(child.pid, grandchild, flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("way", ["pause()", "send(do='sleep')"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_and_what_it_started_end_with_their_parent(
    tmp_path: Path, number: int, way: str
) -> None:
    (tmp_path / "echo_child.py").write_text(ECHO)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", PARENT.format(way=way), str(tmp_path / "log")]
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        below = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(below) == 2
    parent.send_signal(number)
    parent.wait()
    assert psutil.wait_procs(below, timeout=8)[1] == []


SERVER = """
import os, sys
from pathlib import Path
from tests.kit.api_server import api_server

# No server loads our plug-in here, as that of a peer does not.
inside = ["sh", "-c", "sleep 301"]
with api_server({}, environment=os.environ, log=Path(sys.argv[1]), inside=inside):
    pass
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_server_without_the_plug_in_ends_with_whoever_started_it(
    tmp_path: Path, number: int
) -> None:
    command = [sys.executable, "-c", SERVER, str(tmp_path / "log")]
    parent = psutil.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)

    def sleeping() -> list[psutil.Process]:
        # Before it becomes another program, a child has its parent's words, these among them.
        words = {p: p.cmdline() for p in parent.children(recursive=True)}
        return [p for p, w in words.items() if "sleep 301" in " ".join(w) and w[0] != command[0]]

    # The server, and who watches the parent.
    assert until(lambda: sleeping() and len(parent.children()) > 1)
    below = sleeping()
    parent.send_signal(number)
    parent.wait()
    assert psutil.wait_procs(below, timeout=8)[1] == []


def test_shared_memory_and_descriptors_are_counted_once() -> None:
    before = usage(os.getpid())
    memory = SharedMemory(create=True, size=1 << 20)
    again = SharedMemory(memory.name)
    try:
        held = settled_usage(os.getpid())
        assert held.shared_bytes - before.shared_bytes == 1 << 20
        assert held.descriptors > before.descriptors
    finally:
        again.close()
        memory.close()
        memory.unlink()
    assert usage(os.getpid()).shared_bytes == before.shared_bytes


def test_processor_time_is_told_by_process_and_of_now_alone() -> None:
    title = "import setproctitle\nsetproctitle.setproctitle('VLLM::EngineCore')\nwhile True: pass"
    ways = (["-m", "timeit", "-n", "1", "while True: pass"], ["-c", title])
    busy = [psutil.Popen([sys.executable, *words], stdout=-3, stderr=-3) for words in ways]
    idle = psutil.Popen(["sleep", "300"])
    try:
        used = cpu_clock({os.getpid(): "client", busy[0].pid: "API server"})
        assert until(lambda: {"API server", "EngineCore"} <= set(used()))
        assert set(used()) <= {"API server", "EngineCore", "client"}
        named = cpu_clock({os.getpid(): "client"})
        assert until(lambda: "timeit" in named())
    finally:
        for process in (*busy, idle):
            process.kill()
            process.wait()


def test_the_processor_has_a_name_where_linux_tells_it() -> None:
    text = Path("/proc/cpuinfo").read_text()
    assert cpu_model() in text
